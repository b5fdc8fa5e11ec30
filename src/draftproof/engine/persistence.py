"""How far the drafts of a request that were accepted lately tell of its next ones."""

from __future__ import annotations

from dataclasses import dataclass

# What earlier rounds keep with each new one, and the weight of the first guess. A round adds 0.01 to 0.02 to it.
LEFT, FIRST_WEIGHT = 0.999, 1.0


@dataclass(slots=True)
class Persistence:
    """A line through what a request's round had more than was expected, over what those before had. In recordings of
    EAGLE-3, MTP and a draft model its slope is 0.9 to 1.3. Where each draft is as likely as any other it is 0, and to
    follow the last rounds as if it were 1 would lose 0.6 %."""

    _together: float = FIRST_WEIGHT  # at first a slope of 1
    _square: float = FIRST_WEIGHT

    @property
    def slope(self) -> float:
        """From 0 to 1: what came before is shrunk already, for as much as usually persists."""
        return min(max(self._together / self._square, 0.0), 1.0)

    def count(self, shift: float, num_more: float, num_seen: int) -> None:
        """Count a round: of `num_seen` drafts `num_more` more were accepted than expected, after `shift` more of
        each."""
        self._together = LEFT * self._together + shift * num_more
        self._square = LEFT * self._square + shift * shift * num_seen
