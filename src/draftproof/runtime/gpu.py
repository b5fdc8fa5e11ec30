"""Whether Triton's kernels can run on a device. Modules called `triton` import triton; ask `available` before."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch


def available(device: torch.device) -> bool:
    """Whether the kernels can run on `device`."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def version(device: torch.device) -> str:
    """Triton's version, "" where it is not used."""
    return importlib.metadata.version("triton") if available(device) else ""
