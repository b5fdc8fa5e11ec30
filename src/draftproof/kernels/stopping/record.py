"""What became of drafts by the drafter's own confidence: the memory of `Stopping`.

Shapes: S slots, W drafts that are kept, B bins of confidence.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Upper ends of the bins but the last. Confidence is the probability that the drafter gives its likeliest token.
ENDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
# Prior chance of a draft in each bin: what the drafter says. In recordings of EAGLE-3, MTP and a draft model learned
# chances differ from it by 0.1 to 0.2 where outputs are sampled, and by less where not.
EXPECTED = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.94, 0.985)
PRIOR_WEIGHT = 4.0  # in trials
MEMORY = 0.998  # weight that the past keeps with each proposal that is compared
MOST_KEPT = 16  # drafts of a proposal that are compared with the tokens known later


@dataclass(frozen=True, slots=True)
class StopRecord:
    """What became of earlier proposals, and the state of the one that is being made. `drafts_SW`, `bins_SW`: int64, the
    last proposal for each slot, and the bin of each draft; `open_S2`: int64, the number of tokens known then, and its
    number of drafts (0: no proposal). `hits_B`, `trials_B`: float64, drafts that were right and all drafts, by bin,
    weighted. `survival_S`: float64, the chance that all drafts so far are right; 0: the proposal has ended.
    `is_over_1`: int64, not 0 if no further draft is to be made for any request."""

    drafts_SW: Tensor
    bins_SW: Tensor
    open_S2: Tensor
    survival_S: Tensor
    hits_B: Tensor
    trials_B: Tensor
    is_over_1: Tensor
    ends_B: Tensor
    expected_B: Tensor

    @classmethod
    def empty(cls, num_slots: int) -> StopRecord:
        kept, num_bins = (num_slots, MOST_KEPT), len(EXPECTED)
        return cls(
            torch.zeros(kept, dtype=torch.int64),
            torch.zeros(kept, dtype=torch.int64),
            torch.zeros((num_slots, 2), dtype=torch.int64),
            torch.zeros(num_slots, dtype=torch.float64),
            torch.zeros(num_bins, dtype=torch.float64),
            torch.zeros(num_bins, dtype=torch.float64),
            torch.zeros(1, dtype=torch.int64),
            torch.tensor(ENDS, dtype=torch.float32),
            torch.tensor(EXPECTED, dtype=torch.float64),
        )

    def count(self, bins: Sequence[int], num_right: int) -> None:
        """Count a proposal of whose drafts the first `num_right` are right. `bins`: of these, and of the one after them
        if it is known to be wrong."""
        self.hits_B.mul_(MEMORY)
        self.trials_B.mul_(MEMORY)
        for number, its_bin in enumerate(bins):
            self.trials_B[its_bin] += 1.0
            if number < num_right:
                self.hits_B[its_bin] += 1.0

    def chances(self) -> list[float]:
        """Chance of a draft by its bin, shrunk towards what the drafter says."""
        found = (self.hits_B + PRIOR_WEIGHT * self.expected_B) / (self.trials_B + PRIOR_WEIGHT)
        return [float(chance) for chance in found]

    def close(self, slot: int) -> None:
        """Drop a slot's last proposal: another request has taken the slot."""
        self.open_S2[slot] = 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.drafts_SW,
            self.bins_SW,
            self.open_S2,
            self.survival_S,
            self.hits_B,
            self.trials_B,
            self.is_over_1,
            self.ends_B,
            self.expected_B,
        )


def bin_of(confidence: float) -> int:
    return bisect.bisect_left(ENDS, confidence)
