"""The planner for GPUs: candidates share the weight there, so each bucket of rows may have its own candidate.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels.norm.triton import add_rms_norm, rms_norm
from draftproof.matmul import certify, products
from draftproof.matmul import weights as weights_module
from draftproof.matmul.plan_cache import BucketLinear, CandidateResult, Choice, ReportRow
from draftproof.matmul.spec import Candidate, LinearFn, Shape, partial_sums
from draftproof.matmul.triton import linear
from draftproof.runtime.graphs import capture

TIMED_ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048)
COLD_BYTES = 512 << 20  # total weights per timing, so that each is evicted from the cache before its next use
REPLAYS = 10
CLOSE, ROUNDS = 1.1, 5  # candidates within factor CLOSE of the fastest are timed ROUNDS more times
# outputs of language model heads, whose results for a whole prompt would take gigabytes
WIDE = 1 << 15
MOST_WIDE_ROWS = 512
SWITCH = 1.02  # a candidate must be this much faster than the previous bucket's to replace it


def times(
    shape: Shape, candidates: Sequence[Candidate], device: torch.device, rows: Sequence[int]
) -> dict[str, list[float]]:
    """Microseconds of each candidate at each number of rows, with weights not in the cache; infinite if not tried.

    Each product is followed by a small operator, as in a pass: some candidates let it start before they end. If a
    product may return partial sums, the operator is the norm that adds them.
    """
    whole = (
        linear.num_segments(shape.outputs, shape.inputs, shape.dtype) == 1 or shape.out_dtype != shape.dtype
    )
    size = shape.outputs * shape.inputs * shape.dtype.itemsize
    copies = min(max(COLD_BYTES // size, 1), 32)
    weights = [
        torch.randn(shape.outputs, shape.inputs, device=device, dtype=torch.float32).to(shape.dtype)
        for _ in range(copies)
    ]
    bias_N = weights[0][:, 0].contiguous() if shape.bias else None
    linear_fns = {
        candidate.name: [
            candidate.make(weights_module.parts(shape.kind, weight), bias_N, shape.out_dtype)
            for weight in weights
        ]
        for candidate in candidates
    }
    if not whole:
        linear_fns = {
            name: [partial_sums(linear_fn) for linear_fn in several] for name, several in linear_fns.items()
        }
    found: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for t in rows:
        x_TK = torch.randn(t, shape.inputs, device=device).to(shape.dtype)
        follow = _follower(x_TK, None if whole else x_TK.new_zeros(t, shape.outputs))
        tried = {n: several for n, several in linear_fns.items() if linear.suits(n, shape, t)}
        nothing_TN = x_TK.new_empty(t, shape.outputs, dtype=shape.out_dtype)
        small_us = TimedGraph([functools.partial(follow, nothing_TN)] * 20).microseconds()
        taken = _race(
            {
                n: [functools.partial(_pair, linear_fn, x_TK, follow) for linear_fn in several]
                for n, several in tried.items()
            }
        )
        for candidate in candidates:
            found[candidate.name].append(taken.get(candidate.name, float("inf")) - small_us)
    return found


def _pair(linear_fn: LinearFn, x_TK: Tensor, follow: Callable[[Tensor], object]) -> None:
    follow(linear_fn(x_TK))


def _follower(x_TK: Tensor, stream_TN: Tensor | None) -> Callable[[Tensor], object]:
    """The operator that runs after a product: the norm that adds it to the residual stream, or any small one."""
    if stream_TN is None:
        ones_K = torch.ones_like(x_TK[0])
        return lambda _: rms_norm(x_TK, ones_K, 1e-6)
    ones_N = torch.ones_like(stream_TN[0])
    return lambda product: add_rms_norm(product, stream_TN, ones_N, 1e-6)


def _race(calls: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
    """Minimum microseconds of a call. Close candidates are timed again, in turns, because clock rates vary over
    time.
    """
    pool = torch.cuda.graph_pool_handle()  # their results are not read, so the graphs may share memory
    graphs = {name: TimedGraph(several, pool) for name, several in calls.items()}
    best = {name: graph.microseconds() for name, graph in graphs.items()}
    close = [name for name, t in best.items() if t <= CLOSE * min(best.values())]
    for _ in range(ROUNDS if len(close) > 1 else 0):
        for name in close:
            best[name] = min(best[name], graphs[name].microseconds())
    return best


class TimedGraph:
    """Calls in one CUDA graph, so that only the device is timed."""

    def __init__(self, calls: Sequence[Callable[[], object]], pool: Any = None) -> None:
        self._num_calls = len(calls)
        self._graph, _ = capture(lambda: [call() for call in calls], pool)
        self._graph.replay()

    def microseconds(self, replays: int = REPLAYS) -> float:
        """Minimum time of one call."""
        best = float("inf")
        for _ in range(replays):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        return best * 1e3 / self._num_calls


def choose(
    candidates: Sequence[Candidate],
    certified: Mapping[str, tuple[int, ...]],
    microseconds: Mapping[str, Sequence[float]],
    rows: Sequence[int],
    buckets: Sequence[int],
) -> tuple[str, ...]:
    """The fastest certified candidate of each bucket, "" if there is none. `microseconds` are at `rows`."""
    chosen: list[str] = []
    for bucket in buckets:
        timed = next((i for i, t in enumerate(rows) if t >= bucket), len(rows) - 1)
        usable = [candidate.name for candidate in candidates if bucket in certified[candidate.name]]
        best = min(usable, key=lambda name: microseconds[name][timed], default="")
        before = chosen[-1] if chosen else ""
        if before in usable and microseconds[before][timed] <= SWITCH * microseconds[best][timed]:
            best = before
        chosen.append(best)
    return tuple(chosen)


def plan(shape: Shape, candidates: Sequence[Candidate], max_rows: int, device: torch.device) -> Choice:
    """The certified candidate of each bucket of rows; the report also names the fastest candidate regardless of
    certificates.
    """
    max_rows = min(max_rows, MOST_WIDE_ROWS) if shape.outputs > WIDE else max_rows
    buckets = certify.bucket_table(shape, max_rows, device)
    rows = [t for t in TIMED_ROWS if t <= buckets[-1]]
    with torch.no_grad():
        certified = certify.certify(shape, candidates, max_rows, device)
        microseconds = times(shape, candidates, device, rows)
    chosen = choose(candidates, certified, microseconds, rows, buckets)
    if not any(chosen):
        return Choice(products.SLOW.name, (), ())
    lines = []
    for i, t in enumerate(rows):
        candidate = chosen[buckets.index(t)] if t in buckets else ""
        fastest = min(microseconds, key=lambda name: microseconds[name][i])
        if candidate:
            taken = microseconds[candidate][i], fastest, microseconds[fastest][i]
            lines.append(ReportRow(shape.key(), t, candidate, *taken))
    results = [
        CandidateResult(
            candidate.name,
            len(certified[candidate.name]) / len(buckets),
            tuple(rows),
            tuple(microseconds[candidate.name]),
        )
        for candidate in candidates
    ]
    return Choice("by rows", buckets, tuple(lines), chosen, tuple(results))


def make(
    candidates: Sequence[Candidate], buckets: Sequence[int], chosen: Sequence[str],
    parts: Any, bias_N: Tensor | None, out_dtype: torch.dtype,
) -> LinearFn:  # fmt: skip
    """The product chosen by `plan`, with a weight's parts."""
    named = {candidate.name: candidate for candidate in candidates if candidate.name in chosen}
    linear_fns = {name: candidate.make(parts, bias_N, out_dtype) for name, candidate in named.items()}
    return BucketLinear(
        linear_fns, {name: candidate.any_rows for name, candidate in named.items()}, buckets, chosen
    )
