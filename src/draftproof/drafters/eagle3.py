"""EAGLE-3: one layer (or more) that reads fused target states and its own feedback. Li et al., arXiv 2503.01840."""

from __future__ import annotations

from draftproof.drafters.base import DraftSpec
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter, HeadLayout, Recurrent
from draftproof.drafters.tapped import TappedNetwork, TappedSettings, tapped
from draftproof.drafters.validation import check_leftovers


def build(ctx: DraftContext) -> HeadDrafter:
    layers = ctx.settings(TappedSettings).layers
    spec = DraftSpec(
        taps=tapped(ctx),
        kv=layers.caches,
        attention=layers.attention_shapes,
        takes_embeddings=ctx.takes_embeddings(layers.hidden_size),
    )
    head = TappedNetwork(ctx, spec, HeadLayout(context="all", shift=1))
    check_leftovers(ctx)
    return HeadDrafter(head, Recurrent(head, leaves_rows=layers.may_leave_rows))
