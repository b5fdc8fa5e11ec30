"""Measures the memory read rate, in the form of an engine that takes turns with the others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from draftproof.bench.peers.engine import Ids, Reach, Spec

NUM_BYTES = 1 << 28  # much larger than the caches


class Memory:
    """Reads a buffer on all threads. See `Engine`; it generates nothing."""

    version = torch.__version__
    weight_bytes: float | None = None
    settings: Mapping[str, Any] = {"bytes": NUM_BYTES}
    ways: Mapping[str, Reach] = {}

    def __init__(self, spec: Spec) -> None:
        self._buffer = torch.ones(NUM_BYTES // 4, dtype=torch.int32)

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        start = time.perf_counter()
        self._buffer.max()
        return [], time.perf_counter() - start
