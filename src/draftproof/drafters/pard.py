"""PARD: a draft model that was trained to fill mask tokens, so that one pass drafts all tokens. arXiv 2504.18583."""

from __future__ import annotations

from draftproof.drafters.base import DraftSpec, InputLayout
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import checked_mask_token
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.model_head import DraftModelHead, DraftModelSettings, load
from draftproof.drafters.parallel import Parallel


def build(given: DraftBuild) -> HeadDrafter:
    decoder = load(given)
    spec = DraftSpec(
        layout=lambda k: InputLayout(context="all", anchor=True, masks=k - 1),
        kv=decoder.kv,
        mask_token=checked_mask_token(given, given.settings(DraftModelSettings).mask_token),
    )
    head = DraftModelHead(decoder, spec)
    return HeadDrafter(head, given.num_drafts, Parallel(head, given.num_drafts))
