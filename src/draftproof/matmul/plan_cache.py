"""The planner's decision for the products of a shape, its copy on disk, and the function that carries it out.

Shapes: T rows, K inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.matmul.spec import LinearFn, partial_sums
from draftproof.runtime.store import Store

PADDING = 1.5  # maximum bucket size relative to the number of rows
ALIGNMENT = 64  # bytes; certificates are made on buffers with this alignment


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One line of `LinearPlanner.report`. Times in microseconds; `cost` 0.02: exactness costs 2 % at these rows."""

    shape: str
    rows: int
    candidate: str
    microseconds: float
    fastest_candidate: str
    fastest_microseconds: float

    @property
    def cost(self) -> float:
        return max(0.0, self.microseconds / self.fastest_microseconds - 1)


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Results of one candidate for a shape. `exact`: share of the buckets with the reference's bits; None: not checked,
    since a faster candidate was certified. `microseconds`: at each of `rows`.
    """

    candidate: str
    exact: float | None
    rows: tuple[int, ...]
    microseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for a shape: the candidate, and the numbers of rows it may be called at (none: any).

    `by_bucket`: instead, the candidate of each bucket, if candidates share the weight (on a GPU); "" for a bucket
    without one. `results`: the findings for each candidate that was examined.
    """

    candidate: str
    buckets: tuple[int, ...]
    report: tuple[ReportRow, ...]
    by_bucket: tuple[str, ...] = ()
    results: tuple[CandidateResult, ...] = ()


class Cache:
    """Choices on disk."""

    def __init__(self, path: Path) -> None:
        self._store = Store(path)

    def read(self) -> dict[str, Choice]:
        try:
            return {key: _choice(value) for key, value in self._store.read().items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return {}

    def write(self, choices: Mapping[str, Choice]) -> None:
        """Add to the stored choices."""
        self._store.add({key: dataclasses.asdict(choice) for key, choice in choices.items()})


def _choice(raw: dict[str, Any]) -> Choice:
    """A choice from JSON. Raises KeyError, TypeError or ValueError for anything that `Cache.write` does not write."""
    buckets = tuple(int(rows) for rows in raw["buckets"])
    candidate = raw["candidate"]
    if not isinstance(candidate, str) or any(rows < 1 for rows in buckets):
        raise ValueError("not a certificate")
    by_bucket = tuple(str(name) for name in raw.get("by_bucket", ()))
    if by_bucket and len(by_bucket) != len(buckets):
        raise ValueError("not a certificate")
    results = [
        CandidateResult(v["candidate"], v["exact"], tuple(v["rows"]), tuple(v["microseconds"]))
        for v in raw["results"]
    ]
    report = tuple(ReportRow(**line) for line in raw["report"])
    return Choice(candidate, buckets, report, by_bucket, tuple(results))


class BucketLinear:
    """A product that calls, for each number of rows, the candidate of the next larger bucket; calls with more rows than
    the last bucket are split.

    Candidates exact by construction get the rows unpadded, others an aligned buffer of a certified number of rows.
    """

    def __init__(
        self,
        linear_fns: Mapping[str, LinearFn],
        any_rows: Mapping[str, bool],
        buckets: Sequence[int],
        chosen: Sequence[str],
    ) -> None:
        certified = [
            (b, linear_fns[name], any_rows[name]) for b, name in zip(buckets, chosen, strict=True) if name
        ]
        assert certified, "no bucket has a candidate"
        self._most = certified[-1][0]
        self._plan = [_entry(certified, rows) for rows in range(self._most + 1)]

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._run(x_TK, in_parts=False)

    def partial_sums(self, x_TK: Tensor) -> Tensor:
        """See `spec.partial_sums`."""
        return self._run(x_TK, in_parts=True)

    def _run(self, x_TK: Tensor, *, in_parts: bool) -> Tensor:
        rows = x_TK.shape[0]
        if rows > self._most:
            return torch.cat([self(part) for part in x_TK.split(self._most)])
        bucket, linear_fn, any_rows = self._plan[rows]
        if rows > bucket and not any_rows:
            return torch.cat([self(part) for part in x_TK.split(bucket)])
        if any_rows or (bucket == rows and x_TK.is_contiguous() and x_TK.data_ptr() % ALIGNMENT == 0):
            return (partial_sums(linear_fn) if in_parts else linear_fn)(x_TK)
        buffer = x_TK.new_zeros(bucket, x_TK.shape[1])
        buffer[:rows] = x_TK
        return linear_fn(buffer)[:rows]


def _entry(certified: Sequence[tuple[int, LinearFn, bool]], rows: int) -> tuple[int, LinearFn, bool]:
    """The bucket that `rows` rows are padded to or, if padding would add more than half, the one that they are split
    by.
    """
    above = next(entry for entry in certified if entry[0] >= rows)
    below = [entry for entry in certified if 0 < entry[0] <= rows]
    return above if above[2] or above[0] <= PADDING * rows or not below else below[-1]
