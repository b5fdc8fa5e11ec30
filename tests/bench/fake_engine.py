"""Engines that generate nothing real, for processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from draftproof.bench.peers.engine import Ids, Spec


class Fake:
    """Counts up from a prompt's last id. A prompt that begins with 1 raises, with 2 ends the process, with 3 hangs."""

    version = "1.0"
    weight_bytes = 1e6
    ways: Mapping[str, str] = {"backwards": "single"}

    def __init__(self, spec: Spec) -> None:
        if spec.model == "unknown":
            raise KeyError("no such model\nat all")
        print("loading, says the library")
        self.settings: dict[str, Any] = {"threads": spec.num_threads, "omp": os.environ["OMP_NUM_THREADS"]}

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        print("generating, says the library")
        if prompts[0][0] == 1:
            raise RuntimeError("out of fuel")
        if prompts[0][0] == 2:
            os.write(2, b"a check failed\n")
            os._exit(7)
        if prompts[0][0] == 3:
            time.sleep(60)
        step = -1 if way else 1
        return [[p[-1] + step * (i + 1) for i in range(num_new)] for p in prompts], 0.5
