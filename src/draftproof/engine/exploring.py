"""Exploring: a drafter with a model that rests is tried with new requests now and then.

While it rests nothing tells what its drafts take and whether they are right: what was known fades, and what the profile
and the prior say may keep it at rest for good where its drafts pay.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.engine.acceptance import AcceptanceRecord

# Each trial after which the drafter rests makes the next need so many times as much in the savings, at most `DEAREST`.
DEARER, DEAREST = 2.0, 8.0


@dataclass(slots=True)
class Exploring:
    """Trials: the drafter sees the prompts of the new requests that will soon decode together, and makes drafts for
    them in the hope that they are right more often than expected, which soon gives way to what is counted. All take
    part, if what was saved at first covers their prompts: some prompts alone would have been shown in vain.

    Losses and savings are in plain steps."""

    is_running: bool = False
    _number: int = 0  # trials so far
    _num_left: int = 0  # requests that may still join
    _num_joined: int = 0
    _latest: int = 0  # arrival of the last request that may join
    _to_spend: float = 0.0  # on prompts of those that join
    _times: float = 1.0  # that a trial's loss must be saved

    def begin(
        self, num_new: int, arrival: int, to_lose: float, to_spend: float, most_to_spend: float
    ) -> None:
        """Begin a trial of `num_new` requests, the first of which has this `arrival`, if `to_spend`, at some time
        `most_to_spend`, allows for what it may lose. One that still runs has come to nothing."""
        self.end()
        if min(self._times * to_lose, max(to_lose, most_to_spend)) <= to_spend:
            self.is_running = True
            self._number += 1
            self._num_left, self._num_joined = num_new, 0
            self._latest = arrival + num_new - 1
            self._to_spend = to_spend

    def is_tried(self, record: AcceptanceRecord) -> bool:
        """Whether a request takes part in the trial that runs."""
        return self.is_running and record.trial == self._number

    def join(self, record: AcceptanceRecord, arrival: int, price: float) -> bool:
        """Have a request take part, if it may. Returns whether it does. `price`: what showing its prompt takes."""
        is_early_enough = self._num_left > 0 and arrival <= self._latest
        if not self.is_running or not is_early_enough or price > self._to_spend:
            return False
        self._num_left -= 1
        self._num_joined += 1
        self._to_spend -= price
        record.trial = self._number
        return True

    def lose(self, num_requests: int) -> None:
        """So many requests that take part get no drafts now. If that is most of them, the trial ends."""
        if 2 * num_requests >= self._num_joined:
            self.end()

    def end(self, *, pays: bool = False) -> None:
        """End the trial, if one runs. `pays`: drafts are made without one now."""
        if pays:
            self._times = 1.0
        elif self.is_running:
            self._times = min(DEAREST, DEARER * self._times)
        self.is_running = False
