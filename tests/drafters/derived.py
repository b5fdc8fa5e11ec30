"""Checkpoints made from others, for formats of which no trained head is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.checkpoints.tensors import open_weights
from draftproof.models.config import read_json
from draftproof.models.loading import Weights


def eagle_from_mtp(source: Path, target: Path, folder: Path) -> Path:
    """An EAGLE head with norms that computes what an MTP head does, in the speculators format; `folder`.

    One norms the target's last state itself, the other is given it normed by the target: two diagonal weights, whose
    quotient goes into the product behind them.
    """
    theirs = load_file(source / "model.safetensors")
    mtp = {name.removeprefix("mtp_layers.0."): tensor.float() for name, tensor in theirs.items()}
    hidden = len(mtp["final_layernorm.weight"])
    fc = mtp.pop("input_proj.weight")
    fc[:, hidden:] *= (
        mtp.pop("hidden_layernorm.weight") / Weights.open(target).get("model.norm.weight").float()
    )
    tensors = {
        "fusion_fc.weight": fc,
        "embedding_layernorm.weight": mtp.pop("token_layernorm.weight"),
        "pre_lm_head_layernorm.weight": mtp.pop("final_layernorm.weight"),
    }
    tensors |= {f"transformer.{name}": tensor for name, tensor in mtp.items()}
    raw = read_json(source / "config.json")
    raw |= {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], "layernorms": True}
    return _write(folder, raw, tensors)


def speculators_from_original(source: Path, folder: Path) -> Path:
    """A SafeAILab EAGLE-1 head in the speculators format; `folder`."""
    weights = open_weights(source)
    tensors = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): weights.get(name)
        for name in weights.names()
    }
    raw = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": "fc.bias" in weights}
    return _write(folder, {**raw, "transformer_layer_config": read_json(source / "config.json")}, tensors)


def _write(folder: Path, raw: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(
        {name: t.contiguous().to(torch.float32) for name, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder
