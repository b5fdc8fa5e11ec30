"""EAGLE-1: one layer that predicts the target's next state from its last one. Li et al., arXiv 2401.15077.

EAGLE-2 and HASS heads are the same network, trained differently.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.drafters.base import Taps
from draftproof.drafters.context import DraftContext
from draftproof.drafters.fused import FusedHead, Norms
from draftproof.drafters.head import HeadDrafter, Recurrent
from draftproof.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Settings:
    """Settings of a head. `layers`: the draft's own decoder layers. `norms`: the variant that norms embedding, input
    and output; the original norms none of them. Neither norms the state."""

    layers: ModelConfig
    fc_bias: bool
    norms: bool = False


def build(ctx: DraftContext) -> HeadDrafter:
    s = ctx.settings(Eagle1Settings)
    norms = Norms(embed=s.norms, hidden=False, input=s.norms, final=s.norms)
    head = FusedHead(ctx, s.layers, Taps(final=True), norms, fc_bias=s.fc_bias)
    return HeadDrafter(head, Recurrent(head, leaves_rows=s.layers.may_leave_rows))
