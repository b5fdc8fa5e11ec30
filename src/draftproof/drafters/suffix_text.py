"""Texts in which the newest tokens' earlier occurrences are found at once; memory is fixed at the start.

Shapes: C places, D tokens looked back at, K tokens looked ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

END = -1  # between two texts, and where a text has no more tokens
MOST_PLACES = 64  # of one pair of tokens that are looked at, the newest first
MOST_BUCKETS = 1 << 20


class SuffixIndex:
    """The newest `capacity` tokens of one text or many, each place linked to the one before it where the same two
    tokens ended (or others of their hash)."""

    def __init__(self, capacity: int, most_texts: int | None = None) -> None:
        self.end = 0  # tokens ever added
        self._capacity = capacity
        self._starts: deque[int] | None = None if most_texts is None else deque(maxlen=most_texts)
        self._tokens = np.full(capacity, END, dtype=np.int32)
        self._previous = np.full(capacity, -1, dtype=np.int64)
        self._newest = np.full(1 << max(8, min(capacity, MOST_BUCKETS).bit_length() - 1), -1, dtype=np.int64)

    @property
    def start(self) -> int:
        """The oldest token that is still there."""
        full = self._starts is not None and len(self._starts) == self._starts.maxlen
        return max(self.end - self._capacity, self._starts[0] if self._starts and full else 0)

    def add(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        before = int(self._tokens[(self.end - 1) % self._capacity])
        for token in map(int, tokens):
            place, cell = self._bucket(before, token), self.end % self._capacity
            self._tokens[cell], self._previous[cell] = token, self._newest[place]
            self._newest[place] = self.end
            self.end, before = self.end + 1, token

    def add_whole(self, tokens: Sequence[int]) -> None:
        """A text of its own: nothing is found across its ends."""
        assert self._starts is not None
        self._starts.append(self.end)
        self.add([*tokens[-self._capacity + 1 :], END])

    def tail(self, start: int) -> list[int]:
        """The tokens from `start` on, as far as they are there."""
        return self._tokens[np.arange(max(start, self.start), self.end) % self._capacity].tolist()

    def find(self, suffix_D: np.ndarray, num_ahead: int) -> tuple[np.ndarray, np.ndarray]:
        """Places where at least the suffix's last two tokens are met, newest first: how many of its tokens match
        there, int [C], and what followed, [C, K]."""
        start, places = self.start, list[int]()
        place = int(self._newest[self._bucket(*suffix_D[-2:].tolist())])
        while place > start and len(places) < MOST_PLACES:
            if place < self.end - 1:  # the text's end is no earlier place
                places.append(place)
            place = int(self._previous[place % self._capacity])
        places_C1 = np.array(places, dtype=np.int64)[:, None]
        back_CD = places_C1 - np.arange(len(suffix_D))
        same_CD = (self._tokens[back_CD % self._capacity] == suffix_D[::-1]) & (back_CD >= start)
        ahead_CK = places_C1 + np.arange(1, num_ahead + 1)
        follow_CK = np.where(ahead_CK < self.end, self._tokens[ahead_CK % self._capacity], END)
        return np.logical_and.accumulate(same_CD, axis=1).sum(1), follow_CK

    def _bucket(self, first: int, second: int) -> int:
        return ((first * 1_000_003 + second) * 2_654_435_761 >> 8) & (len(self._newest) - 1)
