"""What each operator's folder registers: its versions, all with one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftproof.runtime.native import Library

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versions(Generic[T]):
    """The versions of one operator. `reference`: in torch; it defines the result.

    The others are created on demand: `compiled` in C++ from the library; `triton`, which imports triton only then.
    None: on a GPU `reference` is used.
    """

    reference: T
    compiled: Callable[[Library], T]
    triton: Callable[[], T] | None
