"""The pieces of a decoder, target's or draft head's: norm, attention, MLP, and the layer made of them.

Shapes: T rows, H hidden size, X whatever width a piece is given, N outputs of a product, D head size, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.kernels.linear import LinearPlanner, PackedLinear
from draftproof.kernels.ops import Ops
from draftproof.models.config import ModelConfig
from draftproof.models.loading import WeightSource
from draftproof.models.mla import LatentAttention
from draftproof.models.moe import MoE

Linear = Callable[[Tensor], Tensor]  # [T, X] -> [T, N]


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Makes the pieces of a model from its weights. `exact` None: as the planner does; drafters pass False, and `fp8`
    where the weights of their products are to be rounded to it."""

    weights: WeightSource
    ops: Ops
    planner: LinearPlanner
    device: torch.device
    dtype: torch.dtype
    exact: bool | None = None
    fp8: bool = False

    def reading(self, weights: WeightSource) -> LayerBuilder:
        """A builder from other weights, otherwise like this one."""
        return replace(self, weights=weights)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of the weights, on the device and in the model's dtype."""
        return self.place(self.weights.get(name, shape))

    def place(self, stored: Tensor) -> Tensor:
        """A copy of `stored` in the model's dtype: what was read may be a view of a mapped file, and not aligned."""
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
        """The product with one weight, or with several one below the other; names without ".weight"."""
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

    def norm(self, name: str, size: int, eps: float) -> Norm:
        return Norm.load(self, name, size, eps)

    def pack(
        self,
        weight_NX: Tensor,
        bias_N: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        *,
        kept: bool = False,
    ) -> PackedLinear:
        """The product with a weight that `tensor` read. `kept`: the caller has another use for the weight."""
        made = self.planner.pack(weight_NX, bias_N, out_dtype=out_dtype, exact=self.exact, fp8=self.fp8)
        if self.fp8:
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

    @classmethod
    def load(cls, builder: LayerBuilder, name: str, size: int, eps: float) -> Norm:
        """name: without ".weight"."""
        return cls(builder.tensor(f"{name}.weight", (size,)), eps, builder.ops)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._rms_norm(x_TH, self.weight_H, self.eps)

    def add(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); x_TH as a product's `partial_sums` gives it."""
        return self._add_rms_norm(x_TH, residual_TH, self.weight_H, self.eps)


class Attention:
    """Attention of one layer over the paged cache; q, k and v come from one product."""

    __slots__ = ("index", "out", "qkv", "spec")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        config: ModelConfig,
        cos_sin_PD: Tensor,
        index: int,
        window: int = 0,
        input_size: int | None = None,
    ) -> None:
        """index: the layer's place in its model's cache; input_size: width of the input where it is not H."""
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        dim = config.head_dim
        self.index = index
        self.qkv = builder.linear(
            [f"{prefix}.{part}_proj" for part in "qkv"],
            input_size or config.hidden_size,
            [heads * dim, kv_heads * dim, kv_heads * dim],
            bias=config.qkv_bias,
        )
        self.out = builder.linear(f"{prefix}.o_proj", heads * dim, config.hidden_size, bias=config.o_bias)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=window,
            eps=config.norm_eps,
            cos_sin_PD=cos_sin_PD,
            q_norm_D=builder.tensor(f"{prefix}.q_norm.weight", (dim,)) if config.qk_norm else None,
            k_norm_D=builder.tensor(f"{prefix}.k_norm.weight", (dim,)) if config.qk_norm else None,
        )

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """x_TX [T, input_size], already normed -> [T, H]."""
        return self.out(attn(self.index, self.qkv(x_TX), self.spec))

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        return self.out.partial_sums(attn(self.index, self.qkv(x_TX), self.spec))


class MLP:
    """silu(gate(x)) * up(x), or gelu's, gate and up in one product, then down."""

    __slots__ = ("_gate_mul", "down", "gate_up")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        config: ModelConfig,
        width: int | None = None,
        *,
        gelu: bool = False,
    ) -> None:
        """width: the intermediate size, where it is not the config's."""
        hidden = config.hidden_size
        inner = width or config.intermediate_size
        self._gate_mul = builder.ops.gelu_mul if gelu else builder.ops.silu_mul
        self.gate_up = builder.linear(
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"], hidden, [inner, inner], bias=config.mlp_bias
        )
        self.down = builder.linear(f"{prefix}.down_proj", inner, hidden, bias=config.mlp_bias)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self.down(self._gate_mul(self.gate_up(x_TH)))

    def partial_sums(self, x_TH: Tensor) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        return self.down.partial_sums(self._gate_mul(self.gate_up(x_TH)))


def feed_forward(builder: LayerBuilder, prefix: str, config: ModelConfig, index: int) -> MLP | MoE:
    """The MLP or the experts of layer `index`, whose tensors begin with `prefix`."""
    moe = config.moe
    if moe is None or index in moe.dense_layers:
        return MLP(builder, f"{prefix}.mlp", config)
    shared = (
        MLP(builder, f"{prefix}.mlp.shared_experts", config, moe.shared_width) if moe.shared_width else None
    )
    # Experts' weights are products of another kind, and the router's few choose among them: neither is rounded to fp8.
    return MoE(replace(builder, fp8=False), prefix, config.hidden_size, moe, shared)


class DecoderLayer:
    """Attention and MLP with the norm between them.

    The stream before and after the layer is given in two halves, so that every addition is fused with the norm that
    follows it: the caller norms the stream (`input_norm`), and adds what the layer returns with the next norm's `add`.
    """

    __slots__ = ("attention", "input_norm", "mlp", "post_norm")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        config: ModelConfig,
        cos_sin_PD: Tensor,
        index: int,
        window: int = 0,
        input_size: int | None = None,
        input_norm: bool = True,
    ) -> None:
        """input_norm False: the layer has none of its own (EAGLE-1's). See `Attention` for the other arguments."""
        hidden = config.hidden_size
        eps = config.norm_eps
        self.input_norm = Norm.load(builder, f"{prefix}.input_layernorm", hidden, eps) if input_norm else None
        kind = Attention if config.mla is None else LatentAttention
        self.attention = kind(builder, f"{prefix}.self_attn", config, cos_sin_PD, index, window, input_size)
        self.post_norm = Norm.load(builder, f"{prefix}.post_attention_layernorm", hidden, eps)
        self.mlp = feed_forward(builder, prefix, config, index)

    def __call__(self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention) -> tuple[Tensor, Tensor]:
        """x_TX: the normed input; residual_TH: the stream it was made from. Returns (MLP's output, perhaps as
        partial sums; stream between attention and MLP), whose sum is the stream after the layer."""
        x_TH, residual_TH = self.post_norm.add(self.attention.partial_sums(x_TX, attn), residual_TH)
        return self.mlp.partial_sums(x_TH), residual_TH


class Layer(Protocol):
    """`DecoderLayer`, or one with something around it."""

    @property
    def input_norm(self) -> Norm | None: ...

    def __call__(self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention) -> tuple[Tensor, Tensor]: ...


def run_layers(
    layers: Sequence[Layer], x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention
) -> tuple[Tensor, Tensor]:
    """Run all layers in turn; the first is given its input already normed. Returns the last one's result."""
    x_TH, residual_TH = layers[0](x_TX, residual_TH, attn)
    for layer in layers[1:]:
        assert layer.input_norm is not None
        x_TH, residual_TH = layer.input_norm.add(x_TH, residual_TH)
        x_TH, residual_TH = layer(x_TH, residual_TH, attn)
    return x_TH, residual_TH
