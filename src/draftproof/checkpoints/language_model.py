"""A plain language model in Hugging Face format, as a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.drafters.build import DraftCheckpoint
from draftproof.drafters.draft_model import DraftModelSettings
from draftproof.models import config as model_config
from draftproof.models.families import FAMILIES
from draftproof.models.loading import Weights, WeightSource


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") in FAMILIES


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    return DraftCheckpoint(
        method="draft_model",
        where=str(directory / "config.json"),
        settings=DraftModelSettings(model=model_config.read_config(directory)),
        weights=Weights.open(directory) if weights is None else weights,
        directory=directory,
    )
