"""The id of the mask token, wherever a format keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.schema import section, whole

_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def mask_token(raw: Mapping[str, Any], where: str) -> int | None:
    """The first id that is there: in `dflash_config`, then under the formats' own names."""
    nested = section(raw, "dflash_config", where)
    for place, keys, part in ((nested, _KEYS[:1], f"{where}: dflash_config"), (raw, _KEYS, where)):
        for key in keys:
            if place.get(key) is not None:
                return whole(place, key, part, 0)
    return None
