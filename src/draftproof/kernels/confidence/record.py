"""What became of proposals that were copied from earlier text: the memory of `Confidence`.

Shapes: S slots, W drafts at most, M numbers of matching tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_MATCHED = 16  # longer suffixes count as this long
MEMORY = 0.998  # weight that the past keeps with each proposal that is compared


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

    def count(self, matched: int, num_right: int, num_known: int) -> None:
        """Count a proposal after `matched` tokens, of whose drafts the tokens at the first `num_known` places are known
        and the first `num_right` are right."""
        self.hits_M.mul_(MEMORY)
        self.trials_M.mul_(MEMORY)
        self.hits_M[matched : matched + num_right] += 1.0
        self.trials_M[matched : matched + min(num_right + 1, num_known)] += 1.0

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
