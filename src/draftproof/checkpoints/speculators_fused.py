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
from draftproof.schema import flag, ids, whole

_NAMES = (  # the first that fits: `mtp_layers.0.` is how four others begin
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
        layers=_one(layers), fc_bias=flag(raw, "fusion_bias", where), norms=flag(raw, "layernorms", where)
    )


def mtp(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> MtpSettings:
    """Type `mtp`: the layers described are the target's, and the module is like the first of them."""
    modules = whole(raw, "num_nextn_predict_layers", where, 1, default=1)
    if modules != 1:
        raise ValueError(f"{where}: num_nextn_predict_layers={modules!r}: only 1 module is supported")
    return MtpSettings(layers=_one(layers), target_layers=layers.num_layers)


def eagle3(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> TappedSettings:
    return _tapped(raw, layers, where, norm_before_residual=True)


def peagle(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> TappedSettings:
    return _tapped(raw, layers, where, norm_before_residual=False)


def _tapped(
    raw: Mapping[str, Any], layers: ModelConfig, where: str, norm_before_residual: bool
) -> TappedSettings:
    """norm_before_residual: what the type means where the key is missing."""
    taps = "eagle_aux_hidden_state_layer_ids"
    return TappedSettings(
        layers=layers,
        draft_vocab_size=whole(raw, "draft_vocab_size", where, 1, layers.vocab_size, layers.vocab_size),
        taps=None if raw.get(taps) is None else ids(raw, taps, where),
        norm_before_residual=flag(raw, "norm_before_residual", where, norm_before_residual),
        norm_before_fc=flag(raw, "norm_before_fc", where),
        fc_norm=flag(raw, "fc_norm", where),
        norm_output=flag(raw, "norm_output", where),
        mask_token=mask_token(raw, where),
    )


def rename(name: str) -> str:
    """The heads' own name of a tensor."""
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _one(layers: ModelConfig) -> ModelConfig:
    return dataclasses.replace(layers, num_layers=1, windows=layers.windows[:1])
