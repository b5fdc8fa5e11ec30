"""How much memory a device has left, what becomes of memory that was freed, and large pages for what stays."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def free_bytes(device: torch.device) -> int:
    """Bytes that are free: of the GPU's memory, or on a CPU what can be had without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# glibc's names and numbers (malloc.h). Half of its largest heap is the most that some versions take for the second.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, LARGEST_BYTES = 1 << 28, 1 << 25


def give_back_freed_memory() -> bool:
    """Give the system what was freed and lies between what stays, such as weights as they were read; whether it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def keep_freed_memory() -> bool:
    """Let this process keep up to `KEPT_BYTES` that were freed, in blocks of up to `LARGEST_BYTES`; whether it can.

    glibc gives memory back as soon as a prompt's largest tensors are freed, and the system hands it out anew page by
    page, filled with zeros: a fifth of the time that a small model took for eight prompts of 200 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES))


def untouched_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU of which each page costs nothing before it is written to.

    Memory fresh from the system is zero; what a C library has left from before it would have to clear, page by page.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(*size, dtype=dtype)
    mapped = mmap.mmap(-1, num_bytes)  # given back when the tensor is gone
    return torch.frombuffer(mapped, dtype=dtype).view(*size)


ARENA_BYTES, LARGE_PAGE, CACHE_LINE = 1 << 26, 1 << 21, 64


class Arena:
    """Memory in large pages, where the system has them, for tensors that stay: weights lie there one after the other.

    What is read in whole at every step meets a new page every few hundred nanoseconds, each of which has to be looked
    up, in a virtual machine twice. Memory is given back when the last tensor of a stretch is gone.
    """

    def __init__(self) -> None:
        self._stretch: Tensor | None = None
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a contiguous tensor there; the tensor itself where the system has no large pages."""
        if not hasattr(mmap, "MADV_HUGEPAGE") or not tensor.numel():
            return tensor
        if self._stretch is None or self._used + tensor.nbytes > len(self._stretch):
            self._stretch = _large_pages(max(ARENA_BYTES, tensor.nbytes))
            self._used = 0
        place = self._stretch[self._used : self._used + tensor.nbytes]
        self._used += -(-tensor.nbytes // CACHE_LINE) * CACHE_LINE
        kept = place.view(tensor.dtype).view(tensor.shape)
        kept.copy_(tensor)
        return kept


def _large_pages(num_bytes: int) -> Tensor:
    """Untouched memory from the beginning of a large page on, for which such pages are asked."""
    mapped = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them: as good as what is left
        mapped.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(mapped, dtype=torch.uint8)
    first = -found.data_ptr() % LARGE_PAGE
    return found[first : first + num_bytes]
