"""Confidence in drafts that were copied from earlier text: its interface and versions.

A copied draft is likelier to be right the more tokens before it match: those of the suffix that was looked up, and the
drafts between. How likely is learned from what became of earlier proposals, verified or not.

Shapes: S slots, L positions, R requests, K drafts, W drafts at most, M numbers of matching tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftproof.kernels.confidence.compiled import ConfidenceCompiled
from draftproof.kernels.confidence.reference import MOST_MATCHED, confidence_torch
from draftproof.kernels.versions import Versions


@dataclass(frozen=True, slots=True)
class MatchRecord:
    """What became of earlier proposals. `drafts_SW`: int64, the last proposal for each slot before it was cut;
    `open_S3`: int64, the number of tokens known then, its number of drafts (0: no proposal) and of matching tokens
    before it. `hits_M`, `trials_M`: float64, drafts that were right and all drafts, by matching tokens before them,
    weighted."""

    drafts_SW: Tensor
    open_S3: Tensor
    hits_M: Tensor
    trials_M: Tensor

    @classmethod
    def empty(cls, num_slots: int, num_drafts: int) -> MatchRecord:
        num_matched = MOST_MATCHED + num_drafts
        return cls(
            torch.zeros((num_slots, num_drafts), dtype=torch.int64),
            torch.zeros((num_slots, 3), dtype=torch.int64),
            torch.zeros(num_matched, dtype=torch.float64),
            torch.zeros(num_matched, dtype=torch.float64),
        )

    def close(self, slot: int) -> None:
        """Drop a slot's last proposal: another request has taken the slot."""
        self.open_S3[slot] = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.drafts_SW, self.open_S3, self.hits_M, self.trials_M

    def clear(self) -> None:
        """Forget everything, in place: recorded passes hold the addresses."""
        for kept in self.tensors:
            kept.zero_()


class Confidence(Protocol):
    def __call__(
        self,
        tokens_SL: Tensor,  # int32, tokens of every slot
        length_S: Tensor,  # int64: number of known tokens
        slots_R: Tensor,  # int64, each at most once
        tokens_RK: Tensor,  # int64: drafts
        count_R: Tensor,  # int64: number of drafts
        matched_R: Tensor,  # int64: matching tokens before the first draft
        price: Tensor,  # fp32 [2]: see `DraftRuntime.price`
        record: MatchRecord,
    ) -> Tensor:
        """Compare each slot's last proposal with the tokens known since, keep the new one, and return the number of
        drafts before the first that does not pay. Where each draft pays, none is compared or kept.

        Example: of three drafts after two matching tokens the first was right and the second wrong. Then drafts after
        two have one hit more, and drafts after three one miss.
        """
        ...


CONFIDENCE: Versions[Confidence] = Versions(confidence_torch, compiled=ConfidenceCompiled, triton=None)
