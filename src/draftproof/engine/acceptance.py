"""How likely drafts are to be accepted, by request and position, from what was accepted lately.

A round verifies a request's drafts up to the first that is rejected: those before it are hits, it is a miss, and what
lies behind it was not observed. Each draft is judged given that those before it were accepted, so the chance that
draft j is reached and accepted, its survival, is the product of the chances up to j.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, field
from typing import NamedTuple

EXPECTED = 0.6  # acceptance of a drafter that nothing is known of
POOL_MEMORY = 0.995
OWN_MEMORY = 0.95  # with each of a request's rounds
MOST_WEIGHT = 1e6  # of a round, in those of the first; then they are counted anew
POOL_WEIGHT = 8.0  # trials that an expectation is worth
OWN_WEIGHT = 8.0
# What a step without drafts leaves of what is known of all requests, so that they are asked for again, and of one.
POOL_FADING = 0.99
OWN_FADING = 0.98
ODDS_STEP = 2**0.5  # requests whose odds differ by less are treated alike
SHARES = 8  # as are those whose shares of rounds with drafts differ by less than one part of so many


class RequestClass(NamedTuple):
    """Requests that are treated alike: `odds`, how much better than the pool's theirs are, as a power of `ODDS_STEP`;
    `share` of their rounds that have drafts if asked, in parts of `SHARES`."""

    odds: int
    share: int


@dataclass(slots=True)
class AcceptanceRecord:
    """One request's rounds of late: hits and misses, and how many of each the pool's estimates led to expect; how often
    the drafter was asked, and had drafts."""

    hits: float = 0.0
    misses: float = 0.0
    expected_hits: float = 0.0
    expected_misses: float = 0.0
    asked: float = 0.0
    given: float = 0.0

    @property
    def odds(self) -> int:
        """How much better than the pool's this request's odds are, as a power of `ODDS_STEP`; 0 without rounds."""
        better = (self.hits + OWN_WEIGHT) / (self.expected_hits + OWN_WEIGHT)
        ratio = better * (self.expected_misses + OWN_WEIGHT) / (self.misses + OWN_WEIGHT)
        return round(math.log(ratio) / math.log(ODDS_STEP))

    def fade(self, num_rounds: int = 1) -> None:
        """Rounds without drafts: what was seen before says less."""
        left = OWN_FADING**num_rounds
        self.remember(left)
        self.asked *= left
        self.given *= left

    def remember(self, left: float) -> None:
        """Keep so much of what was verified."""
        self.hits *= left
        self.misses *= left
        self.expected_hits *= left
        self.expected_misses *= left


@dataclass(slots=True)
class Chances:
    """Chances of one thing after another, each given that those before it came about: counted, and shrunk towards
    `first` at the first `num_alike` positions, at later ones towards the position before.

    What was seen before loses weight with time; that is, what comes weighs more: `_weight`."""

    num: int
    first: float
    num_alike: int = 1
    _hits: list[float] = field(default_factory=list)
    _trials: list[float] = field(default_factory=list)
    _weight: float = 1.0
    _known: list[float] = field(default_factory=list)
    _is_stale: bool = True

    def __post_init__(self) -> None:
        self._hits = [0.0] * self.num
        self._trials = [0.0] * self.num

    @property
    def estimates(self) -> list[float]:
        if self._is_stale:
            self._known, self._is_stale = self._estimated(), False
        return self._known

    @property
    def last(self) -> list[float]:
        """`estimates` as they were when they were last asked for: a choice ago."""
        return self._known or self.estimates

    def _estimated(self) -> list[float]:
        found, chance, prior = [], self.first, POOL_WEIGHT * self._weight
        for position, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            if position < self.num_alike:
                chance = self.first
            chance = (hits + prior * chance) / (trials + prior)
            found.append(chance)
        return found

    def count(self, num_hits: int, num_tried: int) -> None:
        """The first `num_hits` came about, and the next did not, unless no more were tried."""
        weight = self._weight
        for position in range(min(num_hits + 1, num_tried, self.num)):
            self._trials[position] += weight
            if position < num_hits:
                self._hits[position] += weight
        self._is_stale = True

    def forget(self, left: float) -> None:
        """Keep so much of what was seen."""
        self._weight /= left
        self._is_stale = True
        if self._weight > MOST_WEIGHT:
            self._hits = [n / self._weight for n in self._hits]
            self._trials = [n / self._weight for n in self._trials]
            self._weight = 1.0


@dataclass(slots=True)
class Acceptance:
    """Estimates for up to `num_drafts` positions: of a draft's acceptance, and of there being one if asked. A request's
    are the pool's with other odds, and with another share of rounds that have drafts.

    `memory`: weight that the past keeps with each round, over all requests.
    """

    num_drafts: int
    expected: float = EXPECTED
    memory: float = POOL_MEMORY
    accepted: Chances = field(init=False)
    given: Chances = field(init=False)
    _survivals: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted = Chances(self.num_drafts, self.expected)
        self.given = Chances(self.num_drafts, 1.0, num_alike=2)

    @property
    def share(self) -> float:
        """Share of the rounds that were asked for drafts and had some; all, as long as nothing is known."""
        return self.given.estimates[0]

    @property
    def longer(self) -> list[float]:
        """The chance that there is a first, second, ... draft where there are any."""
        return list(itertools.accumulate(self.given.estimates[1:], operator.mul, initial=1.0))

    @property
    def unknown(self) -> RequestClass:
        """Requests of which nothing is known."""
        return RequestClass(0, max(1, round(SHARES * self.share)))

    def class_of(self, record: AcceptanceRecord) -> RequestClass:
        share = (record.given + OWN_WEIGHT * self.share) / (record.asked + OWN_WEIGHT)
        return RequestClass(record.odds, max(1, round(SHARES * share)))

    def survival(self, odds: int = 0) -> list[float]:
        """The chance that draft 1, 2, ... is accepted together with all before it, for requests with these odds."""
        found = self._survivals.get(odds)
        if found is None:
            found = self._survivals[odds] = []
            ratio = ODDS_STEP**odds
            alive = 1.0
            for chance in self.accepted.estimates:
                alive *= ratio * chance / (1.0 - chance + ratio * chance)
                found.append(alive)
        return found

    def count(self, record: AcceptanceRecord, num_drafted: int, num_accepted: int) -> None:
        """One request's round, of which the first `num_accepted` drafts were accepted."""
        pool = self.accepted.last
        record.remember(OWN_MEMORY)
        for chance in pool[: min(num_accepted + 1, num_drafted)]:
            record.expected_hits += chance
            record.expected_misses += 1.0 - chance
        record.hits += num_accepted
        record.misses += float(num_accepted < num_drafted)
        # at all positions: what was seen behind rounds of long ago says no more than they
        self.accepted.forget(self.memory)
        self.accepted.count(num_accepted, num_drafted)
        self._survivals.clear()

    def fade(self) -> None:
        """A step without drafts."""
        self.accepted.forget(POOL_FADING)
        self.given.forget(POOL_FADING)
        self._survivals.clear()

    def count_given(self, record: AcceptanceRecord, num_asked: int, num_given: int) -> None:
        """The drafter was asked for so many drafts, and had so many."""
        self.given.forget(self.memory)
        self.given.count(num_given, num_asked)
        record.asked = OWN_MEMORY * record.asked + 1.0
        record.given = OWN_MEMORY * record.given + float(num_given > 0)
