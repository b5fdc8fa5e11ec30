"""Memory that recordings share: what one pass has used is still in the caches when the next one writes to it."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections import defaultdict

import torch
from torch import Tensor

from draftproof.runtime.room import CACHE_LINE


class Scratch:
    """Memory for the tensors of recorded functions that do not run inside each other.

    A recording repeats its calls in order, so a tensor that is gone leaves its memory to later ones of the recording:
    what is written in one layer is written over in the next. Other recordings begin with all of it, and may write over
    what this one returned. Without that each of a small model's passes wrote 100 KB per row to places of its own, and
    those of sizes that had not run for a while found them in no cache: 17 rows in 1.09 ms, and 16, which are frequent,
    in 0.97.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._buffers: dict[int, list[bytearray]] = defaultdict(list)  # all, by size
        self._free: dict[int, list[bytearray]] = defaultdict(list)
        self._ends: list[tuple[int, int]] = []  # (first address, address after the last) of each, ascending

    def begin(self) -> None:
        """Let a new recording use everything, whatever still holds tensors of others."""
        self._free = defaultdict(list, {size: list(buffers) for size, buffers in self._buffers.items()})

    def like(self, given: Tensor) -> Tensor:
        """A tensor like this contiguous one on the CPU, with undefined contents. Its memory is free again once nobody
        holds it or a view of it, at the latest when the next recording begins."""
        num_bytes = given.nbytes
        if not num_bytes:
            return given
        # few sizes, so that passes with other numbers of rows share them
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size]
        memory = free.pop() if free else self._new(size)
        first = -_address(memory) % CACHE_LINE
        block = (ctypes.c_char * num_bytes).from_buffer(memory, first)
        weakref.finalize(block, free.append, memory).atexit = False
        return torch.frombuffer(block, dtype=given.dtype).view(given.shape)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        at = tensor.data_ptr()
        number = bisect.bisect_right(self._ends, at, key=lambda ends: ends[0])
        return number > 0 and at < self._ends[number - 1][1]

    def _new(self, size: int) -> bytearray:
        memory = bytearray(size + CACHE_LINE)
        self._buffers[size].append(memory)
        self.num_bytes += len(memory)
        first = _address(memory)
        bisect.insort(self._ends, (first, first + len(memory)))
        return memory


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
