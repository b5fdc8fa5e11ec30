"""Single passes of an engine's parts on a GPU: what they take in a CUDA graph, without the engine around them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from draftproof import LLM
from draftproof.attention.base import PagedAttention, Rows
from draftproof.bench import rooflines
from draftproof.drafters.base import Verified
from draftproof.models.config import ModelConfig
from tests.gpu import timeline
from tests.gpu.settings import NUM_DRAFTS, parts


def config_of(llm: LLM) -> ModelConfig:
    return llm._frontend.loaded.model


def seconds(call: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Least time of a call: on a GPU inside a CUDA graph, by events."""
    if device.startswith("cuda"):
        from draftproof.kernels.gpu.planner import TimedGraph

        return TimedGraph([call]).microseconds() / 1e6
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def kernels_of(call: Callable[[], object], device: str, repeats: int = 4) -> list[str]:
    """A line for each of the kernels that take most of a call's time."""

    def run() -> None:
        for _ in range(repeats):
            call()

    run()
    line = timeline.record(run, device)
    whole = timeline.total(line.work)
    return [
        f"{took / whole:5.1%} {took / count / 1e3:9.1f} us x {count // repeats:4} {timeline.shortened(name, 70)}"
        for name, took, count in line.largest(9)
    ]


def fill(llm: LLM, requests: int, context: int) -> None:
    """Blocks for `context` tokens of requests 0, 1 and so on, and something in every cache."""
    p = parts(llm)
    each = -(-context // llm.config.block_size)
    width = p.state.block_table_SB.shape[1]
    assert each <= width and requests * each < p.pages.num_blocks, "the cache has no room for that"
    blocks_RB = 1 + torch.arange(requests * each, device=p.state.device).view(requests, each)
    p.state.block_table_SB[:requests, :each] = blocks_RB
    for layer in (*p.cache.layers, *p.draft_cache.layers):
        layer.k[: requests * each + 1].normal_()
        layer.v[: requests * each + 1].normal_()


class TargetPass:
    """`rows` rows of each of `requests`, from `context` on; what a step's target pass is.

    `last_only`: logits of each request's last row alone, as for a prompt.
    """

    def __init__(
        self, llm: LLM, rows: int, context: int, requests: int = 1, *, last_only: bool = False
    ) -> None:
        self._parts, self._most_rows = parts(llm), 0 if last_only else rows
        device = self._parts.state.device
        self.positions_T = torch.arange(context, context + rows, device=device).repeat(requests)
        self.slots_T = torch.arange(requests, device=device).repeat_interleave(rows)
        self.tokens_T = torch.arange(10, 10 + rows * requests, device=device)
        first = rows - 1 if last_only else 0
        self._sampled_M = torch.arange(first, rows * requests, rows if last_only else 1, device=device)

    def __call__(self) -> tuple[Tensor, ...]:
        p, ends_T = self._parts, self.positions_T + 1
        rows = Rows(self.positions_T, self.slots_T, ends_T, most_each=self._most_rows)
        attn = PagedAttention(p.ops, p.backend, p.cache, rows)
        out = p.target(self.tokens_T, attn, p.spec.taps.layers, p.spec.taps.final)
        return (p.target.logits(p.ops.gather(out.hidden_TH, self._sampled_M)), *out.taps)


def draft_pass(llm: LLM, context: int) -> Callable[[], object]:
    """The draft pass after a round of K + 1 rows of request 0, of which 3 survived."""
    p, target = parts(llm), TargetPass(llm, NUM_DRAFTS + 1, context)
    assert p.guard is not None

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, device=p.state.device)

    slots_R = numbers(0)
    verified = Verified(
        tokens_T=target.tokens_T,
        positions_T=target.positions_T,
        cu_R1=numbers(0, NUM_DRAFTS + 1),
        slots_R=slots_R,
        live_R=numbers(3),
        next_R=numbers(7),
        k_R=numbers(NUM_DRAFTS),
        taps=target()[1:],
        draw=p.verifier.drawer(slots_R, numbers(context + 4)),
        history=lambda _: torch.zeros(0, dtype=torch.int32),
    )
    drafter = p.guard.drafter
    return lambda: drafter.propose(verified, NUM_DRAFTS)


def draft_work(llm: LLM, requests: int, context: int) -> rooflines.Work:
    """Of the EAGLE-3 head that drafts, or that replay runs."""
    guard = parts(llm).guard
    assert guard is not None
    found = rooflines.draft_pass_of(guard.drafter, requests, NUM_DRAFTS + 1, context, NUM_DRAFTS)
    assert found is not None
    return found
