"""A mixture of experts: each row goes through the few experts that its scores choose, and through the shared ones.

Shapes: T rows, E experts, K experts a row, P = T * K pairs of row and expert, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.kernels.certify import Shape
from draftproof.kernels.grouped import GroupedLinear
from draftproof.kernels.ops import GateMul
from draftproof.models.moe_config import MoEConfig

if TYPE_CHECKING:
    from draftproof.models.layers import LayerBuilder


class MoE:
    """Router, experts, and whatever every row goes through besides."""

    __slots__ = (
        "_bias_E",
        "_experts",
        "_route",
        "_router",
        "_routing",
    )

    def __init__(
        self,
        builder: LayerBuilder,
        layer: str,
        hidden: int,
        config: MoEConfig,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """layer: what the layer's tensors begin with; shared: as of `Experts`."""
        blocks = [f"{layer}.{name}" for name in config.blocks]
        block = next((name for name in blocks if f"{name}.gate.weight" in builder.weights), blocks[0])
        self._routing = config.routing
        self._route = builder.ops.experts.route
        self._router = builder.linear(f"{block}.gate", hidden, config.num_experts, out_dtype=torch.float32)
        self._bias_E = None
        if config.biased:  # never rounded: it decides which of two close experts is chosen
            name = f"{block}.gate.e_score_correction_bias"
            bias_E = builder.weights.get(name, (config.num_experts,), "finite")
            self._bias_E = bias_E.to(builder.device, torch.float32, copy=True)
        self._experts = Experts(builder, f"{block}.experts", hidden, config, builder.ops.silu_mul, shared)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H], already normed -> [T, H]."""
        experts_TK, weights_TK = self._route(self._router(x_TH), self._bias_E, self._routing)
        return self._experts(x_TH, experts_TK, weights_TK)

    def partial_sums(self, x_TH: Tensor) -> Tensor:
        """The output for `Norm.add`; it never is partial sums, since the experts' outputs are added here."""
        return self(x_TH)


class Experts:
    """The experts of one layer: each row goes through those chosen for it, and what they give is added up."""

    __slots__ = ("_down", "_gate_mul", "_gate_up", "_gather", "_num_experts", "_ops", "_shared")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        hidden: int,
        config: MoEConfig,
        gate_mul: GateMul,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """shared: [T, H] -> [T, H], added to the experts' sum."""
        self._ops = builder.ops.experts
        self._gather = builder.ops.gather
        self._gate_mul = gate_mul
        self._num_experts = config.num_experts
        self._shared = shared
        gate, up, down = config.parts
        weights = ExpertWeights(builder, prefix, config.num_experts)
        self._gate_up = weights.load((gate, up), "gate_up_proj", config.width, hidden)
        self._down = weights.load((down,), "down_proj", hidden, config.width, out_dtype=torch.float32)

    def __call__(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        source_P, place_TK, starts_E1 = self._ops.group(experts_TK, self._num_experts)
        inner_PI2 = self._gate_up(self._gather(x_TH, source_P), starts_E1)
        y_PH = self._down(self._gate_mul(inner_PI2), starts_E1)
        base_TH = None if self._shared is None else self._shared(x_TH)
        return self._ops.combine(y_PH, place_TK, weights_TK, base_TH, x_TH.dtype)


class ExpertWeights:
    """Reads experts' weights: a tensor for each part of each expert, as published, or all in one, as some are saved."""

    def __init__(self, builder: LayerBuilder, prefix: str, num_experts: int) -> None:
        self._builder = builder
        self._prefix = prefix
        self._num_experts = num_experts

    def load(
        self,
        parts: Sequence[str],
        packed: str,
        out_size: int,
        in_size: int,
        out_dtype: torch.dtype | None = None,
    ) -> GroupedLinear:
        """The product with `parts` one below the other, each of `out_size`; `packed`: what they are called together."""
        builder = self._builder
        rows = len(parts) * out_size
        shape = Shape(rows, in_size, builder.dtype, out_dtype or builder.dtype, False)

        def each() -> Iterator[Tensor]:
            for expert in range(self._num_experts):
                names = [f"{self._prefix}.{expert}.{part}.weight" for part in parts]
                found = [builder.tensor(name, (out_size, in_size)) for name in names]
                yield found[0] if len(found) == 1 else torch.cat(found)

        whole = f"{self._prefix}.{packed}"
        is_packed = f"{self._prefix}.0.{parts[0]}.weight" not in builder.weights and whole in builder.weights
        weights = builder.tensor(whole, (self._num_experts, rows, in_size)).unbind() if is_packed else each()
        return builder.planner.pack_experts(self._num_experts, weights, shape, exact=builder.exact)
