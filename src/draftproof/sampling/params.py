"""The sampling parameters of every slot, on the device, and the host's knowledge of which slots need processing.

Shapes: S slots, M rows, V vocabulary, W bad words, N ids, C tokens of the longest bad word but its last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.types import SamplingParams


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not appear in the output: prefixes right-aligned, -1 = any token."""

    prefix_WC: Tensor
    length_W: Tensor  # tokens of the prefix
    last_W: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The changes of one request to its logits, besides penalties. None or 0: no change."""

    prompt_len: int
    forbidden_V: Tensor | None = None  # bool
    bad_words: BadWords | None = None
    min_tokens: int = 0
    stop_N: Tensor | None = None  # int64: masked while fewer than min_tokens are generated
    bias_ids_N: Tensor | None = None
    bias_N: Tensor | None = None  # fp32

    @property
    def active(self) -> bool:
        parts = (self.forbidden_V, self.bad_words, self.stop_N, self.bias_N)
        return any(part is not None for part in parts)


@dataclass(frozen=True, slots=True)
class RowParams:
    """The four parameters and the seed of each row, as `ops.sample` takes them."""

    temperature_M: Tensor
    top_k_M: Tensor
    top_p_M: Tensor
    min_p_M: Tensor
    seeds_M: Tensor


class SamplingTable:
    """Parameters per slot. A free slot is greedy and unconstrained, so padding rows that name it are harmless."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.temperature_S = column(0, torch.float32)
        self.top_k_S = column(0, torch.int64)
        self.top_p_S = column(1, torch.float32)
        self.min_p_S = column(0, torch.float32)
        self.seed_S = column(0, torch.int64)
        self.prompt_len_S = column(0, torch.int64)
        self.repetition_S = column(1, torch.float32)
        self.presence_S = column(0, torch.float32)
        self.frequency_S = column(0, torch.float32)
        self.constraints: dict[int, Constraints] = {}
        self.penalised: set[int] = set()

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        row_seed: int,
        prompt_len: int,
        stop_ids: frozenset[int] = frozenset(),
        bad_words_ids: list[list[int]] | None = None,
    ) -> None:
        """Fill `slot`. `prompt_len`: tokens of the user's prompt, also after a preemption; `stop_ids`: EOS and stop
        ids that `min_tokens` holds back; `bad_words_ids`: token sequences of `params.bad_words`. All ids have been
        checked against the vocabulary.
        """
        self.release(slot)
        self.temperature_S[slot] = params.temperature
        self.top_k_S[slot] = max(params.top_k, 0)
        self.top_p_S[slot] = params.top_p
        self.min_p_S[slot] = params.min_p
        self.seed_S[slot] = row_seed
        self.prompt_len_S[slot] = prompt_len
        self.repetition_S[slot] = params.repetition_penalty
        self.presence_S[slot] = params.presence_penalty
        self.frequency_S[slot] = params.frequency_penalty
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
            self.penalised.add(slot)
        constraints = self._constraints(params, prompt_len, stop_ids, bad_words_ids or [])
        if constraints.active:
            self.constraints[slot] = constraints

    def release(self, slot: int) -> None:
        """Give `slot` a free slot's values again."""
        self.constraints.pop(slot, None)
        self.penalised.discard(slot)
        for column_S in (self.temperature_S, self.top_k_S, self.min_p_S, self.seed_S, self.prompt_len_S):
            column_S[slot] = 0
        for column_S in (self.presence_S, self.frequency_S):
            column_S[slot] = 0
        for column_S in (self.top_p_S, self.repetition_S):
            column_S[slot] = 1

    def graph_safe(self, slots: Iterable[int]) -> bool:
        """Whether a step graph can hold these slots' requests: they ask for temperature and filters only."""
        if not self.constraints and not self.penalised:
            return True
        return all(slot not in self.constraints and slot not in self.penalised for slot in slots)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The fields of `RowParams`, a value for each slot."""
        return (self.temperature_S, self.top_k_S, self.top_p_S, self.min_p_S, self.seed_S)

    def _constraints(
        self,
        params: SamplingParams,
        prompt_len: int,
        stop_ids: frozenset[int],
        bad_words_ids: list[list[int]],
    ) -> Constraints:
        forbidden_V = stop_N = bias_ids_N = bias_N = None
        if params.allowed_token_ids is not None:
            forbidden_V = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
            forbidden_V[self._ids(params.allowed_token_ids)] = False
        held_back = [i for i in sorted(stop_ids) if 0 <= i < self.vocab_size]
        if params.min_tokens and held_back:
            stop_N = self._ids(held_back)
        if params.logit_bias:
            bias_ids_N = self._ids(params.logit_bias)
            values = list(params.logit_bias.values())
            bias_N = torch.tensor(values, dtype=torch.float32, device=self.device)
        return Constraints(
            prompt_len=prompt_len,
            forbidden_V=forbidden_V,
            bad_words=self._bad_words([w for w in bad_words_ids if w]),
            min_tokens=params.min_tokens if stop_N is not None else 0,
            stop_N=stop_N,
            bias_ids_N=bias_ids_N,
            bias_N=bias_N,
        )

    def _bad_words(self, words: list[list[int]]) -> BadWords | None:
        if not words:
            return None
        width = max(len(w) for w in words) - 1
        prefixes = [[-1] * (width - len(w) + 1) + w[:-1] for w in words]
        prefix_WC = torch.tensor(prefixes, dtype=torch.int64, device=self.device).view(len(words), width)
        return BadWords(prefix_WC, self._ids(len(w) - 1 for w in words), self._ids(w[-1] for w in words))

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)
