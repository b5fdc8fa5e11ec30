"""Draft heads in the `speculators` format: `speculators_model_type` in config.json (versions 0.3 to 0.9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftproof import schema
from draftproof.checkpoints.masks import mask_token
from draftproof.drafters.block import BlockSettings
from draftproof.drafters.context import DraftCheckpoint
from draftproof.drafters.dflash2 import DFlash2Settings
from draftproof.drafters.dspark import DSparkSettings
from draftproof.drafters.eagle1 import Eagle1Settings
from draftproof.drafters.mtp import MtpSettings
from draftproof.drafters.tapped import TappedSettings
from draftproof.drafters.xpress import XPressSettings
from draftproof.models import config as model_config
from draftproof.models.config import ModelConfig
from draftproof.models.reading import check_keys
from draftproof.models.weights import Weights, WeightSource
from draftproof.schema import flag, ids, shown, whole, words


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    """Whether the config has this format. The architecture's name is not enough: layers must have their own section,
    since flat formats use the same names."""
    if "speculators_model_type" in raw:
        return True
    return "transformer_layer_config" in raw and _kind(raw, directory) is not None


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """The head in `directory`. ValueError for an unsupported type or missing settings."""
    where = str(directory / "config.json")
    kind = str(_kind(raw, directory))
    if kind not in _SETTINGS:
        raise ValueError(
            f"{where}: speculators_model_type={shown(kind)}: not supported; supported: {', '.join(_SETTINGS)}"
        )
    settings, own_keys = _SETTINGS[kind]
    check_keys(raw, where, _KEYS | own_keys)
    if raw.get("target_hidden_size") is not None:
        whole(raw, "target_hidden_size", where)
    schema.check_known(schema.section(raw, "dflash_config", where), f"{where}: dflash_config", _NESTED_MASKS)
    envelope = schema.section(raw, "speculators_config", where)
    within = f"{where}: speculators_config"
    schema.check_known(envelope, within, _ENVELOPE)
    verifier = schema.section(envelope, "verifier", within)
    schema.check_known(verifier, f"{within}: verifier", _VERIFIER)
    layers = model_config.parse(_layers(raw, where), where=f"{where}: transformer_layer_config")
    return DraftCheckpoint(
        method=kind,
        where=where,
        settings=settings(raw, layers, where),
        weights=Weights.open(directory).renamed(_rename) if weights is None else weights,
        directory=directory,
        num_drafts=_num_drafts(envelope, within),
        target=schema.text(verifier, "name_or_path", f"{within}: verifier") or None,
    )


def _kind(raw: Mapping[str, Any], directory: Path) -> str | None:
    """The type of head: from its key, else from the architecture: Eagle3DraftModel, Eagle3Speculator: `eagle3`."""
    where = str(directory / "config.json")
    names = [name.lower() for name in schema.texts(raw, "architectures", where)]
    stems = [name.removesuffix(end) for name in names for end in _ENDINGS if name.endswith(end)]
    return schema.text(raw, "speculators_model_type", where) or next(iter(stems), None)


def _num_drafts(envelope: Mapping[str, Any], within: str) -> int | None:
    """`speculative_tokens` of the default proposal method, else of the first."""
    methods = [] if envelope.get("proposal_methods") is None else envelope["proposal_methods"]
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise ValueError(f"{within}: proposal_methods={shown(methods)}: must be a list of objects")
    for i, method in enumerate(methods):
        schema.check_known(method, f"{within}: proposal_methods[{i}]", _PROPOSAL)
    default = [m for m in methods if m.get("proposal_type") == envelope.get("default_proposal_method")]
    chosen = (default or methods or [{}])[0]
    key = "speculative_tokens"
    return None if chosen.get(key) is None else whole(chosen, key, within, 1, 64)


def _layers(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    layers = schema.section(raw, "transformer_layer_config", where)
    if not layers:
        raise ValueError(
            f"{where}: transformer_layer_config is missing; the file is no complete draft head config"
        )
    return layers


# Heads whose rows combine a token and target states.


def _eagle(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> Eagle1Settings:
    """Settings of type `eagle` (EAGLE-1 and HASS), written until 2026-06."""
    return Eagle1Settings(
        layers=_one(layers), fc_bias=flag(raw, "fusion_bias", where), norms=flag(raw, "layernorms", where)
    )


def _mtp(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> MtpSettings:
    """Settings of type `mtp`: the config describes the target's layers; the module is like the first of them."""
    modules = whole(raw, "num_nextn_predict_layers", where, 1, default=1)
    if modules != 1:
        raise ValueError(f"{where}: num_nextn_predict_layers={modules!r}: only 1 module is supported")
    return MtpSettings(layers=_one(layers), target_layers=layers.num_layers)


