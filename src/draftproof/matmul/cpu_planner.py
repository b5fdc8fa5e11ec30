"""The planner for CPUs: for each weight shape, the fastest candidate that has the reference's bits.

Candidates do not share a weight on a CPU (each packs it), so a shape has one. The compiled product, if available, is
chosen regardless of timings: it is exact by construction, only its calls can be recorded as a program, and timings made
on a busy machine would persist on disk. Otherwise all are timed first. The fastest is certified and timed again with
its certificate's restrictions, until the fastest of all is a certified one. All certified candidates have the same
bits, so timings may decide.
Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.matmul import products
from draftproof.matmul.certify import Reference, bucket_table, cancelling
from draftproof.matmul.plan_cache import BucketLinear, CandidateResult, Choice, ReportRow
from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.matmul.weights import parts
from draftproof.runtime.threads import threads

TIMED_ROWS = (2, 8, 64, 512)  # decoding, verifying, a small batch, prefill
TIMING_BUDGET = 0.01  # seconds per measurement
# Timings on a busy machine are noisy: an earlier candidate is kept unless it is slower by this factor.
CLEARLY_SLOWER = 1.15
CPU = torch.device("cpu")


@dataclass(slots=True)
class _Trial:
    """A candidate and its times at TIMED_ROWS: `raw_us` unrestricted, `planned_us` with its certificate's
    restrictions.
    """

    candidate: Candidate
    raw_us: list[float]
    buckets: tuple[int, ...] | None = None  # None: not certified yet
    planned_us: list[float] | None = None

    @property
    def us(self) -> list[float]:
        return self.raw_us if self.planned_us is None else self.planned_us


def plan(shape: Shape, candidates: Sequence[Candidate], *, thorough: bool = False) -> Choice:
    """Time, then certify, the candidates in their fixed order; the first is the reference. `thorough`: certify all."""
    if candidates[0].any_rows and not thorough:
        candidates = candidates[:1]
    table = bucket_table(shape, 0, CPU)
    rows = tuple(t for t in TIMED_ROWS if t <= table[-1])
    x_TK, weight_NK = cancelling(max(rows), shape, seed=0)
    trials = [
        _Trial(candidate, _times(_make(candidate, weight_NK, shape), x_TK, rows)) for candidate in candidates
    ]
    reference = Reference(shape, candidates[0], table, CPU)
    usable = list(trials)
    best = None
    while usable and best is None:
        likely = _fastest(usable, [c.us for c in trials])
        if likely.buckets is None:
            _certify(likely, reference, weight_NK, x_TK, rows, shape)
        elif likely.buckets:
            best = likely
        usable = [c for c in usable if c.buckets != ()]
    for trial in trials if thorough else ():
        if trial.buckets is None:
            _certify(trial, reference, weight_NK, x_TK, rows, shape)
    if best is None:
        best = _fallback(candidates[0], reference, weight_NK, x_TK, rows, shape)
    return _choice(shape, best, [*trials, *([] if best in trials else [best])], rows, len(table))


def _fastest(trials: Sequence[_Trial], others: Sequence[Sequence[float]]) -> _Trial:
    """The first candidate in the fixed order that no later one clearly beats; slowness is relative to `others`."""
    if trials[0].candidate.any_rows:
        return trials[0]
    slowness = [_relative(c.us, others) for c in trials]
    return next(c for c, slow in zip(trials, slowness, strict=True) if slow <= CLEARLY_SLOWER * min(slowness))


def planned(candidate: Candidate, linear_fn: LinearFn, buckets: Sequence[int]) -> LinearFn:
    """`linear_fn` restricted to its certified numbers of rows."""
    if candidate.any_rows:
        return linear_fn
    return BucketLinear(
        {candidate.name: linear_fn}, {candidate.name: False}, buckets, [candidate.name] * len(buckets)
    )


def fallbacks(reference: Candidate) -> list[Candidate]:
    """Candidates if none has the reference's bits at this number of threads.

    First the reference itself at one thread, which defines the bits, then, for a dense weight, row by row.
    """
    slow = [products.SLOW] if products.SLOW.takes & reference.takes else []
    return [one_thread(reference), *slow]


def one_thread(candidate: Candidate) -> Candidate:
    """`candidate` run at one thread, whatever torch's setting."""

    def make(given: Any, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        linear_fn = candidate.make(given, bias_N, out_dtype)

        def run(x_TK: Tensor) -> Tensor:
            with threads(1):
                return linear_fn(x_TK)

        return run

    return dataclasses.replace(candidate, name=f"{candidate.name} at 1 thread", make=make)


def _fallback(
    candidate: Candidate,
    reference: Reference,
    weight_NK: Tensor,
    x_TK: Tensor,
    rows: Sequence[int],
    shape: Shape,
) -> _Trial:
    """The first exact fallback. The last one has bits different from the reference's, but its rows agree with each
    other.
    """
    table = bucket_table(shape, 0, CPU)
    for other in fallbacks(candidate):
        found = _Trial(other, _times(_make(other, weight_NK, shape), x_TK, rows))
        own = Reference(shape, other, table, CPU) if other is products.SLOW else reference
        _certify(found, own, weight_NK, x_TK, rows, shape)
        if found.buckets:
            return found
    raise AssertionError("rows one by one do not depend on their neighbours")


def _certify(
    trial: _Trial,
    reference: Reference,
    weight_NK: Tensor,
    x_TK: Tensor,
    rows: Sequence[int],
    shape: Shape,
) -> None:
    trial.buckets = reference.certified(trial.candidate)
    if trial.candidate.any_rows and trial.buckets:
        trial.planned_us = trial.raw_us
    elif trial.buckets:
        linear_fn = planned(trial.candidate, _make(trial.candidate, weight_NK, shape), trial.buckets)
        trial.planned_us = _times(linear_fn, x_TK, rows)


def _choice(
    shape: Shape, best: _Trial, trials: Sequence[_Trial], rows: Sequence[int], num_buckets: int
) -> Choice:
    assert best.planned_us is not None and best.buckets is not None
    lines = []
    for i, t in enumerate(rows):
        free = min(trials, key=lambda c: c.raw_us[i])
        lines.append(
            ReportRow(
                shape.key(), t, best.candidate.name, best.planned_us[i], free.candidate.name, free.raw_us[i]
            )
        )
    results = [
        CandidateResult(
            candidate=c.candidate.name,
            exact=None if c.buckets is None else len(c.buckets) / num_buckets,
            rows=tuple(rows),
            microseconds=tuple(c.us),
        )
        for c in trials
    ]
    return Choice(best.candidate.name, best.buckets, tuple(lines), (), tuple(results))


def _relative(times: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """Slowness relative to the fastest at each number of rows, summed."""
    return sum(us / min(other[i] for other in others) for i, us in enumerate(times))


def _make(candidate: Candidate, weight_NK: Tensor, shape: Shape) -> LinearFn:
    return candidate.make(parts(shape.kind, weight_NK), None, shape.out_dtype)


def _times(linear_fn: LinearFn, x_TK: Tensor, rows: Sequence[int]) -> list[float]:
    return [_microseconds(linear_fn, x_TK[:t].clone()) for t in rows]


def _microseconds(linear_fn: LinearFn, x_TK: Tensor) -> float:
    """Minimum time of a call, over at least 5 calls and about TIMING_BUDGET seconds."""
    linear_fn(x_TK)
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < TIMING_BUDGET and len(taken) < 50):
        start = time.perf_counter()
        linear_fn(x_TK)
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e6
