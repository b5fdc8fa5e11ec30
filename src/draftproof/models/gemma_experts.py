"""Gemma 4's experts beside a layer's MLP: each row goes through the few that a router chooses.

Router and experts both read the stream as it is after attention, each through a norm of its own.
Shapes: T rows, E experts, K experts a row, P = T * K pairs of row and expert, H hidden size, I width of an expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftproof.models.layers import LayerBuilder, Norm
from draftproof.models.moe import ExpertWeights
from draftproof.models.moe_config import MoEConfig


class GemmaExperts:
    """[T, H] of the stream -> [T, H], normed, to be added to the MLP's output."""

    __slots__ = (
        "_after",
        "_before",
        "_config",
        "_down",
        "_gate_up",
        "_gather",
        "_gelu_mul",
        "_ops",
        "_router",
        "_router_norm",
        "_scale_E",
    )

    def __init__(self, builder: LayerBuilder, layer: str, hidden: int, eps: float, config: MoEConfig) -> None:
        """layer: what the layer's tensors begin with."""
        builder = replace(builder, fp8=False)  # as for other experts
        self._config = config
        self._ops = builder.ops.experts
        self._gather = builder.ops.gather
        self._gelu_mul = builder.ops.gelu_mul
        # fp32: half precision would round the product of the two scales
        scale_H = builder.tensor(f"{layer}.router.scale", (hidden,)).float() * hidden**-0.5
        self._router_norm = Norm(scale_H, eps, builder.ops)
        self._router = builder.linear(
            f"{layer}.router.proj", hidden, config.num_experts, out_dtype=torch.float32
        )
        self._scale_E = builder.tensor(f"{layer}.router.per_expert_scale", (config.num_experts,)).float()
        self._before = builder.norm(f"{layer}.pre_feedforward_layernorm_2", hidden, eps)
        self._after = builder.norm(f"{layer}.post_feedforward_layernorm_2", hidden, eps)
        gate, up, down = config.parts
        weights = ExpertWeights(builder, f"{layer}.experts", config.num_experts)
        self._gate_up = weights.load((gate, up), "gate_up_proj", config.width, hidden)
        self._down = weights.load((down,), "down_proj", hidden, config.width, out_dtype=torch.float32)

    def __call__(self, stream_TH: Tensor) -> Tensor:
        scores_TE = self._router(self._router_norm(stream_TH))
        experts_TK, weights_TK = self._ops.route(scores_TE, None, self._config.routing)
        source_P, place_TK, starts_E1 = self._ops.group(experts_TK, self._config.num_experts)
        inner_PI2 = self._gate_up(self._gather(self._before(stream_TH), source_P), starts_E1)
        y_PH = self._down(self._gelu_mul(inner_PI2), starts_E1)
        weights_TK = weights_TK * self._scale_E[experts_TK]
        return self._after(self._ops.combine(y_PH, place_TK, weights_TK, None, stream_TH.dtype))
