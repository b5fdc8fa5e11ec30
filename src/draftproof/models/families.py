"""The families of language models that the one decoder runs: a table with one row a family, and nothing else.

A row says how a family differs from "Llama": where its biases are, whether it norms q and k, what its window means,
how much of a head rotates, where it has experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from draftproof.models.mla import KEYS as MLA_KEYS
from draftproof.models.moe_config import MoEFamily

# How a config states its sliding windows:
#   per_layer  `layer_types` names the layers that slide, `sliding_window` their size
#   switched   as per_layer, but only under `use_sliding_window`; without `layer_types` the layers from
#              `max_window_layers` on slide
#   every      `sliding_window` holds for every layer, `default_window` where the key is missing, null for none
#   never      the keys may be there, switched off
Windows = Literal["per_layer", "switched", "every", "never"]

WINDOW_KEYS: Mapping[Windows, frozenset[str]] = {
    "per_layer": frozenset({"layer_types", "sliding_window"}),
    "switched": frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}),
    "every": frozenset({"layer_types", "sliding_window"}),
    "never": frozenset({"sliding_window", "max_window_layers"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. A bias, or the norm of q and k, is a constant or the config key that switches it on (missing: off).

    `default_rotary`: share of a head that rotates where the config does not say; None: the family rotates whole heads
    and refuses anything else.
    """

    model_type: str
    architectures: tuple[str, ...]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    windows: Windows = "per_layer"
    default_window: int | None = None
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    mla: bool = False
    default_theta: float = 10000.0
    default_rotary: float | None = None
    moe: MoEFamily | None = None
    gemma: int = 0  # the generation, where `gemma_config` reads the config first

    @property
    def keys(self) -> frozenset[str]:
        """Config keys that mean something in this family, beyond those that all share."""
        switches = (self.qkv_bias, self.o_bias, self.mlp_bias, self.qk_norm)
        named = {switch for switch in switches if isinstance(switch, str)}
        mixture = self.moe.keys if self.moe else frozenset()
        return WINDOW_KEYS[self.windows] | named | mixture | (MLA_KEYS if self.mla else frozenset())


_ROWS: Mapping[str, Family] = {
    row.model_type: row
    for row in (
        # Llama itself has no windows; draft heads of this type do.
        Family(
            model_type="llama",
            architectures=("LlamaForCausalLM",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family(model_type="qwen2", architectures=("Qwen2ForCausalLM",), qkv_bias=True, windows="switched"),
        Family(
            model_type="qwen3",
            architectures=("Qwen3ForCausalLM",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="switched",
            default_head_dim=128,
        ),
        Family(
            model_type="mimo",
            architectures=("MiMoForCausalLM",),
            qkv_bias="attention_bias",
            windows="switched",
        ),
        Family(
            model_type="deepseek_v3",
            architectures=("DeepseekV3ForCausalLM",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mla=True,
            moe=MoEFamily(scoring="biased_sigmoid", count=("n_routed_experts", "num_local_experts")),
        ),
        Family(
            model_type="mistral", architectures=("MistralForCausalLM",), windows="every", default_window=4096
        ),
        Family(
            model_type="mixtral",
            architectures=("MixtralForCausalLM",),
            windows="every",
            default_theta=1e6,
            moe=MoEFamily(
                scoring="softmax",
                count=("num_local_experts", "num_experts"),
                width="intermediate_size",
                normalized=True,
                blocks=("block_sparse_moe", "mlp"),
                parts=("w1", "w3", "w2"),
            ),
        ),
        # transformers lets every layer slide where the key says so; no published model does.
        Family(
            model_type="qwen3_moe",
            architectures=("Qwen3MoeForCausalLM",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="never",
            moe=MoEFamily(scoring="softmax", count=("num_experts", "num_local_experts")),
        ),
        Family(
            model_type="glm4_moe",
            architectures=("Glm4MoeForCausalLM",),
            qkv_bias="attention_bias",
            qk_norm="use_qk_norm",
            default_rotary=0.5,
            moe=MoEFamily(scoring="biased_sigmoid", count=("n_routed_experts", "num_local_experts")),
        ),
        Family(
            model_type="gemma3_text",
            architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            gemma=3,
        ),
        Family(
            model_type="gemma4_text",
            architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            gemma=4,
        ),
    )
}

# Configs that hold a text model beside others are read as that.
FAMILIES: Mapping[str, Family] = {**_ROWS, **{f"gemma{n}": _ROWS[f"gemma{n}_text"] for n in (3, 4)}}
