"""Free memory of a device, the allocator's handling of freed memory, and large pages for long-lived tensors."""

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
    """Free bytes: of the GPU's memory, or on a CPU what can be allocated without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# glibc's names and numbers (malloc.h). Half of its largest heap is the largest M_MMAP_THRESHOLD in some versions.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, LARGEST_BYTES = 1 << 28, 1 << 25


def give_back_freed_memory() -> bool:
    """Return freed memory between live allocations to the system, such as weights as they were read; returns whether it
    could.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def keep_freed_memory() -> bool:
    """Let this process keep up to `KEPT_BYTES` of freed memory, in blocks of up to `LARGEST_BYTES`; returns whether it
    could.

    By default glibc returns memory as soon as a prompt's largest tensors are freed, and the system hands it out again
    page by page, zeroed: a fifth of the time that a small model took for eight prompts of 200 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES))


def untouched_zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, whose pages cost nothing until they are written.

    Memory fresh from the system is zero; memory reused by the C library would have to be cleared page by page.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(*size, dtype=dtype)
    mapped = mmap.mmap(-1, num_bytes)  # returned when the tensor is freed
    return torch.frombuffer(mapped, dtype=dtype).view(*size)


ARENA_BYTES, LARGE_PAGE, CACHE_LINE = 1 << 26, 1 << 21, 64


class Arena:
    """Memory in large pages, where the system has them, for long-lived tensors such as weights, one after the other.

    Weights are read completely in every step, which enters a new small page every few hundred nanoseconds; each costs
    an address translation, in a virtual machine two. A stretch is returned when its last tensor is freed.
    """

    def __init__(self) -> None:
        self._stretch: Tensor | None = None
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a contiguous tensor in the arena; the tensor itself if the system has no large pages."""
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
    """Untouched memory, aligned to large pages, for which the system is asked to use them."""
    mapped = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages uses small ones
        mapped.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(mapped, dtype=torch.uint8)
    first = -found.data_ptr() % LARGE_PAGE
    return found[first : first + num_bytes]
