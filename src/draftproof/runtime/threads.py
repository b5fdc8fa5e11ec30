"""torch's settings during our computations: the number of threads, and the precision of sums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
