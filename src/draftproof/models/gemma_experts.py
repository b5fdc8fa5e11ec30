"""Gemma 4's experts beside a layer's MLP: each row goes through the few that a router chooses.

Router and experts both read the stream as it is after attention, each through a norm of its own.
Shapes: T rows, E experts, K experts a row, P = T * K pairs of row and expert, H hidden size, I width of an expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftproof.models.layers import LayerBuilder, Norm
from draftproof.models.moe import Experts
from draftproof.models.moe_config import MoEConfig


class GemmaExperts:
    """[T, H] of the stream -> [T, H], normed, to be added to the MLP's output."""

    __slots__ = (
        "_after",
        "_before",
        "_experts",
        "_route",
        "_router",
        "_router_norm",
        "_routing",
        "_scale_E",
    )

    def __init__(self, builder: LayerBuilder, layer: str, hidden: int, eps: float, config: MoEConfig) -> None:
        """layer: what the layer's tensors begin with."""
        builder = replace(builder, fp8=False)  # as for other experts
        self._routing = config.routing
        self._route = builder.ops.experts.route
        # fp32: half precision would round the product of the two scales
        scale_H = builder.tensor(f"{layer}.router.scale", (hidden,)).float() * hidden**-0.5
        self._router_norm = Norm(scale_H, eps, builder.ops)
        self._router = builder.linear(
            f"{layer}.router.proj", hidden, config.num_experts, out_dtype=torch.float32
        )
        self._scale_E = builder.tensor(f"{layer}.router.per_expert_scale", (config.num_experts,)).float()
        self._before = builder.norm(f"{layer}.pre_feedforward_layernorm_2", hidden, eps)
        self._after = builder.norm(f"{layer}.post_feedforward_layernorm_2", hidden, eps)
        self._experts = Experts(builder, f"{layer}.experts", hidden, config, builder.ops.gelu_mul)

    def __call__(self, stream_TH: Tensor) -> Tensor:
        scores_TE = self._router(self._router_norm(stream_TH))
        experts_TK, weights_TK = self._route(scores_TE, None, self._routing)
        weights_TK = weights_TK * self._scale_E[experts_TK]
        return self._after(self._experts(self._before(stream_TH), experts_TK, weights_TK))
