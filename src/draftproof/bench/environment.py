"""Describes where a figure was measured: device, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("draftproof", "torch", "transformers", "triton", "numpy")


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The environment as a dict, without anything that identifies the machine."""
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def device_name(device: torch.device) -> str:
    """A GPU's name; for a CPU its model and the number of usable cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {num_cores()} cores"


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """The commit of the working copy that the package is imported from, `-dirty` if files differ; None outside one."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", "compare.py"],
            capture_output=True,
            timeout=10,
        )
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # an installed copy may lie inside another repository
    return found.stdout.strip() or None if tracked.returncode == found.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
