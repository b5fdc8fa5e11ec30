"""What became of proposals that were copied from earlier text: the memory of `Confidence`.

Shapes: S slots, W drafts at most, B branchings, M numbers of matching tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

MOST_MATCHED = 16  # longer suffixes count as this long
MEMORY = 0.998  # weight that the past keeps with each proposal that is compared


class Branching(IntEnum):
    """How earlier text went on at the two latest places with the two tokens before a draft. It tells of a draft what
    the number of matching tokens does not: whether there is more than one way to go on. In outputs of `tiny`
    one in seven drafts is left out by it, and hardly any that would have been accepted."""

    UNKNOWN = 0  # there are no two such places
    ALIKE = 1
    DIFFERENT = 2


@dataclass(frozen=True, slots=True)
class MatchRecord:
    """What became of earlier proposals. `drafts_SW`: int64, the last proposal for each slot before it was cut;
    `open_S3`: int64, the number of tokens known then, its number of drafts (0: no proposal) and of matching tokens
    before it. `hits_BM`, `trials_BM`: float64, drafts that were right and all drafts, by `Branching` and matching
    tokens before them, weighted."""

    drafts_SW: Tensor
    open_S3: Tensor
    hits_BM: Tensor
    trials_BM: Tensor

    @classmethod
    def empty(cls, num_slots: int, num_drafts: int) -> MatchRecord:
        size = len(Branching), MOST_MATCHED + num_drafts
        return cls(
            torch.zeros((num_slots, num_drafts), dtype=torch.int64),
            torch.zeros((num_slots, 3), dtype=torch.int64),
            torch.zeros(size, dtype=torch.float64),
            torch.zeros(size, dtype=torch.float64),
        )

    def count(self, matched: int, branchings: Sequence[Branching], num_right: int) -> None:
        """Count a proposal after `matched` tokens, of whose drafts the first `num_right` are right. `branchings`: at
        each draft that counts, these and the one after them if it is known to be wrong."""
        self.hits_BM.mul_(MEMORY)
        self.trials_BM.mul_(MEMORY)
        for number, branching in enumerate(branchings):
            self.trials_BM[branching, matched + number] += 1.0
            if number < num_right:
                self.hits_BM[branching, matched + number] += 1.0

    def close(self, slot: int) -> None:
        """Drop a slot's last proposal: another request has taken the slot."""
        self.open_S3[slot] = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.drafts_SW, self.open_S3, self.hits_BM, self.trials_BM

    def clear(self) -> None:
        """Forget everything, in place: recorded passes hold the addresses."""
        for kept in self.tensors:
            kept.zero_()
