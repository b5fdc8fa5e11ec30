"""DFlash: a block of masks is filled in one pass, over keys and values of target states. arXiv 2602.06036."""

from __future__ import annotations

from draftproof.drafters.block import BlockNetwork, BlockSettings, drafter
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter


def build(ctx: DraftContext) -> HeadDrafter:
    return drafter(ctx, BlockNetwork(ctx, ctx.settings(BlockSettings)))
