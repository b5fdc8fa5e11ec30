"""OpenVINO GenAI's continuous batching on a GGUF file, with prefix caching off."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from draftproof.bench.peers import gguf_file
from draftproof.bench.peers.engine import Ids, Reach, Spec

FORMATS = {"bfloat16": "F16", "float16": "F16", "float32": "F16"}  # its reader knows neither BF16 nor F32
PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class OpenVino:
    """See `Engine`."""

    version: str = importlib.metadata.version("openvino-genai")
    weight_bytes: float | None = None
    ways: Mapping[str, Reach] = {}

    def __init__(self, spec: Spec) -> None:
        path = gguf_file.of(spec, FORMATS[spec.dtype])
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = spec.num_seqs
        scheduler.max_num_batched_tokens = spec.num_seqs * spec.max_len
        precision = PRECISIONS[spec.dtype]
        hints = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": spec.num_threads,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(path), scheduler_config=scheduler, device="CPU", properties=hints
        )
        self.settings: Mapping[str, Any] = {
            "weights": FORMATS[spec.dtype],
            "prefix cache": False,
            "pipeline": "ContinuousBatchingPipeline",
            **hints,
        }

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        config = genai.GenerationConfig(
            max_new_tokens=num_new, min_new_tokens=num_new, ignore_eos=True, do_sample=False
        )
        start = time.perf_counter()
        asked = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        found = self._pipeline.generate(asked, [config] * len(prompts))
        ids = [list(result.m_generation_ids[0]) for result in found]
        return ids, time.perf_counter() - start
