"""Certificates of operators: on this machine a row has the same bits alone as among other rows.

A check runs an operator on data that exposes errors: another order of sums or, where nothing is summed, another
rounding. It proves this with a wrong twin, whose code makes the result depend on the number of rows: the twin must
fail. If it passes, the data exposes nothing and there is no certificate.
Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.runtime import environment, native
from draftproof.runtime.store import Store
from draftproof.runtime.threads import threads

Bits = tuple[Tensor, ...]  # outputs of an operator, rows first

SIZES = (2, 3, 4, 5, 7, 8, 9, 16, 17, 33)  # numbers of rows, around the tile sizes of every kernel
MANY_ROWS = 2111  # enough to split work among threads
LEAST_MANY = 64  # minimum rows of the largest call, for any width
MANY_NUMBERS = 1 << 21  # maximum elements of an input
THREADS = (1, 2, 3)  # besides the engine's number, so that verdicts depend on the machine, not on the setting
NUM_ROWS = 67


class NoPowerError(RuntimeError):
    """The test data does not expose a change of order, so a certificate would mean nothing."""


def num_test_rows(width: int) -> int:
    """Rows of test data for an operator whose rows have `width` numbers."""
    return max(9, min(NUM_ROWS, MANY_NUMBERS // max(1, width)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Test data of one operator at one shape.

    run(version, rows_T): outputs of `version` for these rows of the data (int64 indices, repeats allowed), computed in
    one call. wrong: the twin that must fail.
    """

    num_rows: int
    width: int  # approximate numbers per row; bounds the largest call
    run: Callable[[Any, Tensor], Bits]
    wrong: Any
    device: torch.device
    groups: tuple[tuple[int, ...], ...] = ()  # additional groups of rows that share a call
    proof_rows: tuple[int, ...] = ()  # rows for the twin; empty: every row
    too_short: bool = False  # sums too short to expose an order: the twin is not run


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one shape, to be certified.

    `operator`: its field in `Ops`, or "attention"; `key`: all sizes and dtypes; `make`: creates the check, called only
    if there is no certificate yet.
    """

    operator: str
    key: str
    make: Callable[[], Check]

    @property
    def name(self) -> str:
        return f"{self.operator} {self.key}"


def rows_agree(check: Check, version: Any, num_threads: int) -> bool:
    """Whether every row always has the bits that it has alone at one thread.

    Rows are computed alone at `num_threads`, in groups of many sizes and orders, and among many rows at other numbers
    of threads.
    """
    everything_T = torch.arange(check.num_rows, device=check.device)
    alone = _alone(check, version, everything_T)
    for count in sorted({*THREADS, num_threads}):
        with threads(count):
            groups = list(_groups(check)) if count == num_threads else [_many(check)]
            if not all(_equal(check.run(version, rows_T), alone, rows_T) for rows_T in groups):
                return False
    return _equal(_alone(check, version, everything_T, num_threads), alone, everything_T)


class OperatorCertifier:
    """Finds the first exact version of each operator on this machine, and keeps the verdicts on disk.

    The order of the versions decides, not their speed: versions may differ in their bits, and a machine must always
    choose the same one. Certificates apply to torch's number of threads at the creation of this object. `fresh`: ignore
    verdicts on disk.
    """

    def __init__(
        self,
        device: torch.device,
        library: native.Library | None,
        *,
        cache_dir: Path | None = None,
        fresh: bool = False,
    ) -> None:
        folder = cache_dir or native.default_cache_dir()
        self._store = Store(folder / f"operators-{environment.key(device, library)}.json")
        self._known = {} if fresh else self._store.read()
        self._num_threads = torch.get_num_threads()
        self._last: tuple[str, Check] | None = None

    def knows(self, cases: Sequence[Case], versions: Iterable[str]) -> bool:
        """Whether the first exact version can be found from known verdicts alone."""
        for name in versions:
            known = [self._known.get(f"{name}: {case.name}") for case in cases]
            if False not in known:
                return None not in known
        return False

    def verdict(self, case: Case, name: str, version: Any) -> bool:
        """Whether `version`, called `name`, is exact; from disk if known."""
        key = f"{name}: {case.name}"
        if not isinstance(self._known.get(key), bool):
            self._known[key] = rows_agree(self.proved(case), version, self._num_threads)
            self._store.add({key: self._known[key]})
        return bool(self._known[key])

    def proved(self, case: Case) -> Check:
        """The check of `case` with its power proved, made once for consecutive calls with the same case."""
        if self._last is None or self._last[0] != case.name:
            check = case.make()
            try:
                prove_power(check)
            except NoPowerError as error:
                raise NoPowerError(f"{case.name}: {error}") from None
            self._last = case.name, check
        return self._last[1]

    def first_exact(self, cases: Sequence[Case], versions: Mapping[str, Any]) -> str | None:
        """The name of the first version that passes all cases; None if none does."""
        for name, version in versions.items():
            if all(self.verdict(case, name, version) for case in cases):
                return name
        return None


def prove_power(check: Check) -> None:
    """Raise NoPowerError if the wrong twin passes."""
    if check.too_short:
        return
    rows_T = torch.tensor(check.proof_rows or range(check.num_rows), device=check.device)
    with threads(1):
        together = check.run(check.wrong, rows_T)
    alone = _alone(check, check.wrong, rows_T)
    if all(torch.equal(x, each) for x, each in zip(together, alone, strict=True)):
        raise NoPowerError("the data does not show a wrong result")


def _alone(check: Check, version: Any, rows_T: Tensor, num_threads: int = 1) -> Bits:
    with threads(num_threads):
        each = [check.run(version, row_1) for row_1 in rows_T.split(1)]
    return tuple(torch.cat(outputs) for outputs in zip(*each, strict=True))


def _groups(check: Check) -> Iterator[Tensor]:
    """The groups of rows that share a call, each [T]."""
    count = check.num_rows
    device = check.device
    generator = torch.Generator().manual_seed(0)
    yield torch.arange(count, device=device)
    yield torch.arange(count, device=device).flip(0)
    for number, size in enumerate(size for size in SIZES if size < count):
        yield torch.randperm(count, generator=generator)[:size].to(device)
        first = (number * 5) % (count - size)
        yield torch.arange(first, first + size, device=device)
    for rows in check.groups:
        yield torch.tensor(rows, device=device)
    yield _many(check)


def _many(check: Check) -> Tensor:
    """The test rows repeated, up to the number of rows of a long prompt."""
    most = max(LEAST_MANY, min(MANY_ROWS, MANY_NUMBERS // max(1, check.width)))
    return torch.arange(max(check.num_rows, most), device=check.device) % check.num_rows


def _equal(found: Bits, alone: Bits, rows_T: Tensor) -> bool:
    return all(torch.equal(x, each[rows_T]) for x, each in zip(found, alone, strict=True))
