"""The types of the `speculators` format that draft in blocks: their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.block import BlockSettings
from draftproof.drafters.dflash2 import DFlash2Settings
from draftproof.drafters.dspark import DSparkSettings
from draftproof.drafters.xpress import XPressSettings
from draftproof.models.config import ModelConfig
from draftproof.schema import flag, ids, shown, whole


def dflash(
    raw: Mapping[str, Any], layers: ModelConfig, where: str, anchor: bool = False, non_causal: bool = False
) -> BlockSettings:
    """anchor, non_causal: what the type means where the keys are missing."""
    return BlockSettings(
        layers=layers,
        draft_vocab_size=whole(raw, "draft_vocab_size", where, 1, layers.vocab_size, layers.vocab_size),
        taps=ids(raw, "aux_hidden_state_layer_ids", where),
        block_size=whole(raw, "block_size", where, 2, 64, 8),
        mask_token=mask_token(raw, where),
        sample_from_anchor=flag(raw, "sample_from_anchor", where, anchor),
        sliding_causal=not flag(raw, "sliding_window_non_causal", where, non_causal),
    )


def dspark(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> DSparkSettings:
    kind: Any = "vanilla" if raw.get("markov_head_type") is None else raw["markov_head_type"]
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"{where}: markov_head_type={shown(kind)}: must be 'vanilla', 'gated' or 'rnn'")
    return DSparkSettings(
        block=dflash(raw, layers, where, anchor=True),
        rank=whole(raw, "markov_rank", where, 0, default=256),
        kind=kind,
        confidence=flag(raw, "enable_confidence_head", where, True),
        confidence_reads_token=flag(raw, "confidence_head_with_markov", where, True),
    )


def dflash2(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> DFlash2Settings:
    vocab, hidden = layers.vocab_size, layers.hidden_size
    s = DFlash2Settings(
        block=dflash(raw, layers, where, non_causal=True),
        taps=whole(raw, "conv_kernel_size", where, 1, 64, 2),
        group_size=whole(raw, "conv_group_size", where, 1, hidden, 16),
        rank=whole(raw, "selector_rank", where, 1, default=256),
        num_candidates=whole(raw, "selector_top_k", where, 1, vocab, 16),
    )
    if (size := s.block.draft_vocab_size) != vocab:
        raise ValueError(f"{where}: draft_vocab_size={size}, but vocab_size={vocab}: must be equal here")
    if hidden % s.group_size:
        raise ValueError(f"{where}: conv_group_size={s.group_size} does not divide hidden_size={hidden}")
    return s


def xpress(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> XPressSettings:
    return XPressSettings(
        block=dflash(raw, layers, where),
        rank=whole(raw, "xpress_rank", where, 1, default=256),
        mlp_ratio=whole(raw, "xpress_mlp_ratio", where, 1, 64, 2),
        num_rounds=whole(raw, "num_jacobi_passes", where, 0, 64, 6),
    )
