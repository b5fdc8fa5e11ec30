"""Checkpoints converted from others, for formats without an available trained head. Functions return `folder`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.checkpoints.tensors import open_weights
from draftproof.models.weights import Weights
from draftproof.schema import read_json


def with_tables(source: Path, target: Path) -> dict[str, Tensor]:
    """A head's tensors, completed with the target's embedding and output rows, which its file leaves out."""
    tensors, theirs = load_file(source / "model.safetensors"), Weights.open(target)
    embed_VH = theirs.get("model.embed_tokens.weight")
    head_VH = theirs.get("lm_head.weight") if "lm_head.weight" in theirs else embed_VH
    ids_D = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return {"embed_tokens.weight": embed_VH, "lm_head.weight": head_VH[ids_D], **tensors}


def eagle_from_mtp(source: Path, target: Path, folder: Path) -> Path:
    """An EAGLE head with norms, in the speculators format, that computes the same as an MTP head.

    One norms the target's last state itself, the other gets it normed by the target: the ratio of the two norms'
    weights goes into the following product.
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
    """A SafeAILab EAGLE-1 head in the speculators format."""
    weights = open_weights(source)
    tensors = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): weights.get(name)
        for name in weights.names()
    }
    raw = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": "fc.bias" in weights}
    return _write(folder, {**raw, "transformer_layer_config": read_json(source / "config.json")}, tensors)


def peagle_from_eagle3(source: Path, target: Path, folder: Path) -> Path:
    """An EAGLE-3 head with a mask state: its first draft is EAGLE-3's, the others are arbitrary."""
    tensors = with_tables(source, target)
    tensors["mask_hidden"] = _random((1, 1, tensors["fc.weight"].shape[1]), 0.3)
    raw = read_json(source / "config.json") | {"speculators_model_type": "peagle", "mask_token_id": 3}
    return _write(folder, raw, tensors)


