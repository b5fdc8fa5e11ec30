"""The types of the `speculators` format whose rows carry a token and target states: settings, and tensors' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.eagle1 import Eagle1Settings
from draftproof.drafters.mtp import MtpSettings
from draftproof.drafters.tapped import TappedSettings
from draftproof.models.config import ModelConfig

_NAMES = (  # longest first: one of them begins like another
    ("mtp_layers.0.input_proj.", "fc."),
    ("mtp_layers.0.token_layernorm.", "embed_norm."),
    ("mtp_layers.0.hidden_layernorm.", "hidden_norm."),
    ("mtp_layers.0.final_layernorm.", "norm."),
    ("mtp_layers.0.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("embedding_layernorm.", "embed_norm."),
    ("pre_lm_head_layernorm.", "norm."),
    ("transformer.", "layers.0."),
)


def eagle(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> Eagle1Settings:
    """Type `eagle` (EAGLE-1 and HASS), written until 2026-06."""
    return Eagle1Settings(
        layers=_one(layers), fc_bias=raw.get("fusion_bias", False), norms=raw.get("layernorms", False)
    )


def mtp(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> MtpSettings:
    """Type `mtp`: the layers described are the target's, and the module is like the first of them."""
    modules = raw.get("num_nextn_predict_layers", 1)
    if modules != 1:
        raise ValueError(f"{where}: num_nextn_predict_layers={modules!r}: only 1 module is supported")
    return MtpSettings(layers=_one(layers), target_layers=layers.num_layers)


def eagle3(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> TappedSettings:
    return _tapped(raw, layers, norm_before_residual=True)


def peagle(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> TappedSettings:
    return _tapped(raw, layers, norm_before_residual=False)


def _tapped(raw: Mapping[str, Any], layers: ModelConfig, norm_before_residual: bool) -> TappedSettings:
    """norm_before_residual: what the type means where the key is missing."""
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    return TappedSettings(
        layers=layers,
        draft_vocab_size=raw.get("draft_vocab_size") or layers.vocab_size,
        taps=None if ids is None else tuple(ids),
        norm_before_residual=raw.get("norm_before_residual", norm_before_residual),
        norm_before_fc=raw.get("norm_before_fc", False),
        fc_norm=raw.get("fc_norm", False),
        norm_output=raw.get("norm_output", False),
        mask_token=mask_token(raw),
    )


def rename(name: str) -> str:
    """The heads' own name of a tensor."""
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _one(layers: ModelConfig) -> ModelConfig:
    return dataclasses.replace(layers, num_layers=1, windows=layers.windows[:1])
