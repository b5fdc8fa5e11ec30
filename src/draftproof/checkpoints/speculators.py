"""Draft heads in the `speculators` format: `speculators_model_type` in config.json (versions 0.3 to 0.9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftproof.checkpoints import speculators_block, speculators_fused, values
from draftproof.drafters.build import DraftCheckpoint
from draftproof.models import config as model_config
from draftproof.models.config import ModelConfig
from draftproof.models.loading import Weights, WeightSource


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    """The layers are described in a part of their own: flat heads may have the same architectures."""
    return "speculators_model_type" in raw or ("transformer_layer_config" in raw and _kind(raw) is not None)


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """ValueError for a type that is not supported, or settings that are missing."""
    where, kind = str(directory / "config.json"), str(_kind(raw))
    if kind not in _SETTINGS:
        raise ValueError(
            f"{where}: speculators_model_type={kind!r}: not supported; supported: {', '.join(_SETTINGS)}"
        )
    envelope = raw.get("speculators_config") or {}
    layers = model_config.parse(_layers(raw, where), where=f"{where}: transformer_layer_config")
    return DraftCheckpoint(
        method=kind,
        where=where,
        settings=_SETTINGS[kind](raw, layers, where),
        weights=Weights.open(directory).renamed(speculators_fused.rename) if weights is None else weights,
        directory=directory,
        num_drafts=_num_drafts(envelope, where),
        target=(envelope.get("verifier") or {}).get("name_or_path") or None,
    )


def _kind(raw: Mapping[str, Any]) -> str | None:
    """The type, by its key, else by the architecture's name: Eagle3DraftModel and Eagle3Speculator are `eagle3`."""
    names = [str(name).lower() for name in raw.get("architectures") or ()]
    stems = [name.removesuffix(end) for name in names for end in _ENDINGS if name.endswith(end)]
    return raw.get("speculators_model_type") or next(iter(stems), None)


def _num_drafts(envelope: Mapping[str, Any], where: str) -> int | None:
    """`speculative_tokens` of the default proposal method, else of the first."""
    methods = envelope.get("proposal_methods") or []
    default = [m for m in methods if m.get("proposal_type") == envelope.get("default_proposal_method")]
    chosen = (default or methods or [{}])[0]
    key = "speculative_tokens"
    return None if chosen.get(key) is None else values.whole(chosen, key, where, 1, 64)


def _layers(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(
            f"{where}: transformer_layer_config is missing; the file is no complete draft head config"
        )
    return layers


_SETTINGS: Mapping[str, Callable[[Mapping[str, Any], ModelConfig, str], object]] = {
    "eagle": speculators_fused.eagle,
    "eagle3": speculators_fused.eagle3,
    "peagle": speculators_fused.peagle,
    "dflash": speculators_block.dflash,
    "dspark": speculators_block.dspark,
    "dflash2": speculators_block.dflash2,
    "xpress": speculators_block.xpress,
    "mtp": speculators_fused.mtp,
}
_ENDINGS = ("draftmodel", "speculator")  # of the classes' names
