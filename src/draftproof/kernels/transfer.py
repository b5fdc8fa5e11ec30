"""Copies between host and device that neither waits for. On a CPU both are the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """The numbers as int64 on `device`, in the order of its work: through pinned memory, so the host goes on."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int64)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


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
