"""What the planner decided for the products of a shape, its copy on disk, and the function that obeys it.

Shapes: T rows, K inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels import products
from draftproof.kernels.products import LinearFn

PADDING = 1.5  # rows of a bucket for each row that there is, at most
ALIGNMENT = 64  # bytes; certificates are made on buffers aligned like this


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
    """What is known of one candidate for a shape. `exact`: share of the buckets with the reference's bits; None: not
    asked, since a faster candidate had its certificate. `microseconds`: at each of `rows`."""

    candidate: str
    exact: float | None
    rows: tuple[int, ...]
    microseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What certification decided for a shape: the candidate, and the numbers of rows it may be called at (none: any).

    `by_bucket`: the candidate of each bucket instead, where candidates share the weight (a GPU); "" where a bucket has
    none. `results`: what was found out about each candidate that was looked at.
    """

    candidate: str
    buckets: tuple[int, ...]
    report: tuple[ReportRow, ...]
    by_bucket: tuple[str, ...] = ()
    results: tuple[CandidateResult, ...] = ()


class Store:
    """A JSON object on disk that processes add to. Anything unreadable in it counts as absent."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        try:
            raw = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return raw if isinstance(raw, dict) else {}

    def add(self, entries: Mapping[str, Any]) -> None:
        """Atomic; a folder that cannot be written only costs the next start its time, which one warning says."""
        temporary = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**self.read(), **entries}, indent=1))
            os.replace(temporary, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            warnings.warn(
                f"{self._path.parent}: cannot be written ({error.strerror}), so operators are compiled and certified "
                "again at every start; set XDG_CACHE_HOME to a folder that can be written",
                stacklevel=1,  # one place, so it is shown once
            )


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
        """Add to what is there."""
        self._store.add({key: dataclasses.asdict(choice) for key, choice in choices.items()})


def _choice(raw: dict[str, Any]) -> Choice:
    """Raises KeyError, TypeError or ValueError for anything that `Cache.write` does not write."""
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
    """A product that calls, for each number of rows, the candidate of the bucket above it; more rows than the last are
    split.

    Candidates exact by construction get the rows as they are, others an aligned buffer of a certified number of rows.
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
        return self._run(x_TK, partial_sums=False)

    def partial_sums(self, x_TK: Tensor) -> Tensor:
        """See `products.partial_sums`."""
        return self._run(x_TK, partial_sums=True)

    def _run(self, x_TK: Tensor, *, partial_sums: bool) -> Tensor:
        rows = x_TK.shape[0]
        if rows > self._most:
            return torch.cat([self(part) for part in x_TK.split(self._most)])
        bucket, linear_fn, any_rows = self._plan[rows]
        if rows > bucket and not any_rows:
            return torch.cat([self(part) for part in x_TK.split(bucket)])
        if any_rows or (bucket == rows and x_TK.is_contiguous() and x_TK.data_ptr() % ALIGNMENT == 0):
            return (products.partial_sums(linear_fn) if partial_sums else linear_fn)(x_TK)
        buffer = x_TK.new_zeros(bucket, x_TK.shape[1])
        buffer[:rows] = x_TK
        return linear_fn(buffer)[:rows]


def _entry(certified: Sequence[tuple[int, LinearFn, bool]], rows: int) -> tuple[int, LinearFn, bool]:
    """The bucket that `rows` are padded to; where padding would add more than half, the one they are split by."""
    above = next(entry for entry in certified if entry[0] >= rows)
    below = [entry for entry in certified if 0 < entry[0] <= rows]
    return above if above[2] or above[0] <= PADDING * rows or not below else below[-1]
