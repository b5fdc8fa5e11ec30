"""Forced text: where a request's grammar leaves no choice, the tokens that must come next are its drafts.

The engine's host half knows the grammars, and puts these tokens in the place of other drafts before a pass: this
drafter stands for them among the others, with its number of tokens, and proposes nothing on the device.
"""

from __future__ import annotations

import torch

from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext


class ForcedDrafter(Drafter):
    """The member of a chain that forced text is counted under. In memory that stays, so that passes can be recorded."""

    spec = DraftSpec(forced=True)

    def bind(self, runtime: DraftRuntime) -> None:
        assert runtime.known is not None
        self._nothing_S = torch.zeros_like(runtime.known.length_S)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        nothing_R = self._nothing_S[: verified.num_requests]
        return Proposal(nothing_R[:, None][:, :0], nothing_R)


def build(ctx: DraftContext) -> ForcedDrafter:
    return ForcedDrafter()