def flat_from_speculators(
    source: Path, folder: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> Path:
    """A head of the speculators format with a flat config, as published by others.

    `keys`, `tensors`: of the flat format, beside the layers; a key of None is left out.
    """
    raw = read_json(source / "config.json")
    own = (
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
    )
    flat = {**raw["transformer_layer_config"], **{key: raw[key] for key in own}, **keys}
    found = {**load_file(source / "model.safetensors"), **(tensors or {})}
    return _write(folder, {key: value for key, value in flat.items() if value is not None}, found)


def eagle3_of_one_state(source: Path, target: Path, folder: Path) -> Path:
    """A flat EAGLE-3 head that reads the target's last state instead of fused ones, with little weight, since it was
    not trained for that."""
    keys = {"eagle_config": {"use_aux_hidden_state": False}}
    flat_from_speculators(source, folder, keys, with_tables(source, target))
    raw, tensors = read_json(folder / "config.json"), load_file(folder / "model.safetensors")
    del raw["eagle_aux_hidden_state_layer_ids"], tensors["fc.weight"]
    tensors["layers.0.hidden_norm.weight"] *= 0.03
    own = {"architectures": ["LlamaForCausalLMEagle3"], "norm_before_residual": True}
    return _write(folder, raw | own, tensors)


def compressed_fp8(source: Path, folder: Path, strategy: str, block: tuple[int, int] = (24, 40)) -> Path:
    """A head or model with its linear weights in fp8, in compressed-tensors' format.

    strategy: "tensor", "channel" or "block", the part of a weight that shares a scale.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        kept = ("embed_tokens", "lm_head", "mask_hidden", "masked_embedding", "codebook")
        if tensor.ndim != 2 or any(part in name for part in kept):
            continue
        rows, columns = tensor.shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": block}[strategy]
        scale = torch.empty(-(-rows // high), -(-columns // wide))
        stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                here = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scale[i, j] = tensor[here].abs().max() / 448
                stored[here] = (tensor[here].float() / scale[i, j]).to(torch.float8_e4m3fn)
        tensors[name] = stored
        tensors[f"{name}_scale"] = scale[0] if strategy == "tensor" else scale
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    weights |= {"block_structure": list(block) if strategy == "block" else None, "observer": "minmax"}
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "kv_cache_scheme": None,
    }
    return _write(folder, {**read_json(source / "config.json"), "quantization_config": scheme}, tensors)


def pard_from_model(source: Path, folder: Path) -> Path:
    """A language model declared to be trained to fill masks: its first draft is a draft model's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to((source / name).resolve())
    (folder / "config.json").write_text(json.dumps(read_json(source / "config.json") | {"pard_token": 3}))
    return folder


def dspark_from_dflash(source: Path, folder: Path, kind: str = "rnn", rank: int = 8) -> Path:
    """A DFlash head with a small bias and random confidence."""
    tensors = load_file(source / "model.safetensors")
    raw = read_json(source / "config.json")
    vocab, hidden = raw["draft_vocab_size"], raw["transformer_layer_config"]["hidden_size"]
    joint = {"rnn": ("joint_proj", 2 * rank + hidden, 3 * rank), "gated": ("gate_proj", rank + hidden, rank)}
    tensors |= {
        "markov_head.markov_w1.weight": _random((vocab, rank), 0.3),
        "markov_head.markov_w2.weight": _random((vocab, rank), 0.3),
        "confidence_head.proj.weight": _random((1, hidden + rank), 0.3),
        "confidence_head.proj.bias": torch.ones(1),
    }
    if kind in joint:
        name, width, out = joint[kind]
        tensors[f"markov_head.{name}.weight"] = _random((out, width), 0.1)
        tensors[f"markov_head.{name}.bias"] = torch.zeros(out)
    raw |= {"speculators_model_type": "dspark", "markov_rank": rank, "markov_head_type": kind}
    return _write(folder, raw, tensors)


def dflash2_from_dflash(source: Path, folder: Path, rank: int = 8, group: int = 16) -> Path:
    """A DFlash head with convolutions of little weight, and a selector that changes its drafts."""
    tensors = load_file(source / "model.safetensors")
    raw = read_json(source / "config.json")
    vocab, hidden = raw["draft_vocab_size"], raw["transformer_layer_config"]["hidden_size"]
    for i in range(raw["transformer_layer_config"]["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            kernel = _random((2, 2, hidden), 0.02)
            kernel[:, 0] += 1
            tensors[f"layers.{i}.{part}_conv.base_kernel"] = kernel
            projection = _random((4 * (hidden // group), hidden), 0.002)
            tensors[f"layers.{i}.{part}_conv.kernel_projection.weight"] = projection
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}"] = _random((vocab, rank), 0.3)
    tensors["candidate_selector.hidden_projection.weight"] = _random((rank, hidden), 0.1)
    own = {"selector_rank": rank, "selector_top_k": 4, "conv_group_size": group, "conv_kernel_size": 2}
    return _write(folder, raw | own | {"speculators_model_type": "dflash2"}, tensors)


def xpress_from_dflash(source: Path, folder: Path, rank: int = 8, ratio: int = 2) -> Path:
    """A DFlash head with a refiner of little weight."""
    tensors = load_file(source / "model.safetensors")
    raw = read_json(source / "config.json")
    vocab, hidden, size = (
        raw["draft_vocab_size"],
        raw["transformer_layer_config"]["hidden_size"],
        raw["block_size"],
    )
    shapes = {
        "token_embed": (vocab, rank),
        "down_h": (rank, hidden),
        "down_g": (rank, hidden),
        "in_proj": (rank, 3 * rank),
        "mlp_gate": (rank * ratio, rank),
        "mlp_up": (rank * ratio, rank),
        "mlp_down": (rank, rank * ratio),
        "readout": (vocab, rank),
    }
    tensors |= {f"refiner_head.{name}.weight": _random(shape, 0.2) for name, shape in shapes.items()}
    tensors["refiner_head.mix_l"] = _random((rank, size, size), 0.2)
    own = {"xpress_rank": rank, "xpress_mlp_ratio": ratio, "num_jacobi_passes": 3}
    return _write(folder, raw | own | {"speculators_model_type": "xpress"}, tensors)


def _random(shape: tuple[int, ...], std: float) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * std


def _write(folder: Path, raw: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder
