"""Other engines' rules for the number of drafts, to compare ours with: vLLM's and SGLang's.

Written from the projects' documentation (vLLM: num_speculative_tokens_per_batch_size; SGLang: --speculative-adaptive,
defaults of 2026-11).
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.engine.costs import StepOutcome
from draftproof.engine.policy import FixedPolicy
from draftproof.engine.progress import Progress

# SGLang's slots: (minimum batch size, allowed numbers of drafts).
SLOTS = ((1, (1, 3, 5, 7)), (8, (0, 1, 3)), (32, (0, 1)), (64, (0,)))


class BatchTable(FixedPolicy):
    """vLLM: the number of drafts by the number of requests. `table`: (max requests, drafts), ascending; beyond it 0."""

    def __init__(self, table: Sequence[tuple[int, int]]) -> None:
        super().__init__(max(num_drafts for _, num_drafts in table))  # the drafter sees every prompt
        self._table = table

    def at(self, num_requests: int) -> int:
        return next((k for most, k in self._table if num_requests <= most), 0)

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        return [self.at(len(asked) + num_others)] * len(asked)


def table_up_to(most: int) -> BatchTable:
    """A table such as one would write for a drafter of at most `most` drafts."""
    return BatchTable([(8, most), (32, max(1, most // 2)), (64, 1)])


class AverageAcceptance(FixedPolicy):
    """SGLang: for each slot of batch sizes, a moving average of accepted drafts per round moves the number up and down
    among the slot's; from 0 the smallest is tried again."""

    RATE, WARM_UP, EVERY, DOWN = 0.2, 10, 5, {1: -0.25}
    report_every = plain_every = 1

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._slots = [(low, [k for k in numbers if k <= most] or [0]) for low, numbers in SLOTS]
        self._place = [len(numbers) // 2 for _, numbers in self._slots]
        self._average = [float(numbers[len(numbers) // 2]) / 2 for _, numbers in self._slots]
        self._num_batches = [0] * len(self._slots)
        self._slot = 0
        self._accepted: list[int] = []

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        number = len(asked) + num_others
        self._slot = max(i for i, (low, _) in enumerate(self._slots) if number >= low) if number else 0
        return [self._slots[self._slot][1][self._place[self._slot]]] * len(asked)

    def num_repeats(self) -> int:
        return 0  # each step may change the number

    def verified(
        self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool = True
    ) -> None:
        self._accepted.append(num_accepted)

    def finished(self, step: StepOutcome) -> None:
        i, accepted = self._slot, self._accepted
        self._accepted = []
        low, numbers = self._slots[i]
        self._num_batches[i] += 1
        if accepted:
            mean = sum(accepted) / len(accepted)
            self._average[i] += self.RATE * (mean - self._average[i])
        if self._num_batches[i] <= self.WARM_UP or self._num_batches[i] % self.EVERY:
            return
        place = self._place[i]
        if numbers[place] == 0 and len(numbers) > 1:
            self._place[i] = place + 1
        elif place and self._average[i] <= numbers[place - 1] - 0.5 + self.DOWN.get(low, 0.0):
            self._place[i] = place - 1
        elif place + 1 < len(numbers) and self._average[i] > numbers[place] - 0.5:
            self._place[i] = place + 1
