"""Runs rows of a decoder over a paged cache without an engine, and loads decoders for tests.

Shapes: T rows, S slots, B blocks per slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.attention import registry
from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.attention.chunked import TREES, ChunkedAttention
from draftproof.bench.internals import Stepper
from draftproof.cache.pool import PagedKV, allocate
from draftproof.kernels.exactness import Check, prove_power, rows_agree
from draftproof.kernels.ops import select
from draftproof.matmul.linear import LinearPlanner
from draftproof.models.config import ModelConfig, read_config
from draftproof.models.decoder import Decoder, TargetOutput
from draftproof.models.weights import WeightSource
from draftproof.runtime.native import Library

CPU = torch.device("cpu")


class Paged:
    """A paged cache for `num_slots` requests of up to `max_len` tokens; a slot's blocks lie scattered in memory.

    `library` None: torch operators, and attention that is exact everywhere.
    """

    def __init__(
        self,
        kv: Sequence[PagedKV],
        *,
        num_slots: int = 4,
        max_len: int = 256,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        library: Library | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        per_slot = -(-max_len // block_size)
        order = torch.randperm(num_slots * per_slot, generator=torch.Generator().manual_seed(0))
        table_SB = (order + 1).view(num_slots, per_slot).int()
        self.ops = select(CPU, library)
        # without a library the one that needs no certificate: what else there is may be inexact on some machine
        self.backend = backend or (registry.select(CPU, library) if library else ChunkedAttention(TREES))
        num_blocks = num_slots * per_slot + 1
        self.cache = allocate(list(kv), table_SB, num_blocks, block_size, dtype, CPU, self.backend.layout)

    def attention(
        self, positions_T: Tensor, slots_T: Tensor, context_lens_T: Tensor | None = None
    ) -> PagedAttention:
        """For one pass; `context_lens_T` None: causal. Position -1 is padding."""
        rows = Rows(positions_T, slots_T, positions_T + 1 if context_lens_T is None else context_lens_T)
        return PagedAttention(self.ops, self.backend, self.cache, rows)


def run_rows(
    decoder: Decoder,
    paged: Paged,
    pieces: Sequence[tuple[int, int, Sequence[int]]],
    taps: Sequence[int] = (),
    final: bool = False,
    only_M: Tensor | None = None,
) -> TargetOutput:
    """One flat pass. Each piece is (slot, position of its first token, token ids)."""
    tokens_T = torch.tensor([t for _, _, tokens in pieces for t in tokens])
    positions_T = torch.tensor([start + i for _, start, tokens in pieces for i in range(len(tokens))])
    slots_T = torch.tensor([slot for slot, _, tokens in pieces for _ in tokens])
    return decoder(tokens_T, paged.attention(positions_T, slots_T), taps, final, only_M=only_M)


def greedy(decoder: Decoder, prompt: Sequence[int], num_tokens: int, paged: Paged | None = None) -> list[int]:
    """The plain greedy continuation, one row a step after the prompt."""
    paged = paged or Paged(decoder.kv, max_len=len(prompt) + num_tokens)
    fresh, ids = list(prompt), list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        out = run_rows(decoder, paged, [(0, len(ids) - len(fresh), fresh)])
        fresh = [int(decoder.logits(out.hidden_TH[-1:]).argmax())]
        ids += fresh
    return ids[len(prompt) :]


def load_decoder(
    source: Path | WeightSource,
    config: ModelConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    library: Library | None = None,
    max_rows: int = 256,
    max_positions: int | None = None,
) -> Decoder:
    """A decoder on the CPU, its products certified; `library` None: without compiled operators."""
    if config is None:
        assert isinstance(source, Path)
        config = read_config(source)
    planner = LinearPlanner(CPU, exact=True, max_rows=max_rows, library=library)
    ops = select(CPU, library)
    decoder = Decoder.load(source, config, ops, planner, CPU, dtype, max_positions=max_positions)
    planner.certify()
    return decoder


def logits_in_parts(
    decoder: Decoder,
    paged: Paged,
    tokens: Sequence[int],
    sizes: Sequence[int] = (5, 1, 1, 2, 30, 1, 8, 3, 39),
) -> torch.Tensor:
    """Logits of every row of a text that is computed in parts of these sizes, each beside rows of another request."""
    parts, start, other = [], 0, 0
    for size in sizes:
        noise = tokens[other : other + 1 + start % 3]
        out = run_rows(decoder, paged, [(2, other, noise), (1, start, tokens[start : start + size])])
        parts.append(decoder.logits(out.hidden_TH[len(noise) :]))
        start, other = start + size, other + len(noise)
    assert start == len(tokens)
    return torch.cat(parts)


def is_exact(check: Check, version: Any, num_threads: int) -> bool:
    """Whether rows agree, on data that is shown to have power.

    Raises NoPowerError where the check's data cannot show a wrong result.
    """
    prove_power(check)
    return rows_agree(check, version, num_threads)


def one_by_one(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """The answers to requests of which one comes every third step, so that most steps have rows of prompts."""
    stepper, ids, num_steps = Stepper(llm), list[str](), 0
    left = list(zip(prompts, params, strict=True))
    num_open = sum(each.n for each in params)
    while num_open:
        if left and num_steps % 3 == 0:
            ids.append(stepper.add(*left.pop(0)))
        num_open -= sum(delta.finish_reason is not None for delta in stepper.step())
        num_steps += 1
    outputs = [stepper.output(request_id) for request_id in ids]
    for request_id in ids:
        stepper.close(request_id)
    llm.engine.drain()
    return outputs
