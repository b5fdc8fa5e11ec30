"""DFlash heads as their authors publish them: a flat config with `dflash_config` (z-lab/dflash, model.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.checkpoints import values
from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.block import BlockSettings
from draftproof.drafters.build import DraftCheckpoint
from draftproof.models import config as model_config
from draftproof.models.loading import Weights, WeightSource

_OWN_KEYS = ("dflash_config", "block_size", "num_target_layers", "mask_token_id")


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    """The flat form: other formats with the same architecture describe their layers in a part of their own."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return False
    return "dflash_config" in raw or "DFlashDraftModel" in (raw.get("architectures") or ())


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """The format counts layers from their outputs, so its id i is the state that enters layer i + 1; the last layer's
    it reads after the final norm."""
    where = str(directory / "config.json")
    own: Mapping[str, Any] = raw.get("dflash_config") or {}
    ids = values.ids(own, "target_layer_ids", f"{where}: dflash_config", -1)
    block_size = values.whole({**own, **raw}, "block_size", where, 2, 64)
    layers = model_config.parse(raw, where=where, extra=_OWN_KEYS)
    return DraftCheckpoint(
        method="dflash",
        where=where,
        settings=BlockSettings(
            layers=layers,
            draft_vocab_size=layers.vocab_size,
            taps=tuple(i + 1 for i in ids),
            last_tap_is_normed=True,
            block_size=block_size,
            mask_token=mask_token(raw, where),
            sample_from_anchor=False,
            sliding_causal=False,
        ),
        weights=Weights.open(directory) if weights is None else weights,
        directory=directory,
        num_drafts=block_size - 1,
    )
