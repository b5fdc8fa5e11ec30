"""The types of the `speculators` format that draft in blocks: their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.block import BlockSettings
from draftproof.models.config import ModelConfig


def dflash(
    raw: Mapping[str, Any], layers: ModelConfig, where: str, anchor: bool = False, non_causal: bool = False
) -> BlockSettings:
    """anchor, non_causal: what the type means where the keys are missing."""
    ids, size = raw.get("aux_hidden_state_layer_ids"), raw.get("block_size", 8)
    if not ids:
        raise ValueError(f"{where}: aux_hidden_state_layer_ids={ids!r}: must name the tapped layers")
    if not isinstance(size, int) or not 2 <= size <= 64:
        raise ValueError(f"{where}: block_size={size!r}: must be an integer from 2 to 64")
    return BlockSettings(
        layers=layers,
        draft_vocab_size=raw.get("draft_vocab_size") or layers.vocab_size,
        taps=tuple(ids),
        block_size=size,
        mask_token=mask_token(raw),
        sample_from_anchor=raw.get("sample_from_anchor", anchor),
        sliding_causal=not raw.get("sliding_window_non_causal", non_causal),
    )
