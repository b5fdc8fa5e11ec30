"""Random targets with prediction modules in their own files. The models' next token depends mostly on the last one, as
do the modules' drafts, of which a quarter to a half are right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 64
_SIZES: dict[str, Any] = {
    **{"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "dtype": "float32"},
    **{"bos_token_id": None, "eos_token_id": [0, 2], "tie_word_embeddings": False},
}
_DEEPSEEK: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    **{
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "num_nextn_predict_layers": 2},
}
_MIMO: dict[str, Any] = {
    **{"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_nextn_predict_layers": 1},
}


class Maker:
    """Random tensors by name. `branch`: scale of a layer's branches relative to an embedding."""

    def __init__(self, branch: float) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._random, self._branch = torch.Generator().manual_seed(5), branch

    def add(self, name: str, *shape: int, scale: float = 1.0) -> None:
        """Add a random tensor: a matrix that keeps vectors' norms (times `scale`), or norm weights around 1."""
        noise = torch.randn(shape, generator=self._random)
        if len(shape) == 1:
            self.tensors[name] = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
            return
        loud = self._branch if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        self.tensors[name] = noise * (loud * scale * shape[-1] ** -0.5)

    def mlp(self, prefix: str, width: int) -> None:
        for part in ("gate_proj", "up_proj"):
            self.add(f"{prefix}.{part}.weight", width, HIDDEN)
        self.add(f"{prefix}.down_proj.weight", HIDDEN, width)

    def norms(self, prefix: str) -> None:
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add(f"{prefix}.{name}.weight", HIDDEN)

    def deepseek_layer(self, prefix: str, dense: bool) -> None:
        c, heads = _DEEPSEEK, 4
        qk, rank = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["kv_lora_rank"]
        self.norms(prefix)
        for name, shape in {
            "q_a_proj": (c["q_lora_rank"], HIDDEN),
            "q_a_layernorm": (c["q_lora_rank"],),
            "q_b_proj": (heads * qk, c["q_lora_rank"]),
            "kv_a_proj_with_mqa": (rank + c["qk_rope_head_dim"], HIDDEN),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
            "o_proj": (HIDDEN, heads * c["v_head_dim"]),
        }.items():
            self.add(f"{prefix}.self_attn.{name}.weight", *shape)
        if dense:
            self.mlp(f"{prefix}.mlp", 96)
            return
        self.add(f"{prefix}.mlp.gate.weight", c["n_routed_experts"], HIDDEN)
        self.tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = (
            torch.randn(8, generator=self._random) / 4
        )
        for expert in (*(f"experts.{i}" for i in range(c["n_routed_experts"])), "shared_experts"):
            self.mlp(f"{prefix}.mlp.{expert}", c["moe_intermediate_size"])

    def mimo_layer(self, prefix: str) -> None:
        self.norms(prefix)
        for part, size in (("q", 64), ("k", 32), ("v", 32)):
            self.add(f"{prefix}.self_attn.{part}_proj.weight", size, HIDDEN)
            self.add(f"{prefix}.self_attn.{part}_proj.bias", size)
        self.add(f"{prefix}.self_attn.o_proj.weight", HIDDEN, 64)
        self.mlp(f"{prefix}.mlp", 96)

    def fusion(self, name: str, state_first: bool) -> None:
        """Add a module's fusion of (token's embedding, state): it passes the embedding, and a little of the state."""
        self.add(name, HIDDEN, HIDDEN, scale=0.3)
        parts = [torch.eye(HIDDEN), self.tensors[name]]
        self.tensors[name] = torch.cat(parts[::-1] if state_first else parts, dim=1)

    def write(self, folder: Path, raw: Mapping[str, Any], tokenizer: Path) -> Path:
        vocab = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
        self.add("model.embed_tokens.weight", vocab, HIDDEN, scale=HIDDEN**0.5)
        self.add("lm_head.weight", vocab, HIDDEN, scale=3.0)
        self.add("model.norm.weight", HIDDEN)
        for name in self.tensors:
            if name.endswith(("shared_head.norm.weight", "final_layernorm.weight")):
                self.tensors[name] = self.tensors["model.norm.weight"].clone()
        folder.mkdir(parents=True, exist_ok=True)
        for file in tokenizer.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps({**_SIZES, "vocab_size": vocab, **raw}))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def deepseek(tokenizer: Path, folder: Path) -> Path:
    """A model with latent attention, experts and two modules, saved in `folder`, which is returned; `tokenizer`: folder
    of the model whose tokenizer it has."""
    m, layers = Maker(branch=0.25), _SIZES["num_hidden_layers"]
    for i in range(layers + _DEEPSEEK["num_nextn_predict_layers"]):
        m.deepseek_layer(f"model.layers.{i}", dense=i < _DEEPSEEK["first_k_dense_replace"])
        if i >= layers:
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                m.add(f"model.layers.{i}.{norm}.weight", HIDDEN)
            m.fusion(f"model.layers.{i}.eh_proj.weight", state_first=False)
    return m.write(folder, _DEEPSEEK, tokenizer)


def mimo(tokenizer: Path, folder: Path) -> Path:
    """A model with ordinary attention with biases and one module; arguments as in `deepseek`."""
    m = Maker(branch=0.25)
    for i in range(_SIZES["num_hidden_layers"]):
        m.mimo_layer(f"model.layers.{i}")
    module = "model.mtp_layers.0"
    m.mimo_layer(module)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        m.add(f"{module}.{norm}.weight", HIDDEN)
    m.fusion(f"{module}.input_proj.weight", state_first=True)
    return m.write(folder, _MIMO, tokenizer)
