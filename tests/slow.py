"""What `make check` leaves out and `make test` runs: tests marked `slow`, and most cases of long lists."""

from __future__ import annotations

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
