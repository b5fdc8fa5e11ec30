"""Asynchronous copies between host and device. On a CPU both are the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, in the order of its work; copied from pinned memory, so the host does not
    wait.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def device_seconds(run: Callable[[], object]) -> float:
    """The time of `run` on the GPU, by the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class Numbers:
    """Direct access from Python to the int64, int32 or fp32 numbers of a CPU tensor, without torch.

    A torch call costs more than accessing many numbers, most of all after a pass, which evicts everything from the
    caches. Example: two numbers set through numpy took 20 us, and 300 in one step of 53; here it is one.
    """

    _KINDS: ClassVar[dict[torch.dtype, Any]] = {
        torch.int64: ctypes.c_int64,
        torch.int32: ctypes.c_int32,
        torch.float32: ctypes.c_float,
    }

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        self.tensor = tensor
        self.items: Any = (self._KINDS[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())


@dataclass(slots=True)
class Arrivals:
    """Tensors being copied to the host."""

    _tensors: list[Tensor]
    _copied: torch.cuda.Event | None

    def wait(self) -> list[Tensor]:
        """The tensors, once copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


def download(tensors: Sequence[Tensor]) -> Arrivals:
    """Copies of the tensors as of this point in the device's work. All must be on one device."""
    if tensors[0].device.type == "cpu":
        return Arrivals([t.clone() for t in tensors], None)
    copies = [t.to("cpu", non_blocking=True) for t in tensors]  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()
    return Arrivals(copies, copied)


class IntegerRows:
    """An int64 matrix on a device whose current contents are read repeatedly."""

    def __init__(self, table_RX: Tensor) -> None:
        self.tensor = table_RX
        self._width = table_RX.shape[1]
        self._on_host = Numbers(table_RX) if table_RX.device.type == "cpu" else None

    def download(self) -> ArrivingRows:
        """A copy of its contents as of this point in the device's work."""
        if self._on_host is None:
            return ArrivingRows([], download([self.tensor]))
        flat, width = self._on_host.items[:], self._width
        return ArrivingRows([flat[at : at + width] for at in range(0, len(flat), width)])


@dataclass(slots=True)
class ArrivingRows:
    """A matrix of integers being copied to the host."""

    _rows: list[list[int]]
    _arrivals: Arrivals | None = None

    def wait(self) -> list[list[int]]:
        """Its rows, once copied."""
        if self._arrivals is not None:
            self._rows = self._arrivals.wait()[0].tolist()
            self._arrivals = None
        return self._rows
