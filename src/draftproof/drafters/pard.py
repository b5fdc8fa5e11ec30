"""PARD: a draft model trained to fill mask tokens, so that one pass drafts all tokens. arXiv 2504.18583."""

from __future__ import annotations

from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter, HeadLayout
from draftproof.drafters.model_head import DraftModelHead, DraftModelSettings, load
from draftproof.drafters.parallel import Parallel
from draftproof.drafters.validation import checked_mask_token


def build(ctx: DraftContext) -> HeadDrafter:
    decoder = load(ctx)
    layout = HeadLayout(
        context="all",
        anchor=True,
        masks=ctx.num_drafts - 1,
        mask_token=checked_mask_token(ctx, ctx.settings(DraftModelSettings).mask_token),
    )
    head = DraftModelHead(decoder, layout)
    return HeadDrafter(head, Parallel(head))
