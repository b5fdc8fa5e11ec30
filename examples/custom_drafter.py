"""A drafter of your own: propose what followed the newest token the last time it appeared.

    draftproof verify --speculative-config '{"method": "examples.custom_drafter.LastSeen"}'

proves that it does not change the output, and counts how many of its drafts were accepted.
"""

from __future__ import annotations

import torch

from draftproof import DraftSpec, EngineConfig, Proposal, Verified


class LastSeen:
    spec = DraftSpec(host_tokens=True)  # it needs the known tokens, and nothing of the target

    def __init__(self, config: EngineConfig) -> None:
        """Called once, with the engine's settings."""

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """Called after every pass: returns up to `num_drafts` tokens for each request, or fewer, or none."""
        num_requests = verified.num_requests
        tokens_RK = torch.zeros(num_requests, num_drafts, dtype=torch.int64)
        count_R = torch.zeros(num_requests, dtype=torch.int64)
        for r in range(num_requests):
            known = verified.history(r).tolist()
            earlier = [i for i in range(len(known) - 1) if known[i] == known[-1]]
            if earlier:
                found = known[earlier[-1] + 1 :][:num_drafts]
                tokens_RK[r, : len(found)] = torch.tensor(found)
                count_R[r] = len(found)
        return Proposal(tokens_RK, count_R)
