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


def dspark(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> DSparkSettings:
    kind = raw.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"{where}: markov_head_type={kind!r}: must be 'vanilla', 'gated' or 'rnn'")
    return DSparkSettings(
        block=dflash(raw, layers, where, anchor=True),
        rank=raw.get("markov_rank", 256),
        kind=kind,
        confidence=raw.get("enable_confidence_head", True),
        confidence_reads_token=raw.get("confidence_head_with_markov", True),
    )


def dflash2(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> DFlash2Settings:
    s = DFlash2Settings(
        block=dflash(raw, layers, where, non_causal=True),
        taps=raw.get("conv_kernel_size", 2),
        group_size=raw.get("conv_group_size", 16),
        rank=raw.get("selector_rank", 256),
        num_candidates=raw.get("selector_top_k", 16),
    )
    size, vocab, hidden = s.block.draft_vocab_size, layers.vocab_size, layers.hidden_size
    if size != vocab:
        raise ValueError(f"{where}: draft_vocab_size={size}, but vocab_size={vocab}: must be equal here")
    if hidden % s.group_size:
        raise ValueError(f"{where}: conv_group_size={s.group_size} does not divide hidden_size={hidden}")
    if not 1 <= s.num_candidates <= vocab:
        raise ValueError(f"{where}: selector_top_k={s.num_candidates}: must be from 1 to {vocab}")
    return s


def xpress(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> XPressSettings:
    return XPressSettings(
        block=dflash(raw, layers, where),
        rank=raw.get("xpress_rank", 256),
        mlp_ratio=raw.get("xpress_mlp_ratio", 2),
        num_rounds=raw.get("num_jacobi_passes", 6),
    )
