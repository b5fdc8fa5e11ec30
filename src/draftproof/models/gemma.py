"""The pieces that Gemma 3 and Gemma 4 text models are made of: sandwich norms, layers that read another layer's keys
and values, and inputs of each layer's own.

Shapes: T rows, H hidden size, L layers, P size of a layer's own input, D head size, X whatever width a piece is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.models.config import ModelConfig
from draftproof.models.gemma_config import GemmaConfig, GemmaLayerConfig
from draftproof.models.gemma_experts import GemmaExperts
from draftproof.models.layers import MLP, LayerBuilder, Norm
from draftproof.models.rope import RopeConfig, cos_sin_table

LayerFn = Callable[[Tensor, Tensor, PagedAttention], tuple[Tensor, Tensor]]
Tables = dict[RopeConfig, Tensor]


class GemmaAttention:
    """Attention of one layer; where it reads another layer's keys and values it has queries alone."""

    __slots__ = ("_attend", "_product", "index", "out", "spec")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        config: ModelConfig,
        layer: GemmaLayerConfig,
        table_PD: Tensor,
        window: int,
    ) -> None:
        gemma = _of(config)
        dim = layer.head_dim
        bias = config.qkv_bias
        heads = config.num_heads
        kv_heads = layer.num_kv_heads
        owns = layer.owns_cache
        self.index = layer.cache
        # where keys are values too, their product is computed twice: those layers are few, and rows have one layout
        names = ["q_proj", "k_proj", "k_proj" if layer.k_is_v else "v_proj"][: 3 if owns else 1]
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim][: len(names)]
        self._product = builder.linear(
            [f"{prefix}.{name}" for name in names], config.hidden_size, sizes, bias=bias
        )
        self._attend = PagedAttention.__call__ if owns else PagedAttention.query
        self.out = builder.linear(f"{prefix}.o_proj", heads * dim, config.hidden_size, bias=bias)
        q_norm_D = _weight(builder, f"{prefix}.q_norm", dim, gemma)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=gemma.attention_scale,
            window=window,
            eps=config.norm_eps,
            cos_sin_PD=table_PD,
            q_norm_D=q_norm_D,
            k_norm_D=_weight(builder, f"{prefix}.k_norm", dim, gemma) if owns else None,
            v_norm_D=torch.ones_like(q_norm_D) if owns and gemma.values_normed else None,
        )

    def __call__(self, x_TH: Tensor, attn: PagedAttention) -> Tensor:
        return self.out(self._attend(attn, self.index, self._product(x_TH), self.spec))


class LayerInput:
    """The term that a layer adds from its own input: norm(project(gelu(gate(stream)) * input))."""

    __slots__ = ("_concat", "_gate", "_gelu_mul", "_norm", "_project")

    def __init__(self, builder: LayerBuilder, prefix: str, config: ModelConfig) -> None:
        hidden = config.hidden_size
        size = _of(config).per_layer_size
        self._gelu_mul = builder.ops.gelu_mul
        self._concat = builder.ops.concat
        self._gate = builder.linear(f"{prefix}.per_layer_input_gate", hidden, size)
        self._project = builder.linear(f"{prefix}.per_layer_projection", size, hidden)
        self._norm = norm(builder, f"{prefix}.post_per_layer_input_norm", hidden, config)

    def __call__(self, stream_TH: Tensor, input_TP: Tensor) -> Tensor:
        gated_TP = self._gelu_mul(self._concat((self._gate(stream_TH), input_TP)))
        return self._norm(self._project(gated_TP))


