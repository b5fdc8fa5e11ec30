"""A drafter that drafts for short texts only: `max_model_len` of a speculative_config.

Shapes: R requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from draftproof.drafters.base import Drafter, DraftRuntime, Proposal, RoundSize, Verified, name_of
from draftproof.models.cost import Cost


class ShortTexts(Drafter):
    """A drafter around another: no draft has position `max_model_len` or later. The inner one still sees every round,
    so its state stays up to date."""

    def __init__(self, drafter: Drafter, max_model_len: int) -> None:
        self.spec = drafter.spec
        self.name = name_of(drafter)
        self._drafter = drafter
        self._max_model_len = max_model_len
        self._host_looks = False

    def bind(self, runtime: DraftRuntime) -> None:
        self._host_looks = runtime.host_looks
        self._drafter.bind(runtime)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self._drafter.admit(slot, tokens, num_cached)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        last_R = verified.query_start_loc_R1[:-1] + verified.live_R - 1
        num_known_R = verified.positions_T[last_R] + 2  # the rows' tokens and the next one
        k_R = torch.minimum(verified.k_R, (self._max_model_len - num_known_R).clamp(min=0))
        if self._host_looks:
            num_drafts = int(k_R.max()) if len(k_R) else 0
        proposal = self._drafter.propose(dataclasses.replace(verified, k_R=k_R), num_drafts)
        return Proposal(proposal.tokens_RK, torch.minimum(proposal.count_R, k_R))

    def cost(self, size: RoundSize) -> Cost | None:
        """Cost of a round in which no text is too long."""
        return self._drafter.cost(size)
