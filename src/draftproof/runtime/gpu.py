"""Whether Triton kernels can run on a device. Modules named `triton` import triton, so call `available` first."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch


def available(device: torch.device) -> bool:
    """Whether the kernels can run on `device`."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def version(device: torch.device) -> str:
    """Triton's version; "" if Triton is not used on this device."""
    return importlib.metadata.version("triton") if available(device) else ""
