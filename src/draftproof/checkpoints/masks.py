"""Where formats keep the id of the mask token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def mask_token(raw: Mapping[str, Any]) -> int | None:
    """The first that is there: in `dflash_config`, then under the formats' own names."""
    nested = (raw.get("dflash_config") or {}).get("mask_token_id")
    return next((i for i in (nested, *(raw.get(key) for key in _KEYS)) if i is not None), None)
