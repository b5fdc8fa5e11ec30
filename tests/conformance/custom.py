"""A user's drafter for the conformance suite: proposes the newest token again and again, now and then nothing."""

from __future__ import annotations

import torch

from draftproof import DraftSpec, EngineConfig, Proposal, Taps, Verified


class Repeat:
    spec = DraftSpec(taps=Taps(layers=(0, 8), final=True))

    def __init__(self, config: EngineConfig) -> None:
        self.rounds = 0

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.rounds += 1
        assert [tuple(t.shape) for t in verified.taps] == [(len(verified.tokens_T), 256)] * 3
        tokens_RK = verified.next_R[:, None].expand(-1, num_drafts).clone()
        return Proposal(tokens_RK, torch.full_like(verified.k_R, num_drafts if self.rounds % 3 else 0))
