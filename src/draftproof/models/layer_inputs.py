"""Per-layer inputs, which some models add to the stream: computed from a pass's tokens and their embeddings.

Shapes: T rows, H hidden size, L layers, S size of a layer's own input, X = L * S.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.models.builder import LayerBuilder, rounded
from draftproof.models.spec import LayerFn, LayerSpec


class TakesInput(Protocol):
    """A layer with its own input."""

    def __call__(
        self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention, input_TS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class LayerInput:
    """The term that a layer adds from its own input: norm(project(gelu(gate(stream)) * input))."""

    __slots__ = ("_concat", "_gate", "_gelu_mul", "_norm", "_project")

    def __init__(self, builder: LayerBuilder, prefix: str, layer: LayerSpec, hidden: int) -> None:
        size, norms = layer.input_size, layer.norms
        self._gelu_mul = builder.ops.gelu_mul
        self._concat = builder.ops.concat
        self._gate = builder.linear(f"{prefix}.per_layer_input_gate", hidden, size)
        self._project = builder.linear(f"{prefix}.per_layer_projection", size, hidden)
        self._norm = builder.norm(f"{prefix}.post_per_layer_input_norm", hidden, norms.eps, norms.offset)

    def __call__(self, stream_TH: Tensor, input_TS: Tensor) -> Tensor:
        gated_TS = self._gelu_mul(self._concat((self._gate(stream_TH), input_TS)))
        return self._norm(self._project(gated_TS))


class LayerInputs:
    """Computes all layers' own inputs of a pass."""

    __slots__ = ("_gather", "_hidden", "_layers", "_norm", "_project", "_scale", "_size", "_table_VX")

    def __init__(
        self,
        builder: LayerBuilder,
        root: str,
        layer: LayerSpec,
        sizes: tuple[int, int],
        layers: Sequence[TakesInput],
    ) -> None:
        """layer: any, all are alike; sizes: vocabulary and hidden size; layers: those that take the inputs."""
        vocab, hidden = sizes
        size, norms = layer.input_size, layer.norms
        width = size * len(layers)
        self._gather = builder.ops.gather
        self._layers = layers
        self._size = size
        self._hidden = hidden
        self._table_VX = builder.tensor(f"{root}embed_tokens_per_layer.weight", (vocab, width))
        self._project = builder.linear(f"{root}per_layer_model_projection", hidden, width)
        self._norm = builder.norm(f"{root}per_layer_projection_norm", size, norms.eps, norms.offset)
        self._scale = rounded(size**0.5, builder.dtype)

    def __call__(self, tokens_T: Tensor, embedded_TH: Tensor) -> list[LayerFn]:
        """The layers, each bound to its input."""
        size = self._size
        num_layers = len(self._layers)
        known_TX = self._gather(self._table_VX, tokens_T) * self._scale
        seen_TX = self._project(embedded_TH) * self._hidden**-0.5
        seen_TX = self._norm(seen_TX.view(-1, size)).view(len(tokens_T), -1)
        inputs_TLS = ((seen_TX + known_TX) * 2.0**-0.5).view(-1, num_layers, size)
        return [partial(layer, input_TS=inputs_TLS[:, i]) for i, layer in enumerate(self._layers)]
