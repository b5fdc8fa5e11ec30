"""PARD: a draft model that was trained to fill mask tokens, so that one pass drafts all tokens. arXiv 2504.18583."""

from __future__ import annotations

from draftproof.drafters.base import DraftSpec, InputLayout
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model_head import DraftModelHead, DraftModelSettings, load
from draftproof.drafters.parallel import Parallel
from draftproof.drafters.validation import checked_mask_token


def build(ctx: DraftContext) -> HeadDrafter:
    decoder = load(ctx)
    spec = DraftSpec(
        layout=lambda k: InputLayout(context="all", anchor=True, masks=k - 1),
        kv=decoder.kv,
        mask_token=checked_mask_token(ctx, ctx.settings(DraftModelSettings).mask_token),
    )
    head = DraftModelHead(decoder, spec)
    return HeadDrafter(head, ctx.num_drafts, Parallel(head, ctx.num_drafts))
