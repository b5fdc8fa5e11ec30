"""What `make check` leaves out and `make test` runs: tests marked `slow`, and most cases of long lists. What both leave
out, of lists that say the same again and again, runs with DRAFTPROOF_TEST_EVERYTHING=1."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

slow = pytest.mark.slow


def few(values: Iterable[Any], *kept: Any) -> list[Any]:
    """`values` for parametrize: all but `kept` are slow."""
    listed = list(values)
    assert kept and all(value in listed for value in kept), f"{kept} are not all in {listed}"
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=slow)
        for value in listed
    ]


def some(values: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """`values` for parametrize where the environment asks for everything, else `kept`, which are among them."""
    listed, chosen = list(values), list(kept)
    assert chosen and all(value in listed for value in chosen), f"{chosen} are not all in {listed}"
    return listed if os.environ.get("DRAFTPROOF_TEST_EVERYTHING") else chosen
