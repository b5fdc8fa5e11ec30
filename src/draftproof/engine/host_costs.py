"""Seconds of a step outside both passes, by its rows: the part that the host takes alone."""

from __future__ import annotations

from dataclasses import dataclass

DOUBTED_HOST = 0.03  # part of the difference to what other steps take that each doubt takes away
GUESSED_AS = 3  # a guess counts for as much as so many steps, which may have been disturbed
HOST_RATE = 0.05  # weight of a new step in the average
MOST_SLOWER = 2.0  # a step's host seconds, and a prompt's, count for at most this many times what is expected
LEAST_HOST = 0.1  # part of the average that a step's host seconds are at least
SIMILAR_ROWS = 0.05  # numbers of rows that differ by less of their mean say little of what a row takes
# Weight, in steps, of the first guess of what a row takes: nothing. A step counts as much if its rows differ from the
# mean by the mean.
GUESSED_FROM = 1.0


@dataclass(slots=True)
class HostCosts:
    """Seconds of a step outside both passes, as a line over its rows: each token that a step brings is taken over one
    by one. Example: on one machine 0.3 ms for 4 requests that brought 4 tokens, and 0.8 ms where they brought 44.

    The averages are of recent steps. One step that is disturbed changes little: the first with drafts took 0.5 ms where
    all later ones took 0.13, which would have ended drafting."""

    seconds: float = 0.0
    num_rows: float = 0.0  # average
    _spread: float = 0.0  # of the rows: variance
    _together: float = 0.0  # of seconds and rows: covariance
    _each: float = 0.0  # seconds that a row adds
    _num_told: int = 0  # steps

    @property
    def is_known(self) -> bool:
        return self.seconds > 0.0

    def at(self, num_rows: float) -> float:
        """Seconds of a step with so many rows."""
        return max(LEAST_HOST * self.seconds, self.seconds + self._each * (num_rows - self.num_rows))

    def guess(self, num_rows: int, seconds: float) -> None:
        """Take a step with so many rows to need so long, before any was seen."""
        self.seconds, self.num_rows, self._num_told = seconds, num_rows, GUESSED_AS

    def doubt(self, of_others: float) -> None:
        """Believe a little less in what was seen, and more in what other steps take: the first steps with drafts may
        have been disturbed, and while none are made nothing corrects that."""
        self.seconds += DOUBTED_HOST * (of_others - self.seconds)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Note what a step took."""
        if self.seconds:
            seconds = min(seconds, MOST_SLOWER * self.at(num_rows))
        if self._num_told == 1:
            self.seconds = min(self.seconds, MOST_SLOWER * seconds)
        if not self._num_told:
            self.num_rows = num_rows
        self._num_told += 1
        rate = max(HOST_RATE, 1 / self._num_told)
        longer, more = seconds - self.seconds, num_rows - self.num_rows
        self.seconds += rate * longer
        self.num_rows += rate * more
        self._spread += rate * ((1 - rate) * more * more - self._spread)
        self._together += rate * ((1 - rate) * more * longer - self._together)
        little = (SIMILAR_ROWS**2 + GUESSED_FROM / self._num_told) * self.num_rows**2
        self._each = max(0.0, self._together / (self._spread + little))
