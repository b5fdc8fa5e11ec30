"""How much memory a device has left, and what becomes of memory that was freed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


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


def keep_freed_memory() -> bool:
    """Let this process keep up to `KEPT_BYTES` that were freed, in blocks of up to `LARGEST_BYTES`; whether it can.

    glibc gives memory back as soon as a prompt's largest tensors are freed, and the system hands it out anew page by
    page, filled with zeros: a fifth of the time that a small model took for eight prompts of 200 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES))
