"""How much less likely drafts are to be accepted at the beginning of an output than later in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_OPENING = 16  # tokens of an output that are its beginning
SHORT = 2 * NUM_OPENING  # most tokens of an output that has none: hardly any would come later
# Weight of the first guess, in trials, and what earlier rounds keep with each new one.
WEIGHT, LEFT = 20.0, 0.998


def is_early(num_outputs: int, most_outputs: int) -> bool:
    """Whether an output of at most `most_outputs` tokens is at its beginning with `num_outputs`."""
    return num_outputs < NUM_OPENING and most_outputs > SHORT


def raised(chance: float, ratio: float) -> float:
    """The chance with odds that are so many times as high. Example: 0.5 at twice the odds: 2/3."""
    return ratio * chance / (1.0 - chance + ratio * chance)


@dataclass(slots=True)
class Opening:
    """The odds of drafts of an output's first tokens, relative to those of later ones: `expected` at first. Example:
    EAGLE-3's for 64 requests of `small` are right at 0.5 for sixteen tokens and at 0.7 from then on."""

    expected: float = 1.0
    _hits: float = 0.0
    _misses: float = 0.0
    _expected_hits: float = 0.0
    _expected_misses: float = 0.0

    @property
    def ratio(self) -> float:
        better = (self._hits + WEIGHT) / (self._expected_hits + WEIGHT)
        return self.expected * better * (self._expected_misses + WEIGHT) / (self._misses + WEIGHT)

    def odds(self, step: float) -> int:
        """The ratio as an exponent of `step`, rounded."""
        return round(math.log(self.ratio) / math.log(step))

    def count(self, num_hits: int, chances: Sequence[float]) -> None:
        """Count a round of an output's beginning, in which `num_hits` drafts were accepted of those that had these
        `chances` by what is known of later ones."""
        num_seen = len(chances)
        num_expected = sum([raised(chance, self.expected) for chance in chances])
        self._hits = LEFT * self._hits + num_hits
        self._misses = LEFT * self._misses + num_seen - num_hits
        self._expected_hits = LEFT * self._expected_hits + num_expected
        self._expected_misses = LEFT * self._expected_misses + num_seen - num_expected
