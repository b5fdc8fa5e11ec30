"""DFlash heads as their authors publish them: a flat config with `dflash_config` (z-lab/dflash, model.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof import schema
from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.block import BlockSettings
from draftproof.drafters.context import DraftCheckpoint
from draftproof.models import config as model_config
from draftproof.models.weights import Weights, WeightSource

_OWN_KEYS = ("dflash_config", "block_size", "num_target_layers", "mask_token_id")


_NESTED_KEYS = ("mask_token_id", "target_layer_ids", "block_size")


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    """Whether the config has this format. It is flat: others with this architecture have a section for their layers."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return False
    where = str(directory / "config.json")
    return "dflash_config" in raw or "DFlashDraftModel" in schema.texts(raw, "architectures", where)


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """The head in `directory`. Tap ids name layer outputs: i is the state that enters layer i + 1; the last layer's is
    taken after the final norm."""
    where = str(directory / "config.json")
    own = schema.section(raw, "dflash_config", where)
    within = f"{where}: dflash_config"
    schema.check_known(own, within, _NESTED_KEYS)
    ids = schema.ids(own, "target_layer_ids", within, -1)
    part, sizes = (where, raw) if raw.get("block_size") is not None else (within, own)
    block_size = schema.whole(sizes, "block_size", part, 2, 64)
    target_layers = raw.get("num_target_layers")
    if target_layers is not None:
        target_layers = schema.whole(raw, "num_target_layers", where)
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
        num_target_layers=target_layers,
        tap_shift=1,
    )
