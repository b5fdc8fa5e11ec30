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
    """Trials: the drafter sees the prompts of as many new requests as will soon decode together, and makes drafts for
    them in the hope that they are right more often than expected, which soon gives way to what is counted. All take
    part, whatever is saved once the first prompts are paid for: these would else have been shown in vain."""

    num_left: int = 0  # requests that may still join the trial
    _times: float = 1.0  # that a trial's loss must be saved

    def begin(self, num_requests: int, to_lose: float, to_spend: float, most_to_spend: float) -> None:
        """Begin a trial of so many requests if `to_spend`, at some time `most_to_spend`, allows for what it may lose,
        all in plain steps."""
        if min(self._times * to_lose, max(to_lose, most_to_spend)) <= to_spend:
            self.num_left = num_requests
            self._times = min(DEAREST, DEARER * self._times)

    def join(self, record: AcceptanceRecord) -> bool:
        """Have a request take part, if there is a trial. Returns whether it does: a prompt may take several steps."""
        if self.num_left and not record.is_tried:
            self.num_left -= 1
            record.is_tried = True
        return record.is_tried

    def end(self, *, pays: bool = False) -> None:
        """Let nobody join any more. `pays`: drafts are made without a trial now."""
        self.num_left = 0
        if pays:
            self._times = 1.0
