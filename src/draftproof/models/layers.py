"""A decoder's layers, target's or draft head's: a mixer and a feed-forward part with norms between them.

The stream before and after a layer is passed as two terms, so that every addition is fused with the norm after it: the
caller norms the stream (`input_norm`), and adds the two results of the layer with the next norm's `add`.
Shapes: T rows, H hidden size, X width of a part's input, S size of a layer's own input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.cache.pool import PagedKV
from draftproof.models.builder import LayerBuilder, Norm
from draftproof.models.config import ModelConfig
from draftproof.models.layer_inputs import LayerInput
from draftproof.models.rope import RopeConfig, cos_sin_table
from draftproof.models.spec import LayerSpec, Mixer, NormStyle, Place, RopeTables


class Layer(Protocol):
    """One layer, possibly wrapped."""

    @property
    def input_norm(self) -> Norm | None: ...

    def __call__(self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention) -> tuple[Tensor, Tensor]:
        """x_TX: the normed input; residual_TH: the stream it was made from. Returns two tensors whose sum is the stream
        after the layer; the first may be partial sums."""
        ...


class DecoderLayer:
    """A layer that norms before its mixer and before its feed-forward part."""

    __slots__ = ("ffn", "input_norm", "mixer", "post_norm")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        layer: LayerSpec,
        place: Place,
        *,
        input_norm: bool = True,
    ) -> None:
        """prefix: of the layer's tensors; input_norm False: the layer has none."""
        hidden, norms = place.hidden_size, layer.norms

        def norm(name: str) -> Norm:
            return builder.norm(f"{prefix}.{name}", hidden, norms.eps, norms.offset)

        self.input_norm = norm("input_layernorm") if input_norm else None
        self.mixer: Mixer = layer.mixer.load(builder, prefix, norms, place)
        self.post_norm = norm("post_attention_layernorm")
        self.ffn = layer.ffn.load(builder, prefix, norms, hidden)

    def __call__(self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention) -> tuple[Tensor, Tensor]:
        x_TH, residual_TH = self.post_norm.add(self.mixer.partial_sums(x_TX, attn), residual_TH)
        return self.ffn.partial_sums(x_TH, residual_TH), residual_TH


class SandwichLayer:
    """A layer with norms before and after its mixer and its feed-forward part. It may add a term computed from its own
    input, and scale its output."""

    __slots__ = (
        "_after_ffn",
        "_after_mixer",
        "_input",
        "_scalar",
        "ffn",
        "input_norm",
        "mixer",
        "post_norm",
    )

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        layer: LayerSpec,
        place: Place,
        *,
        input_norm: bool = True,
    ) -> None:
        """See `DecoderLayer`."""
        hidden, norms = place.hidden_size, layer.norms

        def norm(name: str) -> Norm:
            return builder.norm(f"{prefix}.{name}", hidden, norms.eps, norms.offset)

        self.input_norm = norm("input_layernorm") if input_norm else None
        self.mixer: Mixer = layer.mixer.load(builder, prefix, norms, place)
        self._after_mixer = norm("post_attention_layernorm")
        self.post_norm = norm("pre_feedforward_layernorm")
        self.ffn = layer.ffn.load(builder, prefix, norms, hidden)
        self._after_ffn = norm("post_feedforward_layernorm")
        self._input = LayerInput(builder, prefix, layer, hidden) if layer.input_size else None
        self._scalar = float(builder.tensor(f"{prefix}.layer_scalar", (1,))) if layer.scaled else 1.0

    def __call__(
        self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention, input_TS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer`. Sums and scalings are elementwise, so torch's operators are row-safe."""
        x_TH = self._after_mixer(self.mixer(x_TX, attn))
        x_TH, residual_TH = self.post_norm.add(x_TH, residual_TH)
        x_TH = self._after_ffn(self.ffn(x_TH, residual_TH))
        if self._input is not None:
            assert input_TS is not None
            residual_TH = x_TH + residual_TH
            x_TH = self._input(residual_TH, input_TS)
        if self._scalar != 1.0:
            x_TH = x_TH * self._scalar
            residual_TH = residual_TH * self._scalar
        return x_TH, residual_TH


_CLASSES: Mapping[NormStyle, type[DecoderLayer] | type[SandwichLayer]] = {
    "pre": DecoderLayer,
    "sandwich": SandwichLayer,
}


def load_layers(
    builder: LayerBuilder,
    prefix: str,
    config: ModelConfig,
    tables: RopeTables,
    *,
    first_cache: int = 0,
    first_input: int | None = None,
    first_norm: bool = True,
) -> list[DecoderLayer | SandwichLayer]:
    """All layers of a model; prefix: of the tensors of layer i, without i.

    first_cache: index of the model's first cache in a pass's cache. first_input: width of the first layer's input, if
    not the hidden size; first_norm False: the first layer has no input norm (EAGLE-1's).
    """
    hidden = config.hidden_size
    loaded = []
    num_states = 0
    for i, (layer, cache) in enumerate(zip(config.layers, config.cache_of_layer, strict=True)):
        place = Place(
            hidden_size=hidden,
            input_size=hidden if i or first_input is None else first_input,
            cache=first_cache + cache,
            tables=tables,
            state=num_states,
        )
        num_states += sum(not isinstance(kept, PagedKV) for kept in layer.mixer.caches)
        kind = _CLASSES[layer.norms.style]
        loaded.append(kind(builder, f"{prefix}{i}", layer, place, input_norm=first_norm or i > 0))
    return loaded


def rope_tables(config: ModelConfig, length: int, device: torch.device) -> dict[RopeConfig, Tensor]:
    """A table for each rotary embedding of the layers."""
    return {rope: cos_sin_table(rope, length, device) for rope in config.ropes}


def run_layers(
    layers: Sequence[Layer], x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention
) -> tuple[Tensor, Tensor]:
    """Run all layers in order; the first one's input is already normed. Returns the last layer's result. Where only
    some rows attend, there is one layer."""
    assert attn.only_M is None or len(layers) == 1
    x_TH, residual_TH = layers[0](x_TX, attn.attending(residual_TH), attn)
    for layer in layers[1:]:
        assert layer.input_norm is not None
        x_TH, residual_TH = layer.input_norm.add(x_TH, residual_TH)
        x_TH, residual_TH = layer(x_TH, residual_TH, attn)
    return x_TH, residual_TH
