"""Values of a checkpoint's config, checked for their type: each wrong one is refused with file, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flag(raw: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """true or false; `default` where the key is missing or null."""
    value = _given(raw, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key}={value!r}: must be true or false")
    return value


def whole(
    raw: Mapping[str, Any],
    key: str,
    where: str,
    low: int,
    high: int | None = None,
    default: int | None = None,
) -> int:
    """An integer from `low` to `high`; `default` where the key is missing or null, else it must be there."""
    value = _given(raw, key, default)
    if not _is_whole(value, low) or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{where}: {key}={value!r}: must be an integer {bounds}")
    return int(value)


def ids(raw: Mapping[str, Any], key: str, where: str, low: int = 0) -> tuple[int, ...]:
    """Numbers of layers, one at least."""
    value = raw.get(key)
    if not isinstance(value, list) or not value or not all(_is_whole(i, low) for i in value):
        raise ValueError(f"{where}: {key}={value!r}: must be a list of layer numbers of at least {low}")
    return tuple(value)


def _given(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    return default if value is None else value


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
