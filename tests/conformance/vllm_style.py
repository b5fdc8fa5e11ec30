"""Proposers written for vLLM's interface: nothing of this project is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig  # type: ignore[import-not-found]


class NgramProposer:
    """Copies what followed the last earlier occurrence of the newest two tokens. Also checks all its arguments: a
    failed assertion is a fault, which the suite counts."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.k = vllm_config.speculative_config.num_speculative_tokens
        self.size = vllm_config.speculative_config.prompt_lookup_max or 2
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.loaded = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self.loaded = True

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        assert self.loaded and slot_mappings is None
        assert token_ids_cpu.shape == (self.max_num_seqs, self.max_model_len)
        assert num_tokens_no_spec.shape == (self.max_num_seqs,)
        drafts: list[list[int]] = []
        for i, sampled in enumerate(sampled_token_ids):
            known = token_ids_cpu[i, : num_tokens_no_spec[i]].tolist()
            if not sampled:
                drafts.append([])
                continue
            assert known[-len(sampled) :] == sampled and len(sampled) <= self.k + 1
            drafts.append(self.lookup(known))
        return drafts

    def lookup(self, known: list[int]) -> list[int]:
        suffix = known[-self.size :]
        for start in range(len(known) - self.size - 1, -1, -1):
            if known[start : start + self.size] == suffix:
                return known[start + self.size :][: self.k]
        return []
