"""A user's drafter for the conformance suite: the example's drafts with taps declared, and sometimes no drafts."""

from __future__ import annotations

import dataclasses

from draftproof import DraftSpec, Proposal, Taps, Verified
from examples.custom_drafter import LastSeen


class Moody(LastSeen):
    spec = DraftSpec(taps=Taps(layers=(0, 8), final=True), host_tokens=True)
    rounds = 0

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.rounds += 1
        assert [tuple(t.shape) for t in verified.taps] == [(len(verified.tokens_T), 256)] * 3
        proposal = super().propose(verified, num_drafts)
        return dataclasses.replace(proposal, count_R=proposal.count_R * (self.rounds % 3 > 0))
