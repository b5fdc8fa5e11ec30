"""The least a pass can take: the bytes and the arithmetic that its model's config implies, on a machine's datasheet.

Counted: every weight of a product read once, keys and values of the context read once a request, two operations a
weight and row, four a key, head dimension and row in attention. Not counted: activations, logits written, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.models.config import ModelConfig

BYTES_PER_SECOND = 4.8e12  # H200
FLOPS_PER_SECOND = 790e12  # H200, bf16, dense, what its matrix units sustain


@dataclass(frozen=True)
class Work:
    """Of one pass."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    @property
    def seconds(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)


def layer_elements(config: ModelConfig, inputs: int | None = None) -> int:
    """Weights of one layer's products. `inputs`: what its attention reads, if not the hidden size."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = (inputs or hidden) * (heads + 2 * config.num_kv_heads * config.head_dim)
    return qkv + heads * hidden + 3 * hidden * config.intermediate_size


def products(elements: int, rows: int, itemsize: int = 2) -> Work:
    """Products of so many weights with `rows` rows."""
    return Work(elements * itemsize, 2.0 * elements * rows)


def attention(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Work:
    """All layers' attention of `rows` rows for each of `requests` at `context`; windows see no more than they hold."""
    seen = sum(min(context, window) if window else context for window in config.windows)
    keys = 2 * config.num_kv_heads * config.head_dim * itemsize * seen
    return Work(requests * keys, 4.0 * requests * rows * config.num_heads * config.head_dim * seen)


def target_pass(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Work:
    """`rows` rows for each of `requests`, logits of all of them."""
    elements = config.num_layers * layer_elements(config) + config.vocab_size * config.hidden_size
    return products(elements, requests * rows, itemsize) + attention(
        config, requests, rows, context, itemsize
    )


def draft_pass(
    layers: ModelConfig, draft_vocab_size: int, num_taps: int, requests: int, rows: int, context: int, drafts: int
) -> Work:  # fmt: skip
    """An EAGLE-3 head in bf16: `rows` rows a request through fusion and layers, then one row for each further draft.

    Its first layer reads twice the hidden size; logits are made of one row a request and draft.
    """
    hidden = layers.hidden_size
    own = (layers.num_layers - 1) * layer_elements(layers) + layer_elements(layers, 2 * hidden)
    head = products(draft_vocab_size * hidden, requests)
    found = products(num_taps * hidden * hidden, requests * rows)
    for step in range(drafts):
        fed = rows if step == 0 else 1
        found += products(own, requests * fed) + attention(layers, requests, fed, context) + head
    return found