def _eagle3(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> TappedSettings:
    return _tapped(raw, layers, where, norm_before_residual=True)


def _peagle(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> TappedSettings:
    return _tapped(raw, layers, where, norm_before_residual=False)


def _tapped(
    raw: Mapping[str, Any], layers: ModelConfig, where: str, norm_before_residual: bool
) -> TappedSettings:
    """Settings of EAGLE-3 and P-EAGLE. norm_before_residual: the type's default."""
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


def _rename(name: str) -> str:
    """Our name for a tensor of the file."""
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _one(layers: ModelConfig) -> ModelConfig:
    return dataclasses.replace(layers, layers=layers.layers[:1])


# Heads that draft in blocks.


def _dflash(
    raw: Mapping[str, Any], layers: ModelConfig, where: str, anchor: bool = False, non_causal: bool = False
) -> BlockSettings:
    """Settings of type `dflash`. anchor, non_causal: the type's defaults."""
    return BlockSettings(
        layers=layers,
        draft_vocab_size=whole(raw, "draft_vocab_size", where, 1, layers.vocab_size, layers.vocab_size),
        taps=ids(raw, "aux_hidden_state_layer_ids", where),
        block_size=whole(raw, "block_size", where, 2, 64, 8),
        mask_token=mask_token(raw, where),
        sample_from_anchor=flag(raw, "sample_from_anchor", where, anchor),
        sliding_causal=not flag(raw, "sliding_window_non_causal", where, non_causal),
    )


def _dspark(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> DSparkSettings:
    kind: Any = "vanilla" if raw.get("markov_head_type") is None else raw["markov_head_type"]
    if kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"{where}: markov_head_type={shown(kind)}: must be 'vanilla', 'gated' or 'rnn'")
    return DSparkSettings(
        block=_dflash(raw, layers, where, anchor=True),
        rank=whole(raw, "markov_rank", where, 0, default=256),
        kind=kind,
        confidence=flag(raw, "enable_confidence_head", where, True),
        confidence_reads_token=flag(raw, "confidence_head_with_markov", where, True),
    )


def _dflash2(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> DFlash2Settings:
    vocab = layers.vocab_size
    hidden = layers.hidden_size
    s = DFlash2Settings(
        block=_dflash(raw, layers, where, non_causal=True),
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


def _xpress(raw: Mapping[str, Any], layers: ModelConfig, where: str) -> XPressSettings:
    return XPressSettings(
        block=_dflash(raw, layers, where),
        rank=whole(raw, "xpress_rank", where, 1, default=256),
        mlp_ratio=whole(raw, "xpress_mlp_ratio", where, 1, 64, 2),
        num_rounds=whole(raw, "num_jacobi_passes", where, 0, 64, 6),
    )


_NAMES = (  # name prefixes; the first match counts: `mtp_layers.0.` must come after the longer prefixes
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

# Keys of all types, then each type's own. `target_hidden_size` is not read: the shape of `fc.weight` says the same.
_KEYS = words(
    """speculators_model_type speculators_version speculators_config transformer_layer_config tie_word_embeddings dtype
    torch_dtype target_hidden_size embed_requires_grad"""
)
_ENVELOPE = words("algorithm default_proposal_method proposal_methods verifier")
_VERIFIER = words("name_or_path architectures")
# The last two configure inexact acceptance by the verifier, which this engine never does.
_PROPOSAL = words("proposal_type speculative_tokens verifier_accept_k accept_tolerance")
_NESTED_MASKS = words("mask_token_id")
_MASKS = words("mask_token_id dspark_noise_token_id pard_token ptd_token_id dflash_config")
_TAPPED = _MASKS | words(
    "draft_vocab_size eagle_aux_hidden_state_layer_ids norm_before_residual norm_before_fc fc_norm norm_output"
)
_BLOCK = _MASKS | words(
    "draft_vocab_size aux_hidden_state_layer_ids block_size sample_from_anchor sliding_window_non_causal"
)
_MARKOV = words("markov_rank markov_head_type enable_confidence_head confidence_head_with_markov")
_SELECTOR = words("conv_kernel_size conv_group_size selector_rank selector_top_k")
_REFINER = words("xpress_rank xpress_mlp_ratio num_jacobi_passes")
_FUSED = words("transformer_layer_architecture layernorms fusion_bias")
_Reader = Callable[[Mapping[str, Any], ModelConfig, str], object]
_SETTINGS: Mapping[str, tuple[_Reader, frozenset[str]]] = {
    "eagle": (_eagle, _FUSED),
    "eagle3": (_eagle3, _TAPPED),
    "peagle": (_peagle, _TAPPED),
    "dflash": (_dflash, _BLOCK),
    "dspark": (_dspark, _BLOCK | _MARKOV),
    "dflash2": (_dflash2, _BLOCK | _SELECTOR),
    "xpress": (_xpress, _BLOCK | _REFINER),
    "mtp": (_mtp, words("num_nextn_predict_layers")),
}
_ENDINGS = ("draftmodel", "speculator")  # suffixes of class names
