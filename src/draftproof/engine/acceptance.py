"""How likely drafts are to be accepted, by request and position, from what was accepted lately.

A round verifies a request's drafts up to the first that is rejected: those before it are hits, it is a miss, and what
lies behind it was not observed. Each draft is judged given that those before it were accepted, so the chance that
draft j is reached and accepted, its survival, is the product of the chances up to j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

EXPECTED = 0.6  # acceptance of a drafter that nothing is known of
POOL_MEMORY = 0.995
OWN_MEMORY = 0.95  # with each of a request's rounds
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
    proposed: float = 0.0

    @property
    def odds(self) -> int:
        """How much better than the pool's this request's odds are, as a power of `ODDS_STEP`; 0 without rounds."""
        better = (self.hits + OWN_WEIGHT) / (self.expected_hits + OWN_WEIGHT)
        ratio = better * (self.expected_misses + OWN_WEIGHT) / (self.misses + OWN_WEIGHT)
        return round(math.log(ratio) / math.log(ODDS_STEP))

    def fade(self) -> None:
        """A round without drafts: what was seen before says less."""
        self.hits *= OWN_FADING
        self.misses *= OWN_FADING
        self.expected_hits *= OWN_FADING
        self.expected_misses *= OWN_FADING
        self.asked *= OWN_FADING
        self.proposed *= OWN_FADING


@dataclass(slots=True)
class Acceptance:
    """Estimates for up to `num_drafts` positions.

    The pool's estimate at a position is shrunk towards the one before it, the first towards `expected`; a request's are
    the pool's with other odds. `memory`: weight that the past keeps with each round, over all requests.
    """

    num_drafts: int
    expected: float = EXPECTED
    memory: float = POOL_MEMORY
    _asked: float = 0.0
    _proposed: float = 0.0
    _hits: list[float] = field(default_factory=list)
    _trials: list[float] = field(default_factory=list)
    _pool: list[float] | None = None  # `pool`, until something is counted
    _survivals: dict[int, list[float]] = field(default_factory=dict)  # likewise

    def __post_init__(self) -> None:
        self._hits = [0.0] * self.num_drafts
        self._trials = [0.0] * self.num_drafts

    @property
    def pool(self) -> list[float]:
        """The chance of each position over all requests."""
        if self._pool is None:
            self._pool = []
            self._survivals.clear()
            chance = self.expected
            for hits, trials in zip(self._hits, self._trials, strict=True):
                chance = (hits + POOL_WEIGHT * chance) / (trials + POOL_WEIGHT)
                self._pool.append(chance)
        return self._pool

    @property
    def proposed(self) -> float:
        """Share of the rounds that were asked for drafts and had some; all, as long as nothing is known."""
        return (self._proposed + POOL_WEIGHT) / (self._asked + POOL_WEIGHT)

    @property
    def unknown(self) -> RequestClass:
        """Requests of which nothing is known."""
        return RequestClass(0, max(1, round(SHARES * self.proposed)))

    def class_of(self, record: AcceptanceRecord) -> RequestClass:
        share = (record.proposed + OWN_WEIGHT * self.proposed) / (record.asked + OWN_WEIGHT)
        return RequestClass(record.odds, max(1, round(SHARES * share)))

    def survival(self, odds: int = 0) -> list[float]:
        """The chance that draft 1, 2, ... is accepted together with all before it, for requests with these odds."""
        pool = self.pool
        found = self._survivals.get(odds)
        if found is None:
            found = self._survivals[odds] = []
            ratio = ODDS_STEP**odds
            alive = 1.0
            for chance in pool:
                alive *= ratio * chance / (1.0 - chance + ratio * chance)
                found.append(alive)
        return found

    def count(self, record: AcceptanceRecord, num_drafted: int, num_accepted: int) -> None:
        """One request's round, of which the first `num_accepted` drafts were accepted."""
        pool = self.pool
        # at all positions: what was seen behind rounds of long ago says no more than they
        self._forget(self.memory)
        record.hits *= OWN_MEMORY
        record.misses *= OWN_MEMORY
        record.expected_hits *= OWN_MEMORY
        record.expected_misses *= OWN_MEMORY
        for position in range(min(num_accepted + 1, num_drafted, self.num_drafts)):
            hit = float(position < num_accepted)
            record.hits += hit
            record.misses += 1.0 - hit
            record.expected_hits += pool[position]
            record.expected_misses += 1.0 - pool[position]
            self._hits[position] += hit
            self._trials[position] += 1.0

    def fade(self) -> None:
        """A step without drafts."""
        self._forget(POOL_FADING)
        self._asked *= POOL_FADING
        self._proposed *= POOL_FADING

    def _forget(self, left: float) -> None:
        self._hits = [left * n for n in self._hits]
        self._trials = [left * n for n in self._trials]
        self._pool = None

    def count_proposed(self, record: AcceptanceRecord, num_proposed: int) -> None:
        """The drafter was asked for a request and had so many drafts."""
        has_some = float(num_proposed > 0)
        self._asked = self.memory * self._asked + 1.0
        self._proposed = self.memory * self._proposed + has_some
        record.asked = OWN_MEMORY * record.asked + 1.0
        record.proposed = OWN_MEMORY * record.proposed + has_some
