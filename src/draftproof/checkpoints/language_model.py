"""A plain language model in Hugging Face format, as a draft model, or one trained to fill mask tokens (PARD)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.context import DraftCheckpoint
from draftproof.drafters.model_head import DraftModelSettings
from draftproof.models import config as model_config
from draftproof.models import vision, vision_families
from draftproof.models.families import FAMILIES
from draftproof.models.weights import Weights, WeightSource

_MASK_KEYS = ("pard_token", "ptd_token_id")  # only models trained with masks have one
_OWN_KEYS = (*_MASK_KEYS, "spd_type")


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") in {*FAMILIES, *vision_families.FAMILIES}


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    where = str(directory / "config.json")
    mask = mask_token({key: raw.get(key) for key in _MASK_KEYS}, where)
    weights = Weights.open(directory) if weights is None else weights
    seeing = vision.read(raw, where, directory)
    return DraftCheckpoint(
        method="draft_model" if mask is None else "pard",
        where=where,
        settings=DraftModelSettings(
            model=model_config.language_model(raw, where, extra=_OWN_KEYS),
            mask_token=mask,
            vision=seeing if vision.is_stored(weights) else None,
        ),
        weights=weights,
        directory=directory,
    )
