"""The target in plain torch and bf16: whole texts, or one token of each of many requests, at full GPU speed.

The engine's bits do not depend on the batch, which costs time and which training does not need.
Shapes: N texts, L longest text, A heads, K key heads, D size of a head, H hidden size, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from draftproof.models.config import ModelConfig, read_config
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.train.recipes import is_plain

DTYPE = torch.bfloat16
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q_NALD, k_NKLD, v_NKLD


def rope(theta: float, size: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_PD and sin_PD of each position."""
    freq = theta ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    angle_PD = (torch.arange(num_positions, dtype=torch.float64)[:, None] * freq).repeat(1, 2)
    return angle_PD.cos().to(device, DTYPE), angle_PD.sin().to(device, DTYPE)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def causal(q_NALD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_NALD, k_NKLD, v_NKLD, is_causal=True, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer. `qkv`, `gate_up`: fused weights; `head_norms`: of q and k, if any."""

    norm_H: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, ...]
    o: Tensor
    ffn_norm_H: Tensor
    gate_up: Tensor
    down: Tensor


class Target:
    """A model of the Llama and Qwen 3 families. `embed_VH`, `unembed_VH`: shared with heads."""

    def __init__(self, directory: Path, num_positions: int, device: torch.device) -> None:
        self.directory, self.device = directory, device
        self.config = read_config(directory)
        self.mixer = _mixer(directory, self.config)
        weights = {
            name.removeprefix("model."): tensor.to(device, DTYPE)
            for file in sorted(directory.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        self.embed_VH = weights["embed_tokens.weight"]
        self.unembed_VH = self.embed_VH if self.config.tie_word_embeddings else weights["lm_head.weight"]
        self._norm_H = weights["norm.weight"]
        self._layers = [self._layer(weights, f"layers.{i}.") for i in range(self.config.num_layers)]
        self._cos_PD, self._sin_PD = rope(self.mixer.rope.theta, self.mixer.head_dim, num_positions, device)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def _layer(self, weights: dict[str, Tensor], prefix: str) -> Layer:
        norms = ("self_attn.q_norm", "self_attn.k_norm") if self.mixer.qk_norm else ()
        return Layer(
            norm_H=weights[f"{prefix}input_layernorm.weight"],
            qkv=torch.cat([weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]),
            head_norms=tuple(weights[f"{prefix}{name}.weight"] for name in norms),
            o=weights[f"{prefix}self_attn.o_proj.weight"],
            ffn_norm_H=weights[f"{prefix}post_attention_layernorm.weight"],
            gate_up=torch.cat([weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]),
            down=weights[f"{prefix}mlp.down_proj.weight"],
        )

    def run(
        self, tokens_NL: Tensor, positions_NL: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """(normed last states [N, L, H], states before the layers `taps`)."""
        x_NLH, kept = self.embed_VH[tokens_NL], []
        cos, sin = self._cos_PD[positions_NL][:, None], self._sin_PD[positions_NL][:, None]
        num_texts, length = tokens_NL.shape
        m = self.mixer
        sizes = [num * m.head_dim for num in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]
        for number, layer in enumerate(self._layers):
            if number in taps:
                kept.append(x_NLH)
            parts = F.linear(self._normed(x_NLH, layer.norm_H), layer.qkv).split(sizes, -1)
            q, k, v = (t.view(num_texts, length, -1, m.head_dim).transpose(1, 2) for t in parts)
            if layer.head_norms:
                q, k = (self._normed(t, weight) for t, weight in zip((q, k), layer.head_norms, strict=True))
            a_NALD = attend(number, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x_NLH = x_NLH + F.linear(a_NALD.transpose(1, 2).reshape(num_texts, length, -1), layer.o)
            gate, up = F.linear(self._normed(x_NLH, layer.ffn_norm_H), layer.gate_up).chunk(2, -1)
            x_NLH = x_NLH + F.linear(F.silu(gate) * up, layer.down)
        return self._normed(x_NLH, self._norm_H), kept

    def read(self, tokens_NL: Tensor, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """`run` over whole texts."""
        positions_NL = torch.arange(tokens_NL.shape[1], device=self.device).expand(len(tokens_NL), -1)
        return self.run(tokens_NL, positions_NL, lambda _, q, k, v: causal(q, k, v), taps)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _mixer(directory: Path, config: ModelConfig) -> AttentionConfig:
    """The attention settings, equal in all layers. ValueError for a model with features that `Target` lacks."""
    mixers = {layer.mixer for layer in config.layers}
    mixer = next(iter(mixers))
    if (
        len(mixers) > 1
        or not is_plain(config)
        or not isinstance(mixer, AttentionConfig)
        or mixer.rope.type != "default"
        or mixer.window
        or mixer.qkv_bias
    ):
        raise ValueError(
            f"{directory}: model_type={config.model_type!r}: this script reads models like SmolLM2 (Llama or Qwen 3, "
            "plain rotary embedding, no biases, no windows); train a head for others by `draftproof train`"
        )
    return mixer
