"""Lower bound of what a pass reads and computes: bytes and floating-point operations, from a model's config.

Counted: every weight of a product read once, keys and values of the context read once per request, two operations per
weight and row, four per key, head dimension and row in attention. Not counted: activations, logits written, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.matmul.linear import PackedLinear
from draftproof.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes read and operations computed."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.bytes * times, self.flops * times)


def products(elements: int, rows: int, itemsize: int = 2) -> Cost:
    """Products of `elements` weights with `rows` rows; zero without rows."""
    return Cost(elements * itemsize, 2.0 * elements * rows) if rows else Cost()


def linear(packed: PackedLinear, rows: int) -> Cost:
    """One product, with its weights as stored in memory."""
    return products(packed.in_features * packed.out_features, rows, packed.weight_itemsize)


def layers_products(
    config: ModelConfig, rows: int, itemsize: int = 2, first_input: int | None = None
) -> Cost:
    """All layers' products. first_input: input width of the first layer's mixer, if not the hidden size."""
    hidden = config.hidden_size
    found = Cost()
    for i, layer in enumerate(config.layers):
        inputs = hidden if i or first_input is None else first_input
        # a layer's own input: its projection, gate, and output
        own = layer.mixer.num_weights(inputs, hidden) + 3 * hidden * layer.input_size
        ffn = layer.ffn.num_weights(hidden, rows)
        if rows:
            found += Cost((own + ffn.read) * itemsize, 2.0 * (own + ffn.used) * rows)
    return found


def attention(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Cost:
    """All layers' attention of `rows` rows for each of `requests` at `context`, limited by windows."""
    found = Cost()
    for layer in config.layers:
        shape = layer.mixer.shape
        if shape is not None:
            kept = (1 if shape.shared else 2) * shape.num_kv_heads * shape.head_dim
            seen = requests * (min(context, shape.window) if shape.window else context)
            found += Cost(kept * itemsize * seen, 4.0 * rows * shape.num_heads * shape.head_dim * seen)
    return found


def target_pass(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Cost:
    """`rows` rows for each of `requests`, logits of all of them. `itemsize`: bytes of a weight or a cached number."""
    head = products(config.vocab_size * config.hidden_size, requests * rows, itemsize)
    layers = layers_products(config, requests * rows, itemsize)
    return layers + head + attention(config, requests, rows, context, itemsize)


def prompt_pass(config: ModelConfig, rows: int, itemsize: int = 2) -> Cost:
    """A whole prompt, with logits of its last row; a row sees half of the prompt on average."""
    head = products(config.vocab_size * config.hidden_size, 1, itemsize)
    return (
        layers_products(config, rows, itemsize) + head + attention(config, 1, rows, (rows + 1) // 2, itemsize)
    )
