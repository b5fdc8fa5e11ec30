"""Builds the parts of a decoder from its weights: tensors, products and norms.

Shapes: T rows, H hidden size, X width of a part's input, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftproof.kernels.ops import Ops
from draftproof.matmul.linear import LinearPlanner, PackedLinear
from draftproof.matmul.spec import DENSE
from draftproof.matmul.weights import KINDS
from draftproof.models.weights import WeightSource

Linear = Callable[[Tensor], Tensor]  # [T, X] -> [T, N]


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Builds the parts of a model from its weights. `exact` None: the planner's setting; drafters pass False. `kind`:
    how the weights of products are stored, see `kernels.weights`."""

    weights: WeightSource
    ops: Ops
    planner: LinearPlanner
    device: torch.device
    dtype: torch.dtype
    exact: bool | None = None
    kind: str = DENSE

    def reading(self, weights: WeightSource) -> LayerBuilder:
        """A builder from other weights, otherwise like this one."""
        return replace(self, weights=weights)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of the weights, on the device and in the model's dtype."""
        return self.place(self.weights.get(name, shape))

    def place(self, stored: Tensor) -> Tensor:
        """A copy of `stored` in the model's dtype: the tensor read may be an unaligned view of a mapped file."""
        placed = stored.to(device=self.device, dtype=self.dtype, copy=True)
        self.planner.weight_bytes += placed.nbytes
        return placed

    def linear(
        self,
        names: str | Sequence[str],
        in_size: int,
        out_sizes: int | Sequence[int],
        *,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> PackedLinear:
        """The product with one weight, or with several stacked along the outputs; names without ".weight"."""
        names = [names] if isinstance(names, str) else names
        out_sizes = [out_sizes] if isinstance(out_sizes, int) else out_sizes
        weights = [
            self.tensor(f"{name}.weight", (size, in_size))
            for name, size in zip(names, out_sizes, strict=True)
        ]
        biases = [
            self.tensor(f"{name}.bias", (size,)) for name, size in zip(names, out_sizes, strict=True) if bias
        ]
        return self.pack(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            torch.cat(biases) if biases else None,
            out_dtype,
        )

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> Norm:
        """An RMS norm; name: without ".weight"; `offset`: see `norm_weight`."""
        return Norm(self.norm_weight(name, size, offset), eps, self.ops)

    def norm_weight(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """The weight of a norm. `offset` is added to it, in fp32: half precision would round the sum."""
        weight = self.tensor(f"{name}.weight", (size,))
        return weight.float() + offset if offset else weight

    def pack(
        self,
        weight_NX: Tensor,
        bias_N: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        kept: bool = False,
    ) -> PackedLinear:
        """The product with a weight that `tensor` read. `kept`: the caller keeps using the weight."""
        weight = KINDS[self.kind].store(weight_NX)
        made = self.planner.pack(weight, bias_N, out_dtype=out_dtype, exact=self.exact, kept=kept)
        if self.kind != DENSE:
            freed = 0 if kept else weight_NX.nbytes
            self.planner.weight_bytes += made.weight_itemsize * weight_NX.numel() - freed
        return made


class Norm:
    """RMS norm, alone or fused with the addition before it."""

    __slots__ = ("_add_rms_norm", "_rms_norm", "eps", "weight_H")

    def __init__(self, weight_H: Tensor, eps: float, ops: Ops) -> None:
        self.weight_H = weight_H
        self.eps = eps
        self._rms_norm = ops.rms_norm
        self._add_rms_norm = ops.add_rms_norm

    @staticmethod
    def load(builder: LayerBuilder, name: str, size: int, eps: float) -> Norm:
        """A norm from the builder's weights; name: without ".weight"."""
        return builder.norm(name, size, eps)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._rms_norm(x_TH, self.weight_H, self.eps)

    def add(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); x_TH may be the result of a product's `partial_sums`."""
        return self._add_rms_norm(x_TH, residual_TH, self.weight_H, self.eps)


def rounded(scale: float, dtype: torch.dtype) -> float:
    """`scale` rounded to the dtype, as in training."""
    return float(torch.tensor(scale, dtype=dtype))
