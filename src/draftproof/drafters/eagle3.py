"""EAGLE-3: one layer (or more) that reads fused target states and its own feedback. Li et al., arXiv 2503.01840."""

from __future__ import annotations

from draftproof.drafters.base import DraftSpec, InputLayout
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import check_leftovers
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.tapped import TappedNetwork, TappedSettings, tapped
from draftproof.models.decoder import kv_shapes


def build(given: DraftBuild) -> HeadDrafter:
    spec = DraftSpec(
        taps=tapped(given),
        layout=lambda _: InputLayout(context="all", shift=1),
        kv=kv_shapes(given.settings(TappedSettings).layers),
    )
    head = TappedNetwork(given, spec)
    check_leftovers(given)
    return HeadDrafter(head, given.num_drafts)
