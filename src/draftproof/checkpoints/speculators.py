"""Draft heads in the `speculators` format: `speculators_model_type` in config.json (versions 0.3 to 0.9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftproof import schema
from draftproof.checkpoints import speculators_block, speculators_fused
from draftproof.drafters.context import DraftCheckpoint
from draftproof.models import config as model_config
from draftproof.models.config import ModelConfig
from draftproof.models.loading import Weights, WeightSource
from draftproof.schema import words


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    """The layers are described in a part of their own: flat heads may have the same architectures."""
    if "speculators_model_type" in raw:
        return True
    return "transformer_layer_config" in raw and _kind(raw, directory) is not None


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """ValueError for a type that is not supported, or settings that are missing."""
    where, kind = str(directory / "config.json"), str(_kind(raw, directory))
    if kind not in _SETTINGS:
        raise ValueError(
            f"{where}: speculators_model_type={schema.shown(kind)}: not supported; supported: {', '.join(_SETTINGS)}"
        )
    settings, own_keys = _SETTINGS[kind]
    model_config.check_keys(raw, where, _KEYS | own_keys)
    if raw.get("target_hidden_size") is not None:
        schema.whole(raw, "target_hidden_size", where)
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
        weights=Weights.open(directory).renamed(speculators_fused.rename) if weights is None else weights,
        directory=directory,
        num_drafts=_num_drafts(envelope, within),
        target=schema.text(verifier, "name_or_path", f"{within}: verifier") or None,
    )


def _kind(raw: Mapping[str, Any], directory: Path) -> str | None:
    """The type, by its key, else by the architecture's name: Eagle3DraftModel and Eagle3Speculator are `eagle3`."""
    where = str(directory / "config.json")
    names = [name.lower() for name in schema.texts(raw, "architectures", where)]
    stems = [name.removesuffix(end) for name in names for end in _ENDINGS if name.endswith(end)]
    return schema.text(raw, "speculators_model_type", where) or next(iter(stems), None)


def _num_drafts(envelope: Mapping[str, Any], within: str) -> int | None:
    """`speculative_tokens` of the default proposal method, else of the first."""
    methods = [] if envelope.get("proposal_methods") is None else envelope["proposal_methods"]
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise ValueError(f"{within}: proposal_methods={schema.shown(methods)}: must be a list of objects")
    for i, method in enumerate(methods):
        schema.check_known(method, f"{within}: proposal_methods[{i}]", _PROPOSAL)
    default = [m for m in methods if m.get("proposal_type") == envelope.get("default_proposal_method")]
    chosen, key = (default or methods or [{}])[0], "speculative_tokens"
    return None if chosen.get(key) is None else schema.whole(chosen, key, within, 1, 64)


def _layers(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    layers = schema.section(raw, "transformer_layer_config", where)
    if not layers:
        raise ValueError(
            f"{where}: transformer_layer_config is missing; the file is no complete draft head config"
        )
    return layers


# Keys of all types, then each type's own; the shape of `fc.weight` says what `target_hidden_size` does.
_KEYS = words(
    """speculators_model_type speculators_version speculators_config transformer_layer_config tie_word_embeddings dtype
    torch_dtype target_hidden_size embed_requires_grad"""
)
_ENVELOPE = words("algorithm default_proposal_method proposal_methods verifier")
_VERIFIER = words("name_or_path architectures")
# The last two say how else than exactly a verifier may accept drafts, which is the engine's own business.
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
    "eagle": (speculators_fused.eagle, _FUSED),
    "eagle3": (speculators_fused.eagle3, _TAPPED),
    "peagle": (speculators_fused.peagle, _TAPPED),
    "dflash": (speculators_block.dflash, _BLOCK),
    "dspark": (speculators_block.dspark, _BLOCK | _MARKOV),
    "dflash2": (speculators_block.dflash2, _BLOCK | _SELECTOR),
    "xpress": (speculators_block.xpress, _BLOCK | _REFINER),
    "mtp": (speculators_fused.mtp, words("num_nextn_predict_layers")),
}
_ENDINGS = ("draftmodel", "speculator")  # of the classes' names
