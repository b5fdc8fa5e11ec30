"""What a pass must read and compute at least: bytes and floating-point operations, counted from a model's config.

Counted: every weight of a product read once, keys and values of the context read once a request, two operations a
weight and row, four a key, head dimension and row in attention. Not counted: activations, logits written, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.kernels.linear import PackedLinear
from draftproof.models.config import ModelConfig
from draftproof.models.gemma_config import GemmaConfig
from draftproof.models.mla import MlaConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes read and operations computed."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.bytes * times, self.flops * times)


def layer_elements(config: ModelConfig, inputs: int | None = None) -> int:
    """Weights of one dense layer's products. `inputs`: what its attention reads, if not the hidden size."""
    if config.gemma is not None:
        return gemma_elements(config, config.gemma) // config.num_layers
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = (inputs or hidden) * (heads + 2 * config.num_kv_heads * config.head_dim)
    own = (
        qkv + heads * hidden if config.mla is None else _latent_elements(config, config.mla, inputs or hidden)
    )
    return own + 3 * hidden * config.intermediate_size


def _latent_elements(config: ModelConfig, m: MlaConfig, inputs: int) -> int:
    """Weights of latent attention: what makes queries and the cached vector, products of heads with it, the output."""
    heads, query = config.num_heads, m.nope_dim + m.rope_dim
    queries = inputs * heads * query if m.q_rank is None else m.q_rank * (inputs + heads * query)
    return (
        queries + m.cached_dim * (inputs + heads * (query + m.v_dim)) + heads * m.v_dim * config.hidden_size
    )


def gemma_elements(config: ModelConfig, gemma: GemmaConfig) -> int:
    """Weights of all layers' products, where layers have shapes of their own."""
    hidden, heads, total = config.hidden_size, config.num_heads, 0
    for layer in gemma.layers:
        kv_heads = 2 * layer.num_kv_heads if layer.owns_cache else 0
        attention = (2 * heads + kv_heads) * layer.head_dim  # q, o, k and v
        # a layer's own input: made, let through, and added
        total += hidden * (attention + 3 * layer.intermediate_size + 3 * gemma.per_layer_size)
    return total


def products(elements: int, rows: int, itemsize: int = 2) -> Cost:
    """Products of so many weights with `rows` rows; nothing is read for no rows."""
    return Cost(elements * itemsize, 2.0 * elements * rows) if rows else Cost()


def linear(packed: PackedLinear, rows: int) -> Cost:
    """One product as it is in memory."""
    return products(packed.in_features * packed.out_features, rows, packed.weight_itemsize)


def layers_products(config: ModelConfig, rows: int, itemsize: int = 2) -> Cost:
    """All layers' products. Of a layer's experts, those are read that so many rows choose if they choose evenly."""
    moe = config.moe
    dense = products(config.num_layers * layer_elements(config), rows, itemsize)
    if moe is None:
        return dense
    count = len(set(range(config.num_layers)) - moe.dense_layers)
    shared = config.hidden_size * (3 * moe.shared_width + moe.num_experts - 3 * config.intermediate_size)
    expert, top_k = 3 * config.hidden_size * moe.width, moe.routing.top_k
    read = moe.num_experts * (1 - (1 - top_k / moe.num_experts) ** rows)
    routed = Cost(read * expert * itemsize, 2.0 * top_k * expert * rows)
    return dense + (products(shared, rows, itemsize) + routed) * count


def attention(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Cost:
    """All layers' attention of `rows` rows for each of `requests` at `context`; windows see no more than they hold."""
    if config.gemma is not None:
        shapes = [(2 * x.num_kv_heads * x.head_dim, x.head_dim, x.window) for x in config.gemma.layers]
    elif config.mla is not None:
        shapes = [(config.mla.cached_dim, config.mla.cached_dim, window) for window in config.windows]
    else:
        kept = 2 * config.num_kv_heads * config.head_dim
        shapes = [(kept, config.head_dim, window) for window in config.windows]
    found = Cost()
    for kept, dim, window in shapes:
        seen = requests * (min(context, window) if window else context)
        found += Cost(kept * itemsize * seen, 4.0 * rows * config.num_heads * dim * seen)
    return found


def target_pass(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Cost:
    """`rows` rows for each of `requests`, logits of all of them. `itemsize`: bytes of a weight or a cached number."""
    head = products(config.vocab_size * config.hidden_size, requests * rows, itemsize)
    layers = layers_products(config, requests * rows, itemsize)
    return layers + head + attention(config, requests, rows, context, itemsize)


def prompt_pass(config: ModelConfig, rows: int, itemsize: int = 2) -> Cost:
    """A prompt from its start, logits of its last row; a row sees those before it, half of them on average."""
    head = products(config.vocab_size * config.hidden_size, 1, itemsize)
    return (
        layers_products(config, rows, itemsize) + head + attention(config, 1, rows, (rows + 1) // 2, itemsize)
    )
