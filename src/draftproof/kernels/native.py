"""The compiled operators: one plain C library, built on first use, loaded with ctypes."""

from __future__ import annotations

from collections.abc import Callable


class Library:
    """The loaded library."""


def load(progress: Callable[[str], None] | None = None) -> Library | None:
    """The library, built if need be; None where there is no compiler or DRAFTPROOF_NATIVE=0."""
    return None
