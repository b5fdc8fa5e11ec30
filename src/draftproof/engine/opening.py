"""How much less likely drafts are to be accepted at the beginning of an output than later in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_OPENING = 16  # tokens of an output that are its beginning
SHORT = 2 * NUM_OPENING  # most tokens of an output that has none: hardly any would come later
# Weight of the first guess, in trials, and what earlier rounds keep with each new one.
WEIGHT, LEFT = 10.0, 0.998


def is_early(num_outputs: int, most_outputs: int) -> bool:
    """Whether an output of at most `most_outputs` tokens is at its beginning with `num_outputs`."""
    return num_outputs < NUM_OPENING and most_outputs > SHORT


def raised(chance: float, ratio: float) -> float:
    """The chance with odds that are so many times as high. Example: 0.5 at twice the odds: 2/3."""
    return ratio * chance / (1.0 - chance + ratio * chance)


@dataclass(slots=True)
class Outcomes:
    """Drafts that were accepted (`hits`) or not, and how many of each were expected; weighted."""

    hits: float = 0.0
    misses: float = 0.0
    expected_hits: float = 0.0
    expected_misses: float = 0.0

    def relative_odds(self, weight: float) -> float:
        """The odds of acceptance relative to the expected ones, shrunk towards 1 by so many trials."""
        better = (self.hits + weight) / (self.expected_hits + weight)
        return better * (self.expected_misses + weight) / (self.misses + weight)

    def remember(self, left: float) -> None:
        """Multiply all counts by `left`."""
        self.hits *= left
        self.misses *= left
        self.expected_hits *= left
        self.expected_misses *= left

    def add(self, num_hits: int, num_seen: int, num_expected: float, weight: float = 1.0) -> None:
        """Count `num_seen` drafts, of which `num_hits` were accepted and `num_expected` were expected to be."""
        self.hits += weight * num_hits
        self.misses += weight * (num_seen - num_hits)
        self.expected_hits += weight * num_expected
        self.expected_misses += weight * (num_seen - num_expected)


@dataclass(slots=True)
class Opening:
    """The odds of drafts of an output's first tokens, relative to those of later ones: `expected` at first. Example:
    EAGLE-3's for 64 requests of `small` are right at 0.5 for sixteen tokens and at 0.7 from then on."""

    expected: float = 1.0
    _outcomes: Outcomes = field(default_factory=Outcomes)  # by the pool's estimates and `expected`

    @property
    def ratio(self) -> float:
        return self.expected * self._outcomes.relative_odds(WEIGHT)

    def odds(self, step: float) -> int:
        """The ratio as an exponent of `step`, rounded."""
        return round(math.log(self.ratio) / math.log(step))

    def count(self, num_hits: int, chances: Sequence[float], known: float = 1.0) -> None:
        """Count a round of an output's beginning, in which `num_hits` drafts were accepted of those that had these
        `chances` by what is known of later ones. `known`: how much that is, from 0 to 1. Example: drafts that are right
        at 0.8 throughout, where 0.6 was expected. By the first text, in which hardly any later ones were seen, they
        would seem likelier at the beginning for many texts."""
        self._outcomes.remember(LEFT)
        num_expected = sum([raised(chance, self.expected) for chance in chances])
        self._outcomes.add(num_hits, len(chances), num_expected, known)
