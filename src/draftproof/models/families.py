"""The supported families of language models: a table with one row per family, and nothing else.

A row says how a family differs from Llama: where its biases are, whether it norms q and k, which layers have windows,
how much of a head rotates, where it has experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# How a config states its sliding windows:
#   per_layer  `layer_types` names the layers that slide, `sliding_window` their size
#   switched   as per_layer, but only under `use_sliding_window`; without `layer_types` the layers from
#              `max_window_layers` on slide
#   every      `sliding_window` holds for every layer, `default_window` where the key is missing, null for none
#   never      the keys may be present but must be off
Windows = Literal["per_layer", "switched", "every", "never"]

WINDOW_KEYS: Mapping[Windows, frozenset[str]] = {
    "per_layer": frozenset({"layer_types", "sliding_window"}),
    "switched": frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}),
    "every": frozenset({"layer_types", "sliding_window"}),
    "never": frozenset({"sliding_window", "max_window_layers"}),
}


# How a row chooses its experts:
#   softmax         those with the highest probability
#   biased_sigmoid  as in DeepSeek-V3: sigmoid scores plus a correction bias for the choice, without it for the weight;
#                   only experts of the best groups are candidates; weights scaled; shared experts
Scoring = Literal["softmax", "biased_sigmoid"]

# Training settings (losses, noise, layout), and numbers of draft modules, which the drafters' reader handles.
_HARMLESS = frozenset(
    {
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "num_nextn_predict_layers",
    }
)
SIGMOID_ONLY: Mapping[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_SIGMOID_KEYS = frozenset(
    {
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "n_shared_experts",
        "first_k_dense_replace",
        *SIGMOID_ONLY,
    }
)
_SOFTMAX_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFamily:
    """The experts of a family: names of config keys and of tensors, and the kind of routing.

    `count`: keys for the number of experts, the first found counts. `normalized`: whether chosen weights sum to 1: a
    constant or a config key, with `default_normalized` if the key is missing (None: it is required). `parts`: tensors
    of an expert's gate, up and down. `blocks`: where in a layer the experts are, the first found counts. `turned`: a
    tensor of all experts may hold their weights transposed.
    """

    scoring: Scoring
    count: tuple[str, ...]
    width: str = "moe_intermediate_size"
    normalized: bool | str = "norm_topk_prob"
    default_normalized: bool | None = None
    blocks: tuple[str, ...] = ("mlp",)
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    turned: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """Config keys that are read, or known not to affect logits."""
        own = frozenset({*self.count, self.width, "num_experts_per_tok"})
        if isinstance(self.normalized, str):
            own |= {self.normalized}
        return own | _HARMLESS | (_SIGMOID_KEYS if self.scoring == "biased_sigmoid" else _SOFTMAX_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. A bias, or the norm of q and k, is a constant or the config key that switches it on (missing: off).

    `default_rotary`: share of a head that rotates if the config does not say; None: the family rotates whole heads
    and refuses anything else. `mixer`, `ffn`: the layers' kinds, `reader`: the config reader, all by their names in
    `registry`.
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
    default_theta: float = 10000.0
    default_rotary: float | None = None
    interleaved_axes: bool = False  # M-RoPE: whether axes are interleaved if the config does not say
    moe: MoEFamily | None = None
    mixer: str = "attention"
    ffn: str = "dense"
    reader: str = "alike"

    @property
    def keys(self) -> frozenset[str]:
        """Config keys of this family beyond the common ones and those of its layers' kinds."""
        switches = (self.qkv_bias, self.o_bias, self.mlp_bias, self.qk_norm)
        named = {switch for switch in switches if isinstance(switch, str)}
        mixture = self.moe.keys if self.moe else frozenset()
        return WINDOW_KEYS[self.windows] | named | mixture


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
            model_type="qwen2_5_vl_text",
            architectures=("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLTextModel"),
            qkv_bias=True,
            windows="switched",
            default_theta=1e6,
        ),
        Family(
            model_type="qwen3",
            architectures=("Qwen3ForCausalLM",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="switched",
            default_head_dim=128,
        ),
        # transformers interleaves the M-RoPE axes whether or not the config says so.
        Family(
            model_type="qwen3_vl_text",
            architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLTextModel"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="never",
            default_head_dim=128,
            default_theta=5e5,
            interleaved_axes=True,
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
            mixer="latent",
            ffn="experts",
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
            ffn="experts",
            moe=MoEFamily(
                scoring="softmax",
                count=("num_local_experts", "num_experts"),
                width="intermediate_size",
                normalized=True,
                blocks=("block_sparse_moe", "mlp"),
                parts=("w1", "w3", "w2"),
            ),
        ),
        # transformers makes every layer slide if the key says so; no published model does.
        Family(
            model_type="qwen3_moe",
            architectures=("Qwen3MoeForCausalLM",),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="never",
            ffn="experts",
            moe=MoEFamily(scoring="softmax", count=("num_experts", "num_local_experts")),
        ),
        # transformers' config has no norm_topk_prob; in published files it is true.
        Family(
            model_type="qwen3_vl_moe_text",
            architectures=("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextModel"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows="never",
            default_theta=5e5,
            interleaved_axes=True,
            ffn="experts",
            moe=MoEFamily(
                scoring="softmax",
                count=("num_experts", "num_local_experts"),
                default_normalized=True,
                turned=True,
            ),
        ),
        Family(
            model_type="glm4_moe",
            architectures=("Glm4MoeForCausalLM",),
            qkv_bias="attention_bias",
            qk_norm="use_qk_norm",
            default_rotary=0.5,
            ffn="experts",
            moe=MoEFamily(scoring="biased_sigmoid", count=("n_routed_experts", "num_local_experts")),
        ),
        Family(
            model_type="gemma3_text",
            architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            reader="gemma3",
        ),
        Family(
            model_type="gemma4_text",
            architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            reader="gemma4",
        ),
    )
}

# Configs of multimodal models are read as their text model.
FAMILIES: Mapping[str, Family] = {**_ROWS, **{f"gemma{n}": _ROWS[f"gemma{n}_text"] for n in (3, 4)}}
