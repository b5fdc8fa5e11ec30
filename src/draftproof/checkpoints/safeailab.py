"""EAGLE heads as their authors publish them: a flat config, `fc.weight`, `midlayer.*` (SafeAILab/EAGLE, cnets.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftproof.drafters.build import DraftCheckpoint
from draftproof.drafters.eagle3 import Eagle3Settings
from draftproof.models import config as model_config
from draftproof.models.loading import Weights, WeightSource


def matches(raw: Mapping[str, Any]) -> bool:
    """The flat form names the draft vocabulary beside ordinary Llama keys."""
    return "draft_vocab_size" in raw and "speculators_model_type" not in raw


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """The format's fixed conventions: taps 2, n/2, n-3; base 10000 unless stated; the raw state as residual."""
    where = str(directory / "config.json")
    known = {
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "qkv_bias",
        "bias",
    }
    flat = {"model_type": "llama", "rope_theta": 10000.0} | {k: v for k, v in raw.items() if k not in known}
    if "qkv_bias" in raw:
        flat["attention_bias"] = raw["qkv_bias"]
    layers = model_config.parse(flat, where=where)
    return DraftCheckpoint(
        method="eagle3",
        where=where,
        settings=Eagle3Settings(
            layers=layers,
            draft_vocab_size=raw["draft_vocab_size"],
            taps=None,
            norm_before_residual=False,
            norm_before_fc=raw.get("norm_before_fc", False),
            fc_norm=raw.get("fc_norm", False),
            norm_output=raw.get("norm_output", False),
        ),
        weights=_weights(directory) if weights is None else weights,
        directory=directory,
    )


def _weights(directory: Path) -> Weights:
    """Safetensors where there are any; a pickle only through `weights_only`, which runs no code."""
    if any(directory.glob("*.safetensors")):
        tensors = Weights.open(directory)
        names = {_rename(n): n for n in tensors.names()}
        return Weights(str(directory), names, lambda name: tensors.get(names[name]))
    path = directory / "pytorch_model.bin"
    if not path.is_file():
        raise ValueError(f"{directory}: holds neither model.safetensors nor pytorch_model.bin")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path}: cannot be read as plain tensors ({type(error).__name__}: {error})"
        ) from error
    return Weights.of({_rename(name): tensor for name, tensor in loaded.items()}, str(path))


def _rename(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1)
