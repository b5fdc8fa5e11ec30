"""Small random models made with transformers, one for each variant that the decoder must match."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.exact import Double, Exact, jittered, settle

_SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 199,
}
_GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 24}
_MLA = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
_DEEPSEEK_MOE = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
    **{"n_group": 4, "topk_group": 2},
}


@dataclass(frozen=True)
class ModelCase:
    """One model: the family's name in transformers, its changes to the small default sizes, and how it is saved.

    `config`: the name of its config class, if it differs from the family's.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    packed: bool = False  # all experts of a layer in one tensor, as in transformers' modules
    config: str = ""


MODEL_CASES = {
    "llama-biases-sharded": ModelCase("Llama", {"attention_bias": True, "mlp_bias": True}, shard_size="60KB"),
    "llama3-rope-tied-wide-heads": ModelCase(
        "Llama", {"rope_parameters": _LLAMA3, "head_dim": 32, "tie_word_embeddings": True}
    ),
    "llama-yarn": ModelCase("Llama", {"rope_parameters": _YARN, "num_key_value_heads": 4}),
    "llama-linear": ModelCase(
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}
    ),
    "qwen2-tied": ModelCase("Qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen2-upper-layer-slides": ModelCase(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "num_key_value_heads": 1},
    ),
    "qwen3-narrow-heads-sharded": ModelCase("Qwen3", {"head_dim": 8}, shard_size="50KB"),
    "qwen3-biases-first-layer-slides": ModelCase(
        "Qwen3",
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "mistral-window": ModelCase("Mistral", {"sliding_window": 11}),
    "mistral-no-window-head-dim": ModelCase("Mistral", {"sliding_window": None, "head_dim": 20}),
    "mixtral": ModelCase("Mixtral", {"num_local_experts": 4, "intermediate_size": 40}),
    "mixtral-window-packed": ModelCase(
        "Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 11}, packed=True
    ),
    "qwen3-moe-sharded": ModelCase(
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "head_dim": 24},
        shard_size="60KB",
    ),
    "qwen3-moe-normalized-packed-some-dense": ModelCase(
        "Qwen3Moe",
        {
            **{
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
            },
            **{
                "num_hidden_layers": 4,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [1],
                "attention_bias": True,
            },
        },
        packed=True,
    ),
    "glm4-moe": ModelCase(
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
            **{"use_qk_norm": True, "attention_bias": True, "num_hidden_layers": 3},
        },
    ),
    "glm4-moe-groups-two-shared-packed": ModelCase(
        "Glm4Moe",
        {
            **{"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 20},
            **{"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
            **{"first_k_dense_replace": 0, "norm_topk_prob": False},
        },
        packed=True,
    ),
    "gemma3-tied": ModelCase(
        "Gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
            },
            "tie_word_embeddings": True,
        },
        config="Gemma3TextConfig",
    ),
    "gemma3-capped-biases-sharded": ModelCase(
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
        shard_size="60KB",
        config="Gemma3TextConfig",
    ),
    "gemma4-plain": ModelCase(
        "Gemma4",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        config="Gemma4TextConfig",
    ),
    "gemma4-shares-keys-wide-mlp": ModelCase(
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 8.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        config="Gemma4TextConfig",
    ),
    "gemma4-keys-are-values-sharded": ModelCase(
        "Gemma4",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": True},
        shard_size="60KB",
        config="Gemma4TextConfig",
    ),
    "gemma4-experts": ModelCase(
        "Gemma4",
        {**_GEMMA4, **_GEMMA4_MOE, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
        config="Gemma4TextConfig",
    ),
    "gemma4-experts-keys-are-values-sharded": ModelCase(
        "Gemma4",
        {
            **{**_GEMMA4, **_GEMMA4_MOE, "num_experts": 4, "top_k_experts": 1, "moe_intermediate_size": 20},
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 8.0},
            "tie_word_embeddings": True,
        },
        shard_size="60KB",
        config="Gemma4TextConfig",
    ),
    "deepseek-v3": ModelCase("DeepseekV3", {**_MLA, **_DEEPSEEK_MOE, "first_k_dense_replace": 1}),
    "deepseek-v3-dense-yarn-biases": ModelCase(
        "DeepseekV3",
        {
            **{**_MLA, **_DEEPSEEK_MOE, "first_k_dense_replace": 2},
            **{"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "attention_bias": True},
            **{"rms_norm_eps": 1e-4, "num_hidden_layers": 2},
        },
    ),
    "deepseek-v3-whole-queries-sharded": ModelCase(
        "DeepseekV3",
        {
            **{**_MLA, **_DEEPSEEK_MOE, "first_k_dense_replace": 0},
            **{"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 20, "num_hidden_layers": 3},
        },
        shard_size="60KB",
    ),
}


def make(case: ModelCase) -> Any:
    """The transformers model with every weight random and none of them trivial, fp32, in eval mode."""
    config = getattr(transformers, case.config or f"{case.family}Config")(**{**_SIZES, **case.changes})
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    embed = (
        0.1 if case.family.startswith("Gemma") else 0.3
    )  # scaled up, so that tied logits depend strongly on the input token
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (embed if "embed" in name else 1.6 * parameter.shape[-1] ** -0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    return model


def save(case: ModelCase, directory: Path) -> Any:
    """Make the model, save it to `directory`, and return it."""
    model = make(case)
    model.save_pretrained(directory, max_shard_size=case.shard_size, save_original_format=not case.packed)
    return model


@torch.no_grad()
def states(model: Any, tokens: list[int]) -> tuple[Tensor, list[Tensor], Tensor]:
    """(logits [T, V], the stream entering each layer and after the last one [T, H] each, state after the norm)."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    try:
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    finally:
        hook.remove()
    entering = [h[0] for h in out.hidden_states[:-1]]
    return out.logits[0], [*entering, seen[0]], out.hidden_states[-1][0]


@dataclass(frozen=True)
class States:
    """The result of `states`, in fp64."""

    logits: Exact
    streams: list[Exact]
    final: Exact


@torch.no_grad()
def exact(model: Any, tokens: list[int]) -> States:
    """The result of `model` in fp64: its weights are fp32 numbers, but all computation is in fp64."""

    def run(seed: int | None) -> list[Tensor]:
        double = copy.deepcopy(model).double()
        double.set_experts_implementation("eager")  # the others have no fp64
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for parameter in double.parameters():
                parameter.copy_(jittered(parameter, generator))
        with Double():
            logits, streams, final = states(double, tokens)
        return [logits, final, *streams]

    logits, final, *streams = settle(run)
    return States(logits, streams, final)
