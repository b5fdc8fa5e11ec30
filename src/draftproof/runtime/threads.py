"""torch's settings during our computations: the number of threads, and the precision of sums."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class Certified(Protocol):
    """What runs on the number of threads that its certificates were made with."""

    @property
    def num_threads(self) -> int: ...


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Certified)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch and the library on `count` threads, then restore the previous number."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def is_undisturbed(num_threads: int) -> bool:
    """Whether torch's settings are those that `threads` and `own_precision` would set, and inference mode is off."""
    return (
        torch.get_num_threads() == num_threads
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
        and torch.get_float32_matmul_precision() == "highest"
    )


@contextlib.contextmanager
def own_precision() -> Iterator[None]:
    """The model's dtypes and fp32 sums, whatever the caller set: autocast and matmul precision would choose others.

    Settings are changed only if they differ, since reading them is cheaper than setting them.
    """
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                yield
        else:
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


def as_certified(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """A method that runs as certificates were made: at their number of threads, and in the dtypes that the model has,
    whatever a caller set for himself (`torch.autocast` would choose others). Buffers outlive the call, so they do not
    take on a caller's inference mode."""

    @functools.wraps(method)
    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_undisturbed(self.num_threads):  # asking costs less than setting
            return method(self, *args, **kwargs)
        with torch.inference_mode(False), threads(self.num_threads), own_precision():
            return method(self, *args, **kwargs)

    return run
