"""Launch helpers shared by all kernels: inputs with a layout that never changes the compiled code, and the current
device.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; triton compiles other code, with other reduction orders, for less aligned pointers


def dense(x: Tensor) -> Tensor:
    """`x` itself if contiguous and aligned, else a copy: a row's bits must not depend on its place in memory."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def on(x: Tensor) -> AbstractContextManager[object]:
    """A context in which x's device is current; triton launches on the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


@functools.cache
def num_processors(device: torch.device) -> int:
    """The number of multiprocessors of the device; 2 for a CPU, where kernels run in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory available to one program, in bytes."""
    if device.type != "cuda":
        return 1 << 20
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10))


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device has PDL: a kernel may start before its predecessor has ended, and wait for it inside."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether the device has TMA, which copies a matrix tile to shared memory; the interpreter emulates it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def pdl(x: Tensor) -> dict[str, bool]:
    """Launch arguments that enable PDL in a kernel, if x's device has it."""
    yes = has_pdl(x.device)
    return {"PDL": yes, "launch_pdl": yes}
