"""Copies between host and device that neither waits for. On a CPU both are the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, in the order of its work: through pinned memory, so the host goes on."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


class Integers:
    """A CPU's int64 or int32 numbers at a fixed place, which Python writes without torch: a call of torch takes as long
    as many numbers, most of all while a pass has the caches to itself."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        kind: Any = ctypes.c_int64 if tensor.dtype == torch.int64 else ctypes.c_int32
        self.tensor = tensor
        self.items: Any = (kind * tensor.numel()).from_address(tensor.data_ptr())


@dataclass(slots=True)
class Arrivals:
    """Tensors on their way to the host."""

    _tensors: list[Tensor]
    _copied: torch.cuda.Event | None

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


def download(tensors: Sequence[Tensor]) -> Arrivals:
    """Copies of what the tensors hold when the device comes to this point. All are on one device."""
    if tensors[0].device.type == "cpu":
        return Arrivals([t.clone() for t in tensors], None)
    copies = [t.to("cpu", non_blocking=True) for t in tensors]  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()
    return Arrivals(copies, copied)


@dataclass(slots=True)
class ArrivingRows:
    """A matrix of integers on its way to the host."""

    _rows: list[list[int]]
    _arrivals: Arrivals | None = None

    def wait(self) -> list[list[int]]:
        """Its rows, once they are there."""
        if self._arrivals is not None:
            self._rows = self._arrivals.wait()[0].tolist()
            self._arrivals = None
        return self._rows


def download_rows(table_RX: Tensor) -> ArrivingRows:
    """A copy of what an int64 matrix holds when the device comes to this point."""
    if table_RX.device.type != "cpu":
        return ArrivingRows([], download([table_RX]))
    rows, width = table_RX.shape
    flat = Integers(table_RX).items[:]
    return ArrivingRows([flat[r * width : (r + 1) * width] for r in range(rows)])
