"""Which way runs at which number of rows on a GPU. Ways share the weight, so each bucket of rows may have its own.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels import certify
from draftproof.kernels.certify import Shape
from draftproof.kernels.gpu import linear
from draftproof.kernels.gpu.norm import rms_norm
from draftproof.kernels.products import Form, Way

TIMED_ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048)
COLD_BYTES = 512 << 20  # weights a timing goes through, so that none is in the cache when its turn comes
REPLAYS = 10
CLOSE, ROUNDS = 1.1, 5  # ways within this factor of the fastest are timed so often again
PADDING = 1.5  # times the rows that there are
WIDE, MOST_WIDE_ROWS = 1 << 15, 512  # outputs of heads, whose results for a whole prompt would take gigabytes
SWITCH = 1.02  # a way must be this much faster than the one of the bucket below to take its place


def times(
    shape: Shape, ways: Sequence[Way], device: torch.device, rows: Sequence[int]
) -> dict[str, list[float]]:
    """Microseconds of each way at each number of rows, weights not in the cache; infinite where it is not tried.

    As in a pass: after each product comes a small operator, which some ways may begin before and some may not.
    """
    size = shape.outputs * shape.inputs * shape.dtype.itemsize
    copies = min(max(COLD_BYTES // size, 1), 32)
    weights = [
        torch.randn(shape.outputs, shape.inputs, device=device, dtype=torch.float32).to(shape.dtype)
        for _ in range(copies)
    ]
    bias_N = weights[0][:, 0].contiguous() if shape.bias else None
    forms = {way.name: [way.make(weight, bias_N, shape.out_dtype) for weight in weights] for way in ways}
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for t in rows:
        x_TK = torch.randn(t, shape.inputs, device=device).to(shape.dtype)
        tried = {n: form for n, form in forms.items() if linear.suits(n, shape, t)}
        small = functools.partial(rms_norm, x_TK, torch.ones_like(x_TK[0]), 1e-6)
        taken = _race(
            {
                n: [c for form in form for c in (functools.partial(form, x_TK), small)]
                for n, form in tried.items()
            }
        )
        small_us = TimedGraph([small] * 20).microseconds()
        for way in ways:
            found[way.name].append(2 * taken.get(way.name, float("inf")) - small_us)
    return found


def _race(calls: Mapping[str, Sequence[Callable[[], object]]]) -> dict[str, float]:
    """Least microseconds of a call; those that are close run again, in turns: clocks change with time."""
    pool = torch.cuda.graph_pool_handle()  # nobody reads what they compute, so it may lie in one place
    graphs = {name: TimedGraph(several, pool) for name, several in calls.items()}
    best = {name: graph.microseconds() for name, graph in graphs.items()}
    close = [name for name, t in best.items() if t <= CLOSE * min(best.values())]
    for _ in range(ROUNDS if len(close) > 1 else 0):
        for name in close:
            best[name] = min(best[name], graphs[name].microseconds())
    return best


class TimedGraph:
    """Calls in one CUDA graph: what the device needs for them, without the host."""

    def __init__(self, calls: Sequence[Callable[[], object]], pool: Any = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._num_calls, self._graph = len(calls), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            for call in calls:
                call()
        self._graph.replay()

    def microseconds(self, replays: int = REPLAYS) -> float:
        """Least time of one call."""
        best = float("inf")
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        return best * 1e3 / self._num_calls


def choose(
    ways: Sequence[Way], certified: Mapping[str, tuple[int, ...]], microseconds: Mapping[str, Sequence[float]],
    rows: Sequence[int], buckets: Sequence[int],
) -> tuple[str, ...]:  # fmt: skip
    """The fastest certified way of each bucket, "" where there is none. `microseconds` are at `rows`."""
    chosen: list[str] = []
    for bucket in buckets:
        timed = next((i for i, t in enumerate(rows) if t >= bucket), len(rows) - 1)
        usable = [way.name for way in ways if bucket in certified[way.name]]
        best = min(usable, key=lambda name: microseconds[name][timed], default="")
        before = chosen[-1] if chosen else ""
        if before in usable and microseconds[before][timed] <= SWITCH * microseconds[best][timed]:
            best = before
        chosen.append(best)
    return tuple(chosen)


class BucketForm:
    """Calls, for each number of rows, the way of the bucket above it; more rows than the last are split.

    Ways exact by construction get the rows as they are, others an aligned buffer of a certified number of rows.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        any_rows: Mapping[str, bool],
        buckets: Sequence[int],
        chosen: Sequence[str],
    ) -> None:
        certified = [
            (b, forms[name], any_rows[name]) for b, name in zip(buckets, chosen, strict=True) if name
        ]
        assert certified, "no bucket has a way"
        self._most = certified[-1][0]
        self._plan = [_entry(certified, rows) for rows in range(self._most + 1)]

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows = x_TK.shape[0]
        if rows > self._most:
            return torch.cat([self(part) for part in x_TK.split(self._most)])
        bucket, form, any_rows = self._plan[rows]
        if rows > bucket and not any_rows:
            return torch.cat([self(part) for part in (x_TK[:bucket], x_TK[bucket:])])
        if any_rows or (bucket == rows and x_TK.is_contiguous() and x_TK.data_ptr() % 64 == 0):
            return form(x_TK)
        buffer = x_TK.new_zeros(bucket, x_TK.shape[1])
        buffer[:rows] = x_TK
        return form(buffer)[:rows]


def _entry(certified: Sequence[tuple[int, Form, bool]], rows: int) -> tuple[int, Form, bool]:
    """The bucket to fill `rows` up to; where that would waste half as many again, the one to split them by."""
    above = next(entry for entry in certified if entry[0] >= rows)
    below = [entry for entry in certified if 0 < entry[0] <= rows]
    return above if above[2] or above[0] <= PADDING * rows or not below else below[-1]


@dataclass(frozen=True, slots=True)
class Timed:
    """What was chosen at a number of rows, and what would be the fastest without certificates."""

    rows: int
    way: str
    microseconds: float
    fastest_way: str
    fastest_microseconds: float


def plan(
    shape: Shape, ways: Sequence[Way], max_rows: int, device: torch.device
) -> tuple[tuple[int, ...], tuple[str, ...], list[Timed]]:
    """(buckets, the certified way of each, "" where there is none, and what they take)."""
    max_rows = min(max_rows, MOST_WIDE_ROWS) if shape.outputs > WIDE else max_rows
    buckets = certify.buckets_up_to(max_rows, device)
    rows = [t for t in TIMED_ROWS if t <= buckets[-1]]
    with torch.no_grad():
        certified = certify.certify(shape, ways, max_rows, device)
        microseconds = times(shape, ways, device, rows)
    chosen = choose(ways, certified, microseconds, rows, buckets)
    timed = []
    for i, t in enumerate(rows):
        way = chosen[buckets.index(t)] if t in buckets else ""
        fastest = min(microseconds, key=lambda name: microseconds[name][i])
        if way:
            timed.append(Timed(t, way, microseconds[way][i], fastest, microseconds[fastest][i]))
    return buckets, chosen, timed


def make(
    ways: Sequence[Way], buckets: Sequence[int], chosen: Sequence[str],
    weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype,
) -> Form:  # fmt: skip
    """The product of `plan`'s choice."""
    named = {way.name: way for way in ways if way.name in chosen}
    forms = {name: way.make(weight_NK, bias_N, out_dtype) for name, way in named.items()}
    return BucketForm(forms, {name: way.any_rows for name, way in named.items()}, buckets, chosen)
