"""Probes: now and then some steps have no drafts, to find out what such steps take."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

from draftproof.engine.costs import StepCosts, StepOutcome, median_step
from draftproof.engine.draft_choice import DraftChoice

# While all steps draft nothing tells what plain ones take, and a profile that is off by a few per cent decides whether
# drafts pay. So now and then a few steps have no drafts: the more often the less is lost by them, which is about this
# share of the time. The first comes earlier where it tells for sure: a profile does not know the host's part of plain
# steps. A drafter with a model still sees these, so as not to miss their rows, and takes the target's weights out of
# the caches. So what they take besides is only a bound: it counts if it is clearly less than expected. With a lookup,
# steps that ask it and verify nothing tell nearly as much as probes.
PROBED_STEPS, PROBED_SHARE = 6, 0.002
# A lookup's are not seen, so each tells, but not for long: where memory is shared with other programs, plain steps take
# up to twice as long for seconds, and those with many rows hardly longer. And one is off by a tenth. So they may take
# more of the time, and after the first the next come sooner by this, divided by how many there were. Example: suffix
# drafting for one of `small` was believed to gain 4.5 and gained 3.7, with eight long probes 3.9 and 4.1.
LOOKUPS_SHARE, SOONER = 0.003, 4.0
# Where drafts are believed to gain less than `DOUBTFUL`, an error of the costs decides whether they pay, and only a
# probe ends it: time that all steps take too long is put down to the machine's pace. So there the first three of a
# drafter with a model come sooner, up to four times. Example: MTP for four of `tiny`, steps with one draft believed to
# take 1.17 of a plain one and taking 1.36, reached 0.92 of plain decoding's speed until its first probe, in the tenth
# batch of requests.
DOUBTFUL, DOUBTED_SOONER = 1.25, 4.0
# The first of them do not count: after steps of many rows those of one are longer (`profile.SETTLING`). Suffix drafting
# for one request of `small`: 1.31 ms for the target's pass, 1.06 where all steps are plain.
NUM_SETTLING = 3
NUM_COUNTED = PROBED_STEPS - NUM_SETTLING
# Where a lookup drafts for several requests, whose steps have many rows, steps of so many seconds do not count, at most
# so many. Example: suffix drafting for four of `tiny`: 1.49, 1.36, 1.31, 1.23, 1.17, 1.17, 1.15, 1.05 ms after steps of
# 68 rows, and 1.03 from then on. Plain steps for 64 take 9 ms; eleven of them are a ninth of a text's time.
SETTLING_SECONDS, MOST_SETTLING = 0.01, 8
CLEARLY_LESS = 0.95
# Steps with drafts before a probe, at least; of a lookup also as many as take as long as so many plain ones. Example:
# suffix drafting for 16 of `small`, ten steps a text, each as long as ten plain ones: after two texts instead of seven.
FEWEST_APART, SHORTEST_APART = 64, 128


@dataclass(slots=True)
class Probes:
    """When probes are due, and the steps of the one that runs. `is_seen`: the drafter sees the steps."""

    costs: StepCosts
    is_seen: bool
    steps: list[StepOutcome] = field(default_factory=list)  # those that count, of about as many requests
    # steps with drafts since one had none, by the bit length of the number of requests
    _num_drafted: dict[int, int] = field(default_factory=dict)
    _num_probes: Counter[int] = field(default_factory=Counter)  # by the same
    # bit lengths of the numbers of requests with which there were plain steps
    _known: set[int] = field(default_factory=set)

    def is_due(self, choice: DraftChoice, num_requests: int, num_steps: int = 0) -> bool:
        """Whether a probe is due instead of this choice, which has drafts, after `num_steps` steps with drafts that are
        yet to be counted."""
        about_as_many = num_requests.bit_length()
        num_drafted = self._num_drafted.get(about_as_many, 0) + num_steps
        plain = choice.plain_seconds
        is_long = not self.is_seen and num_drafted * choice.seconds >= SHORTEST_APART * plain
        if num_drafted < FEWEST_APART and not is_long:
            return False
        if about_as_many not in self._known and not self.is_seen:
            return True
        # plain steps that each step loses, where one with drafts stands for so many
        num_plain = choice.speed * choice.seconds / num_requests
        gain = choice.speed * plain / num_requests
        lost, num_probes = gain - 1.0, self._num_probes[about_as_many]
        if self.is_seen:
            share = PROBED_SHARE
            lost += self.costs.draft.at(num_requests, self.costs.levels[1]) / plain
            if gain < DOUBTFUL:
                share *= max(1.0, DOUBTED_SOONER / (1 + num_probes))
        else:
            share = LOOKUPS_SHARE * max(1.0, SOONER / max(1, num_probes))
        return num_drafted * num_plain >= self.num_reported(num_requests, plain) * lost / share

    def num_reported(self, num_requests: int, plain_seconds: float) -> int:
        """Number of reported steps of a probe, of which the last `NUM_COUNTED` count. `plain_seconds`: of each."""
        if self.is_seen or num_requests == 1:
            return PROBED_STEPS
        return NUM_COUNTED + min(MOST_SETTLING, math.ceil(SETTLING_SECONDS / plain_seconds))

    def start(self, num_requests: int) -> None:
        """A probe begins for so many requests: the next is due later, whether or not this one tells. Else those that
        ends of texts break off would come ever again."""
        about_as_many = num_requests.bit_length()
        self._num_drafted[about_as_many] = 0
        self._num_probes[about_as_many] += 1
        self._known.add(about_as_many)

    def count(self, num_requests: int, num_steps: int, *, has_drafts: bool) -> None:
        """Count steps of so many requests that were no probe's."""
        about_as_many = num_requests.bit_length()
        if not has_drafts:
            self._known.add(about_as_many)
        self._num_drafted[about_as_many] = has_drafts * (self._num_drafted.get(about_as_many, 0) + num_steps)

    def settle(self) -> None:
        """Correct the costs by the steps of a probe that has ended: by their median, unless they are only a bound. They
        are milliseconds in a row, so what else slows the machine slows all of them, and they tell hardly more than one.
        Example: suffix drafting of `tiny` for one request. What a plain step takes was off by 12 % (root mean square)
        where each counted, and by 10 % so."""
        steps, self.steps = [step for step in self.steps if step.is_typical], []
        if steps and not self.is_seen:
            self.costs.observe(median_step(steps))
            return
        longer = [step.seconds / self.costs.plain(step.num_requests, step.context) for step in steps]
        if len(longer) > 1 and statistics.median(longer) < CLEARLY_LESS:
            for step in steps:
                self.costs.observe(step)
