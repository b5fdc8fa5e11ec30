"""Experts in parallel to a layer's MLP (Gemma 4): each row goes through the MLP and the experts that a router chooses.

Router and experts both read the stream after the mixer, each through its own norm.
Shapes: T rows, E experts, K experts per row, P = T * K pairs of row and expert, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftproof.kernels.exactness import Case
from draftproof.matmul.spec import DENSE
from draftproof.models.builder import LayerBuilder, Norm
from draftproof.models.cases import Where, norm_case
from draftproof.models.ffns.dense import DenseConfig
from draftproof.models.ffns.experts import Experts, ExpertsConfig
from draftproof.models.spec import Norms, WeightCount


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideConfig:
    """An MLP, and experts whose outputs are added to its own."""

    dense: DenseConfig
    experts: ExpertsConfig

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, hidden_size: int) -> Beside:
        return Beside(builder, prefix, hidden_size, self, norms)

    def num_weights(self, hidden_size: int, rows: int) -> WeightCount:
        dense = self.dense.num_weights(hidden_size, rows)
        routed = self.experts.num_weights(hidden_size, rows)
        return WeightCount(dense.read + routed.read, dense.used + routed.used)

    def cases(self, where: Where, norms: Norms, hidden_size: int) -> Iterator[Case]:
        yield norm_case(hidden_size, where, torch.float32)  # the router's
        yield from self.dense.cases(where, norms, hidden_size)
        yield from self.experts.cases(where, norms, hidden_size)


class Beside:
    """norm(mlp(x)) + experts(stream)."""

    __slots__ = ("_after", "experts", "mlp")

    def __init__(
        self, builder: LayerBuilder, layer: str, hidden: int, config: BesideConfig, norms: Norms
    ) -> None:
        self.mlp = config.dense.load(builder, layer, norms, hidden)
        self.experts = StreamExperts(builder, layer, hidden, norms, config.experts)
        self._after = builder.norm(f"{layer}.post_feedforward_layernorm_1", hidden, norms.eps, norms.offset)

    def __call__(self, x_TH: Tensor, stream_TH: Tensor) -> Tensor:
        return self._after(self.mlp(x_TH)) + self.experts(stream_TH)

    def partial_sums(self, x_TH: Tensor, stream_TH: Tensor) -> Tensor:
        """Always a full sum: both outputs are added here."""
        return self(x_TH, stream_TH)


class StreamExperts:
    """The experts: stream [T, H] -> normed output [T, H], which is added to the MLP's."""

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

    def __init__(
        self, builder: LayerBuilder, layer: str, hidden: int, norms: Norms, config: ExpertsConfig
    ) -> None:
        """layer: prefix of the layer's tensors."""
        builder = replace(builder, kind=DENSE)  # as in `ExpertsConfig.load`
        eps = norms.eps
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
        self._experts = Experts(builder, f"{layer}.experts", hidden, config)

    def __call__(self, stream_TH: Tensor) -> Tensor:
        scores_TE = self._router(self._router_norm(stream_TH))
        experts_TK, weights_TK = self._route(scores_TE, None, self._routing)
        weights_TK = weights_TK * self._scale_E[experts_TK]
        return self._after(self._experts(self._before(stream_TH), experts_TK, weights_TK))
