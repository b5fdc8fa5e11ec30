"""Forced text: where a request's grammar allows only one continuation, those tokens are its drafts.

The engine's host half knows the grammars and replaces other drafts by these tokens before a pass. This drafter is their
entry in a chain (name, number of tokens, counters) and proposes nothing on the device.
"""

from __future__ import annotations

import torch

from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext


class ForcedDrafter(Drafter):
    """The chain member that forced text is counted under. Its empty proposal has fixed storage, so that passes can be
    recorded."""

    spec = DraftSpec(forced=True)

    def bind(self, runtime: DraftRuntime) -> None:
        assert runtime.known is not None
        self._nothing_S = torch.zeros_like(runtime.known.length_S)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        nothing_R = self._nothing_S[: verified.num_requests]
        return Proposal(nothing_R[:, None][:, :0], nothing_R)


def build(ctx: DraftContext) -> ForcedDrafter:
    return ForcedDrafter()
