"""A plain language model in Hugging Face format, as a draft model, or one trained to fill mask tokens (PARD)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.drafters.build import DraftCheckpoint
from draftproof.drafters.draft_model import DraftModelSettings
from draftproof.models import config as model_config
from draftproof.models.families import FAMILIES
from draftproof.models.loading import Weights, WeightSource

_MASK_KEYS = ("pard_token", "ptd_token_id")  # only models trained with masks have one
_OWN_KEYS = (*_MASK_KEYS, "spd_type")


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") in FAMILIES


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    masks = [key for key in _MASK_KEYS if raw.get(key) is not None]
    return DraftCheckpoint(
        method="pard" if masks else "draft_model",
        where=str(directory / "config.json"),
        settings=DraftModelSettings(
            model=model_config.read_config(directory, extra=_OWN_KEYS),
            mask_token=raw[masks[0]] if masks else None,
        ),
        weights=Weights.open(directory) if weights is None else weights,
        directory=directory,
    )
