"""The families of language models that the one decoder runs: a table with one row a family, and nothing else.

A row says how a family differs from "Llama": where its biases are, whether it norms q and k, what its window means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# How a config states its sliding windows:
#   per_layer  `layer_types` names the layers that slide, `sliding_window` their size
#   switched   the same, but only under `use_sliding_window`; without `layer_types` the layers from
#              `max_window_layers` on slide
#   every      `sliding_window` holds for every layer, 4096 where the key is missing, null for none
Windows = Literal["per_layer", "switched", "every"]

WINDOW_KEYS: Mapping[Windows, frozenset[str]] = {
    "per_layer": frozenset({"layer_types", "sliding_window"}),
    "switched": frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}),
    "every": frozenset({"layer_types", "sliding_window"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. A bias is a constant of the family or the config key that switches it on (missing: off)."""

    model_type: str
    architectures: tuple[str, ...]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Windows = "per_layer"
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads

    @property
    def keys(self) -> frozenset[str]:
        """Config keys that mean something in this family, beyond those that all share."""
        biases = {b for b in (self.qkv_bias, self.o_bias, self.mlp_bias) if isinstance(b, str)}
        return WINDOW_KEYS[self.windows] | biases


FAMILIES: Mapping[str, Family] = {
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
        Family(model_type="mistral", architectures=("MistralForCausalLM",), windows="every"),
    )
}
