"""llama.cpp through its C API: all prompts in one batch, argmax by numpy.

Shapes: S sequences, V vocabulary.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

import llama_cpp as api
import numpy as np

from draftproof.bench.peers import gguf_file
from draftproof.bench.peers.engine import Ids, Reach, Spec

FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
KEYS_AND_VALUES = {"bfloat16": "F16", "float16": "F16", "float32": "F32"}  # F16 is its default


LOG_ERROR = 4  # ggml.h's level
COMPLAINTS: list[str] = []  # error lines logged while loading
LOG = api.llama_log_callback(
    lambda level, text, data: COMPLAINTS.append(text.decode().strip()) if level == LOG_ERROR else None
)


class LlamaCpp:
    """See `Engine`."""

    version: str = api.__version__
    weight_bytes: float | None = None
    ways: Mapping[str, Reach] = {}

    def __init__(self, spec: Spec) -> None:
        path = gguf_file.of(spec, FORMATS[spec.dtype])
        api.llama_log_set(LOG, ctypes.c_void_p(0))
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp refused the GGUF file: {'; '.join(COMPLAINTS)}")
        given = api.llama_context_default_params()
        given.n_ctx = given.n_batch = spec.num_seqs * spec.max_len
        given.n_seq_max = spec.num_seqs
        given.n_threads = given.n_threads_batch = spec.num_threads
        given.kv_unified = given.no_perf = True
        kept = KEYS_AND_VALUES[spec.dtype]
        given.type_k = given.type_v = getattr(api, f"GGML_TYPE_{kept}")
        self._context = api.llama_init_from_model(self._model, given)
        if not self._context:
            raise ValueError(f"llama.cpp made no context: {'; '.join(COMPLAINTS)}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(given.n_batch, 0, 1)
        features = api.llama_print_system_info().decode()
        self.settings = {
            "weights": FORMATS[spec.dtype],
            "keys and values": kept,
            "kv_unified": True,
            "system_info": " ".join(features.split()),
        }

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        start = time.perf_counter()
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        chosen_S = self._decode(prompts, [0] * len(prompts))
        found = [chosen_S]
        for step in range(num_new - 1):
            positions = [len(prompt) + step for prompt in prompts]
            chosen_S = self._decode([[token] for token in chosen_S], positions)
            found.append(chosen_S)
        ids = [list(column) for column in zip(*found, strict=True)]
        return ids, time.perf_counter() - start

    def _decode(self, tokens: Ids, first_positions: Sequence[int]) -> list[int]:
        """Compute the tokens of each sequence from its first position on; returns the likeliest next id of each."""
        batch, count = self._batch, 0
        for sequence, (ids, first) in enumerate(zip(tokens, first_positions, strict=True)):
            for i, token in enumerate(ids):
                batch.token[count] = token
                batch.pos[count] = first + i
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = i == len(ids) - 1
                count += 1
        batch.n_tokens = count
        status = api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        logits_SV = np.ctypeslib.as_array(
            api.llama_get_logits(self._context), shape=(len(tokens), self._vocab_size)
        )
        return logits_SV.argmax(axis=1).tolist()
