"""EAGLE heads as their authors publish them: a flat config, `fc.weight`, `midlayer.*` (SafeAILab/EAGLE, cnets.py)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.checkpoints.masks import mask_token
from draftproof.checkpoints.tensors import open_weights, tensor_names
from draftproof.drafters.context import DraftCheckpoint
from draftproof.drafters.eagle1 import Eagle1Settings
from draftproof.drafters.tapped import TappedSettings
from draftproof.models import config as model_config
from draftproof.models.config import ModelConfig
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.models.spec import LayerSpec
from draftproof.models.weights import WeightSource
from draftproof.schema import flag, ids, reject_unknown_keys, section, texts, whole

# keys of a flat config that describe the head, not its layers
_OWN_KEYS = {"draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output"}
_TAPS = "eagle_aux_hidden_state_layer_ids"
_FUSES = "use_aux_hidden_state"  # whether several layers' states are fused; false: one state, no `fc`
_OWN_KEYS |= {"qkv_bias", "bias", "eagle_config", _TAPS, "norm_before_residual"}
_OWN_KEYS |= {"mask_token_id", "pard_token", "ptd_token_id"}
# keys of training frameworks and of the target's config, without meaning for a head that has no windows
_HARMLESS_KEYS = ("modal_type", "max_window_layers")
# keys of `eagle_config` and the only supported values: with others the head would be another network
_USUAL = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    """Whether the folder has this format: by a key, by the architecture's name, else by tensor names, since EAGLE-1's
    config is a plain Llama config."""
    if "draft_vocab_size" in raw or "eagle" in _architecture(raw, str(directory / "config.json")):
        return True
    names = tensor_names(directory)
    return "fc.weight" in names and "hidden_norm.weight" not in names


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """The head in `directory`, by the format's conventions: rotary base 10000 unless stated; bias only on q, k and v,
    under its own key."""
    where = str(directory / "config.json")
    flat = {"model_type": "llama", "rope_theta": 10000.0}
    flat |= {k: v for k, v in raw.items() if k not in _OWN_KEYS}
    layers = model_config.parse(flat, where=where, extra=_HARMLESS_KEYS)
    if flag(raw, "qkv_bias", where):
        layers = _with_bias(layers)
    names = frozenset(map(_rename, tensor_names(directory)))
    architecture = _architecture(raw, where)
    weights = open_weights(directory).renamed(_rename) if weights is None else weights
    mask = mask_token(raw, where)
    parallel = "peagle" in architecture or "mask_hidden" in names or (not names and mask is not None)
    third = parallel or "draft_vocab_size" in raw or "eagle3" in architecture
    third = third or "layers.0.hidden_norm.weight" in names
    settings = _eagle3(raw, layers, mask, where) if third else _eagle1(raw, layers, where)
    if isinstance(settings, TappedSettings) and "lm_head.weight" not in weights:
        _without_head(settings, directory)
    nested = raw.get(_TAPS) is None and bool(section(raw, "eagle_config", where).get(_TAPS))
    return DraftCheckpoint(
        method="peagle" if parallel else "eagle3" if third else "eagle",
        where=where,
        settings=settings,
        weights=weights,
        directory=directory,
        tap_shift=int(nested),
    )


def _without_head(settings: TappedSettings, directory: Path) -> None:
    """Warn about a head without an output matrix; ValueError if its vocabulary is reduced. The authors' code stores the
    matrix with every head, but other trainers omit it if it is the target's."""
    size = settings.draft_vocab_size
    vocab = settings.layers.vocab_size
    if size != vocab:
        raise ValueError(
            f"{directory}: lm_head.weight is missing: a head of draft_vocab_size={size} out of {vocab} has one of its "
            "own; download the files again"
        )
    logging.getLogger(__name__).warning(
        "%s: has no lm_head.weight: the target's is used. Heads made by SafeAILab's code have one of their own: if "
        "few drafts are accepted, download the files again",
        directory,
    )


def _with_bias(config: ModelConfig) -> ModelConfig:
    """The layers with a bias on q, k and v."""

    def biased(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig), "this format's heads are read as Llama's"
        return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, qkv_bias=True))

    return dataclasses.replace(config, layers=tuple(map(biased, config.layers)))


def _eagle1(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> Eagle1Settings:
    return Eagle1Settings(layers=layers, fc_bias=flag(raw, "bias", where, True))


def _eagle3(raw: Mapping[str, Any], layers: ModelConfig, mask: int | None, where: str) -> TappedSettings:
    """The settings of an EAGLE-3 head. The residual is the state before the norm unless stated; `bias` does not apply
    to its `fc`."""
    return TappedSettings(
        layers=layers,
        draft_vocab_size=whole(raw, "draft_vocab_size", where, 1, layers.vocab_size, layers.vocab_size),
        taps=_taps(raw, where),
        norm_before_residual=flag(raw, "norm_before_residual", where),
        norm_before_fc=flag(raw, "norm_before_fc", where),
        fc_norm=flag(raw, "fc_norm", where),
        norm_output=flag(raw, "norm_output", where),
        mask_token=mask,
    )


def _taps(raw: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    """The tapped layers. None: the usual ones; empty: the state after the final norm. Ids in `eagle_config` name layer
    outputs: i is the state that enters layer i + 1."""
    nested = section(raw, "eagle_config", where)
    within = f"{where}: eagle_config"
    reject_unknown_keys(within, nested, [_TAPS, _FUSES, *_USUAL])
    for key, usual in _USUAL.items():
        if flag(nested, key, within, usual) != usual:
            raise ValueError(f"{within}: {key}={nested[key]!r}: not supported, only {usual}")
    if not flag(nested, _FUSES, within, True):
        return ()
    if raw.get(_TAPS) is not None:
        return ids(raw, _TAPS, where)
    return None if nested.get(_TAPS) is None else tuple(i + 1 for i in ids(nested, _TAPS, within, -1))


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    return " ".join(texts(raw, "architectures", where)).lower()


def _rename(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1)