class GemmaLayer:
    """A `Layer` with norms before and after attention and MLP. Gemma 4 may have experts beside the MLP, and scales what
    leaves it."""

    __slots__ = (
        "_after_attention",
        "_after_mlp",
        "_after_plain",
        "_experts",
        "_input",
        "_scalar",
        "attention",
        "input_norm",
        "mlp",
        "post_norm",
    )

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        config: ModelConfig,
        layer: GemmaLayerConfig,
        table_PD: Tensor,
        window: int | None = None,
    ) -> None:
        """window: replaces the layer's own."""
        gemma = _of(config)
        hidden = config.hidden_size
        self.input_norm: Norm | None = norm(builder, f"{prefix}.input_layernorm", hidden, config)
        self.attention = GemmaAttention(
            builder,
            f"{prefix}.self_attn",
            config,
            layer,
            table_PD,
            layer.window if window is None else window,
        )
        self._after_attention = norm(builder, f"{prefix}.post_attention_layernorm", hidden, config)
        self.post_norm = norm(builder, f"{prefix}.pre_feedforward_layernorm", hidden, config)
        self.mlp = MLP(builder, f"{prefix}.mlp", config, layer.intermediate_size, gelu=True)
        self._after_mlp = norm(builder, f"{prefix}.post_feedforward_layernorm", hidden, config)
        self._experts = self._after_plain = None
        if gemma.moe is not None:
            self._experts = GemmaExperts(builder, prefix, hidden, config.norm_eps, gemma.moe)
            self._after_plain = norm(builder, f"{prefix}.post_feedforward_layernorm_1", hidden, config)
        self._input = LayerInput(builder, prefix, config) if gemma.per_layer_size else None
        self._scalar = 1.0
        if gemma.layer_scalars:
            self._scalar = float(builder.tensor(f"{prefix}.layer_scalar", (1,)))

    def __call__(
        self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention, input_TP: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`. Sums and scalings are elementwise, so torch's own are row-safe."""
        x_TH = self._after_attention(self.attention(x_TX, attn))
        x_TH, residual_TH = self.post_norm.add(x_TH, residual_TH)
        x_TH = self.mlp(x_TH)
        if self._experts is not None and self._after_plain is not None:
            x_TH = self._after_plain(x_TH) + self._experts(residual_TH)
        x_TH = self._after_mlp(x_TH)
        if self._input is not None:
            assert input_TP is not None
            residual_TH = x_TH + residual_TH
            x_TH = self._input(residual_TH, input_TP)
        if self._scalar != 1.0:
            x_TH = x_TH * self._scalar
            residual_TH = residual_TH * self._scalar
        return x_TH, residual_TH


class LayerInputs:
    """Computes all layers' own inputs of a pass: from its tokens, and from their embeddings."""

    __slots__ = ("_gather", "_hidden", "_layers", "_norm", "_project", "_scale", "_size", "_table_VX")

    def __init__(
        self, builder: LayerBuilder, root: str, config: ModelConfig, layers: Sequence[GemmaLayer]
    ) -> None:
        size = _of(config).per_layer_size
        width = _of(config).per_layer_size * config.num_layers
        self._gather = builder.ops.gather
        self._layers = layers
        self._size = size
        self._hidden = config.hidden_size
        self._table_VX = builder.tensor(f"{root}embed_tokens_per_layer.weight", (config.vocab_size, width))
        self._project = builder.linear(f"{root}per_layer_model_projection", config.hidden_size, width)
        self._norm = norm(builder, f"{root}per_layer_projection_norm", size, config)
        self._scale = rounded(size**0.5, builder.dtype)

    def __call__(self, tokens_T: Tensor, embedded_TH: Tensor) -> list[LayerFn]:
        """The layers, each with its input given."""
        size = self._size
        num_layers = len(self._layers)
        known_TX = self._gather(self._table_VX, tokens_T) * self._scale
        seen_TX = self._project(embedded_TH) * self._hidden**-0.5
        seen_TX = self._norm(seen_TX.view(-1, size)).view(len(tokens_T), -1)
        inputs_TLP = ((seen_TX + known_TX) * 2.0**-0.5).view(-1, num_layers, size)
        return [partial(layer, input_TP=inputs_TLP[:, i]) for i, layer in enumerate(self._layers)]


def norm(builder: LayerBuilder, name: str, size: int, config: ModelConfig) -> Norm:
    """A norm whose stored weight may lack its 1; name: without ".weight"."""
    return Norm(_weight(builder, name, size, _of(config)), config.norm_eps, builder.ops)


def load_layers(builder: LayerBuilder, root: str, config: ModelConfig, tables: Tables) -> list[GemmaLayer]:
    """The layers of a target. ValueError for a model that has no keys and values of its own."""
    gemma = _of(config)
    if not any(layer.owns_cache for layer in gemma.layers):
        raise ValueError(
            f"num_kv_shared_layers={len(gemma.layers)} of as many layers: this model borrows all keys and values, so "
            "it only drafts for another; give it as speculative_config['model']"
        )
    return [
        GemmaLayer(builder, f"{root}layers.{i}", config, layer, tables[layer.rope])
        for i, layer in enumerate(gemma.layers)
    ]


def rope_tables(gemma: GemmaConfig, length: int, device: torch.device) -> Tables:
    """A table for each rotary embedding of the model."""
    return {rope: cos_sin_table(rope, length, device) for rope in {layer.rope for layer in gemma.layers}}


def rounded(scale: float, dtype: torch.dtype) -> float:
    """`scale` as the dtype holds it: models are trained with it rounded."""
    return float(torch.tensor(scale, dtype=dtype))


def _of(config: ModelConfig) -> GemmaConfig:
    assert config.gemma is not None
    return config.gemma


def _weight(builder: LayerBuilder, name: str, size: int, gemma: GemmaConfig) -> Tensor:
    """The weight of a norm, in fp32 where 1 is added to it: half precision would round the sum."""
    weight = builder.tensor(f"{name}.weight", (size,))
    return weight.float() + gemma.norm_offset if gemma.norm_offset else weight
