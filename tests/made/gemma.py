"""A random Gemma 4 target and two assistants for it, which have copies of the target's layers.

So an assistant computes almost what its target will, without the key of its own row and per-layer inputs: about half
of its first drafts are right, and fewer of the later ones.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, SMALL, LARGE, OWN_INPUT, CENTROIDS = 64, 96, 4, 2, 16, 32, 8, 16
EXPERTS, EXPERT_WIDTH = 8, 24
KINDS = ["sliding_attention", "full_attention"] * 2
QUIET = 0.15  # scale of what an assistant lacks


class Maker:
    """Random tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(11)

    def add(self, name: str, *shape: int, scale: float = 1.0) -> None:
        """Add a random tensor: a matrix that keeps vectors' norms (times `scale`), or norm weights around `scale`."""
        noise = torch.randn(shape, generator=self._random)
        self.tensors[name] = (
            scale * (1 + 0.1 * noise) if len(shape) == 1 else noise * (scale * shape[-1] ** -0.5)
        )

    def layer(self, prefix: str, dim: int) -> None:
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
        for name in (*norms, "post_feedforward_layernorm"):
            self.add(f"{prefix}.{name}.weight", HIDDEN)
        for name, rows, width in (
            ("q", HEADS * dim, HIDDEN),
            ("k", KV_HEADS * dim, HIDDEN),
            ("v", KV_HEADS * dim, HIDDEN),
        ):
            self.add(f"{prefix}.self_attn.{name}_proj.weight", rows, width)
        self.add(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HEADS * dim)
        for name in ("q_norm", "k_norm"):
            self.add(f"{prefix}.self_attn.{name}.weight", dim, scale=0.4)
        for name, rows, width in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            self.add(f"{prefix}.mlp.{name}_proj.weight", rows, width)
        self.tensors[f"{prefix}.layer_scalar"] = torch.tensor([0.9])

    def inputs(self, vocab: int) -> None:
        """Add the per-layer inputs' tensors."""
        width = OWN_INPUT * len(KINDS)
        self.add("model.embed_tokens_per_layer.weight", vocab, width, scale=width**0.5)
        self.add("model.per_layer_model_projection.weight", width, HIDDEN, scale=HIDDEN**0.5)
        self.add("model.per_layer_projection_norm.weight", OWN_INPUT)
        for i in range(len(KINDS)):
            self.add(f"model.layers.{i}.per_layer_input_gate.weight", OWN_INPUT, HIDDEN)
            self.add(f"model.layers.{i}.per_layer_projection.weight", HIDDEN, OWN_INPUT)
            self.add(f"model.layers.{i}.post_per_layer_input_norm.weight", HIDDEN, scale=QUIET)

    def experts(self) -> None:
        """Add the experts that run in parallel with each layer's MLP."""
        for i in range(len(KINDS)):
            prefix = f"model.layers.{i}"
            self.add(f"{prefix}.router.proj.weight", EXPERTS, HIDDEN, scale=HIDDEN**0.5)
            self.add(f"{prefix}.router.scale", HIDDEN)
            self.add(f"{prefix}.router.per_expert_scale", EXPERTS)
            self.add(f"{prefix}.experts.gate_up_proj", EXPERTS, 2 * EXPERT_WIDTH, HIDDEN)
            self.add(f"{prefix}.experts.down_proj", EXPERTS, HIDDEN, EXPERT_WIDTH)
            self.add(f"{prefix}.pre_feedforward_layernorm_2.weight", HIDDEN)
            self.add(f"{prefix}.post_feedforward_layernorm_1.weight", HIDDEN)
            self.add(f"{prefix}.post_feedforward_layernorm_2.weight", HIDDEN, scale=QUIET)


def gemma4_pair(tokenizer: Path, folder: Path, *, experts: bool = False) -> tuple[Path, Path, Path]:
    """(target, assistant, assistant with centroids) in folders below `folder`; `tokenizer`: folder of the model whose
    tokenizer they have.

    The target's last two layers share the keys and values of its first two. `experts`: with experts, and without
    per-layer inputs.
    """
    vocab = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    m = Maker()
    m.add("model.embed_tokens.weight", vocab, HIDDEN, scale=0.6)
    m.add("model.norm.weight", HIDDEN, scale=3.3)
    for i, kind in enumerate(KINDS):
        m.layer(f"model.layers.{i}", SMALL if kind == "sliding_attention" else LARGE)
    common = dict(m.tensors)
    text = _text(vocab)
    if experts:
        m.experts()
        own = {"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 3}
        own |= {"moe_intermediate_size": EXPERT_WIDTH, "num_kv_shared_layers": 2}
    else:
        m.inputs(vocab)
        own = {"hidden_size_per_layer_input": OWN_INPUT, "vocab_size_per_layer_input": vocab}
        own |= {"num_kv_shared_layers": 2}
    raw = {**text, **own, "final_logit_softcapping": 30.0, "architectures": ["Gemma4ForCausalLM"]}
    read = {k: v for k, v in m.tensors.items() if not (k[13:14] in "23" and k.endswith(_KEYS))}
    target = _write(folder / "target", raw, read)
    for file in tokenizer.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, target)

    tensors = {name: tensor for name, tensor in common.items() if not name.endswith(_KEYS)}
    eye, some = torch.eye(HIDDEN), torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))
    tensors["pre_projection.weight"] = torch.cat((eye, 0.1 * HIDDEN**-0.5 * some), dim=1)
    tensors["post_projection.weight"] = eye
    raw = {"model_type": "gemma4_assistant", "text_config": {**text, "num_kv_shared_layers": len(KINDS)}}
    raw |= {"backbone_hidden_size": HIDDEN, "num_centroids": CENTROIDS, "centroid_intermediate_top_k": 6}
    plain = _write(folder / "assistant", {**raw, "use_ordered_embeddings": False}, tensors)
    # a centroid's tokens are those nearest to a direction, up to its capacity
    table = tensors["model.embed_tokens.weight"]
    order = (table @ some[0]).argsort()
    tensors["masked_embedding.token_ordering"] = order
    tensors["masked_embedding.centroids.weight"] = table[order].view(CENTROIDS, -1, HIDDEN).mean(1)
    return target, plain, _write(folder / "centroids", {**raw, "use_ordered_embeddings": True}, tensors)


_KEYS = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def _text(vocab: int) -> dict[str, Any]:
    return {
        **{
            "model_type": "gemma4_text",
            "vocab_size": vocab,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
        },
        **{"num_hidden_layers": len(KINDS), "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
        **{"head_dim": SMALL, "global_head_dim": LARGE, "sliding_window": 24, "layer_types": KINDS},
        **{"max_position_embeddings": 4096, "hidden_size_per_layer_input": 0, "dtype": "float32"},
        **{"eos_token_id": [0, 2], "bos_token_id": None, "tie_word_embeddings": True},
    }


def _write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
