"""DFlash heads as their authors publish them: a flat config with `dflash_config` (z-lab/dflash, model.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    ids, block_size = own.get("target_layer_ids"), raw.get("block_size", own.get("block_size"))
    if not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{where}: dflash_config: target_layer_ids={ids!r}: must be a list of layer numbers")
    if not isinstance(block_size, int) or not 2 <= block_size <= 64:
        raise ValueError(f"{where}: block_size={block_size!r}: must be an integer from 2 to 64")
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
            mask_token=mask_token(raw),
            sample_from_anchor=False,
            sliding_causal=False,
        ),
        weights=Weights.open(directory) if weights is None else weights,
        directory=directory,
        num_drafts=block_size - 1,
    )
