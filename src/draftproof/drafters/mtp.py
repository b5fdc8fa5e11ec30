"""MTP: one trained prediction module behind the target, used again for every further token.

DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.drafters.base import Taps
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fused import FusedHead, Norms
from draftproof.drafters.head import HeadDrafter
from draftproof.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSettings:
    """`layers`: the module's one decoder layer; `target_layers`: how many its target has, as its config says."""

    layers: ModelConfig
    target_layers: int


def build(given: DraftBuild) -> HeadDrafter:
    """This form is trained on the target's last state before the final norm."""
    s, num_layers = given.settings(MtpSettings), given.target.config.num_layers
    assert given.checkpoint is not None
    if s.target_layers != num_layers:
        raise ValueError(
            f"{given.checkpoint.where}: num_hidden_layers={s.target_layers} of the model it was trained for, but the "
            f"target has {num_layers}; this draft head belongs to another target"
        )
    norms = Norms(embed=True, hidden=True, input=True, final=True)
    return HeadDrafter(FusedHead(given, s.layers, Taps(layers=(num_layers,)), norms), given.num_drafts)
