"""Our own engine as a peer: plain decoding through `LLM.generate`."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from typing import Any

from draftproof.bench.peers.engine import Ids, Reach, Spec
from draftproof.bench.peers.plan import weight_bytes
from draftproof.frontend.llm import LLM
from draftproof.types import SamplingParams


class Ours:
    """See `Engine`."""

    version: str = importlib.metadata.version("draftproof")
    ways: Mapping[str, Reach] = {}

    def __init__(self, spec: Spec) -> None:
        settings = {
            **spec.settings,
            "dtype": spec.dtype,
            "max_num_seqs": spec.num_seqs,
            "max_model_len": spec.max_len,
            "enable_prefix_caching": False,
        }
        self._llm = LLM(**{"model": spec.model, **settings})
        dense = weight_bytes(self._llm.model_config, spec.dtype)
        self.weight_bytes: float | None = dense - self._llm.memory.unread
        self.settings: dict[str, Any] = {"arithmetic": str(self._llm.arithmetic), "prefix cache": False}

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        found = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(output.outputs[0].token_ids) for output in found], seconds
