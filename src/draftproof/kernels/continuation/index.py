"""An index of texts by pairs of tokens, in fixed memory: `ContinuationOps` fill and search it.

Shapes: C cells, B buckets, S slots.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

END = -1  # separator of two texts, and padding after a text's end
MOST_BUCKETS = 1 << 20
_END, _OLDEST = 5, 6  # fields of `struct TextIndex` in cpu.cpp


class TextIndex:
    """The newest `capacity` tokens of one or more texts. Each place links to the previous place where the same pair of
    tokens ended (or another pair with its hash), so earlier occurrences are found by following links.

    The token at place p is in cell p % C. `tokens_C`: int32; `previous_C`: int64, the linked places; `newest_B`: int64,
    the newest place of each hash.
    """

    def __init__(self, capacity: int, most_texts: int | None = None) -> None:
        num_buckets = 1 << max(8, min(capacity, MOST_BUCKETS).bit_length() - 1)
        self.tokens_C = np.full(capacity, END, dtype=np.int32)
        self.previous_C = np.full(capacity, -1, dtype=np.int64)
        self.newest_B = np.full(num_buckets, -1, dtype=np.int64)
        self.capacity = capacity
        self._starts: deque[int] | None = None if most_texts is None else deque(maxlen=most_texts)
        arrays = [array.ctypes.data for array in (self.tokens_C, self.previous_C, self.newest_B)]
        # struct TextIndex of cpu.cpp: what the compiled version reads and, `end`, writes
        self._fields = np.array([*arrays, capacity, num_buckets, 0, 0], dtype=np.int64)
        self.address = self._fields.ctypes.data

    @property
    def end(self) -> int:
        """Number of tokens ever added."""
        return int(self._fields[_END])

    @end.setter
    def end(self, end: int) -> None:
        self._fields[_END] = end

    @property
    def start(self) -> int:
        """Place of the oldest token that is still known."""
        return max(self.end - self.capacity, int(self._fields[_OLDEST]))

    def begin_text(self) -> None:
        """Note that a text begins at the end, so the oldest is forgotten if there are too many."""
        assert self._starts is not None
        self._starts.append(self.end)
        self._fields[_OLDEST] = self._starts[0] if len(self._starts) == self._starts.maxlen else 0

    def tail(self, start: int) -> list[int]:
        """The tokens from `start` on that are still known."""
        return self.tokens_C[np.arange(max(start, self.start), self.end) % self.capacity].tolist()

    def bucket(self, first: int, second: int) -> int:
        """Hash of a pair of tokens."""
        return ((first * 1_000_003 + second) * 2_654_435_761 >> 8) & (len(self.newest_B) - 1)


class SlotTexts:
    """Each slot's own text, if there is one. `address_S`: int64, where the compiled version finds it; 0: none."""

    def __init__(self, num_slots: int) -> None:
        self.indexes: list[TextIndex | None] = [None] * num_slots
        self.address_S = torch.zeros(num_slots, dtype=torch.int64)

    def put(self, slot: int, index: TextIndex | None) -> TextIndex | None:
        """Replace a slot's text; returns the one before."""
        before, self.indexes[slot] = self.indexes[slot], index
        self.address_S[slot] = 0 if index is None else index.address
        return before
