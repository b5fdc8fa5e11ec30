"""The id of the mask token, under any of the formats' keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.schema import section, whole

_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def mask_token(raw: Mapping[str, Any], where: str) -> int | None:
    """The first id found: in `dflash_config`, then under the formats' own keys."""
    nested = section(raw, "dflash_config", where)
    for place, keys, part in ((nested, _KEYS[:1], f"{where}: dflash_config"), (raw, _KEYS, where)):
        for key in keys:
            if place.get(key) is not None:
                return whole(place, key, part, 0)
    return None
