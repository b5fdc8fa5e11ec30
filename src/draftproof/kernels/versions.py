"""What the folder of an operator registers: its versions, which all have one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from draftproof.runtime.native import Library

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versions(Generic[T]):
    """The versions of one operator. `reference`: in torch, and the one that says what is computed.

    The others are made when they are wanted: one in C++ from the library, one in Triton, which may import triton only
    then. None: `reference` is as good.
    """

    reference: T
    compiled: Callable[[Library], T]
    triton: Callable[[], T] | None
