"""The least a pass can take: the bytes and the arithmetic that its model's config implies, on a machine's datasheet.

Counted: every weight of a product read once, keys and values of the context read once a request, two operations a
weight and row, four a key, head dimension and row in attention. Not counted: activations, logits written, sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftproof.models.config import ModelConfig
from draftproof.models.gemma_config import GemmaConfig
from draftproof.models.mla import MlaConfig


@dataclass(frozen=True)
class Peaks:
    """Of a device, in 16-bit arithmetic: what its memory delivers and what its matrix units sustain, a second."""

    bytes: float
    flops: float


H200 = Peaks(4.8e12, 790e12)
BYTES_PER_SECOND, FLOPS_PER_SECOND = H200.bytes, H200.flops
# Bytes from datasheets; H100 has H200's chip, A100's units sustain the same share of their 312 TFLOP/s.
KNOWN = {
    "H200": H200,
    "H100 80GB HBM3": Peaks(3.35e12, 790e12),
    "A100-SXM4-80GB": Peaks(2.04e12, 250e12),
    "A100-SXM4-40GB": Peaks(1.56e12, 250e12),
}


def peaks_of(device_name: str) -> Peaks | None:
    """Of the GPU that calls itself so; None where nobody has written them down."""
    return next((peaks for name, peaks in KNOWN.items() if name in device_name), None)


@dataclass(frozen=True)
class Work:
    """Of one pass."""

    bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    @property
    def seconds(self) -> float:
        """On an H200, which the tables in docs/ are of."""
        return self.seconds_on(H200)

    def seconds_on(self, peaks: Peaks) -> float:
        """The least it can take there: its bytes or its arithmetic, whichever takes longer."""
        return max(self.bytes / peaks.bytes, self.flops / peaks.flops)


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
    """Of latent attention: what makes queries and the cached vector, products of heads with it, the output."""
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


def layers_products(config: ModelConfig, rows: int, itemsize: int = 2) -> Work:
    """All layers' products. Of a layer's experts, those are read that so many rows choose if they choose evenly."""
    moe = config.moe
    dense = products(config.num_layers * layer_elements(config), rows, itemsize)
    if moe is None:
        return dense
    count = len(set(range(config.num_layers)) - moe.dense_layers)
    shared = config.hidden_size * (3 * moe.shared_width + moe.num_experts - 3 * config.intermediate_size)
    expert, top_k = 3 * config.hidden_size * moe.width, moe.routing.top_k
    read = moe.num_experts * (1 - (1 - top_k / moe.num_experts) ** rows)
    routed = Work(read * expert * itemsize, 2.0 * top_k * expert * rows)
    return sum([products(shared, rows, itemsize) + routed] * count, start=dense)


def products(elements: int, rows: int, itemsize: int = 2) -> Work:
    """Products of so many weights with `rows` rows."""
    return Work(elements * itemsize, 2.0 * elements * rows)


def attention(config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2) -> Work:
    """All layers' attention of `rows` rows for each of `requests` at `context`; windows see no more than they hold."""
    if config.gemma is not None:
        shapes = [(2 * x.num_kv_heads * x.head_dim, x.head_dim, x.window) for x in config.gemma.layers]
    elif config.mla is not None:
        shapes = [(config.mla.cached_dim, config.mla.cached_dim, window) for window in config.windows]
    else:
        kept = 2 * config.num_kv_heads * config.head_dim
        shapes = [(kept, config.head_dim, window) for window in config.windows]
    found = Work(0, 0)
    for kept, dim, window in shapes:
        seen = requests * (min(context, window) if window else context)
        found += Work(kept * itemsize * seen, 4.0 * rows * config.num_heads * dim * seen)
    return found


def target_pass(
    config: ModelConfig, requests: int, rows: int, context: int, itemsize: int = 2, weight: int | None = None
) -> Work:
    """`rows` rows for each of `requests`, logits of all of them. `weight`: bytes of one; None: `itemsize`."""
    weight = weight or itemsize
    head = products(config.vocab_size * config.hidden_size, requests * rows, weight)
    layers = layers_products(config, requests * rows, weight)
    return layers + head + attention(config, requests, rows, context, itemsize)


def prompt_pass(config: ModelConfig, rows: int, itemsize: int = 2) -> Work:
    """A prompt from its start, logits of its last row; a row sees those before it, half of them on average."""
    head = products(config.vocab_size * config.hidden_size, 1, itemsize)
    return (
        layers_products(config, rows, itemsize) + head + attention(config, 1, rows, (rows + 1) // 2, itemsize)
    )


def draft_pass(
    layers: ModelConfig, draft_vocab_size: int, num_taps: int, requests: int, rows: int, context: int, drafts: int,
    itemsize: int = 2, weight: int | None = None,
) -> Work:  # fmt: skip
    """An EAGLE-3 head: `rows` rows a request through fusion and layers, then one row for each further draft.

    Its first layer reads twice the hidden size; logits are made of one row a request and draft. `weight`: bytes of one;
    None: `itemsize`.
    """
    hidden, weight = layers.hidden_size, weight or itemsize
    own = (layers.num_layers - 1) * layer_elements(layers) + layer_elements(layers, 2 * hidden)
    head = products(draft_vocab_size * hidden, requests, weight)
    found = products(num_taps * hidden * hidden, requests * rows, weight)
    for step in range(drafts):
        fed = rows if step == 0 else 1
        found += products(own, requests * fed, weight) + head
        found += attention(layers, requests, fed, context, itemsize)
    return found


def draft_pass_of(
    drafter: Any, requests: int, rows: int, context: int, drafts: int, itemsize: int = 2
) -> Work | None:
    """Of one round of a drafter as an engine holds it: an EAGLE-3 head, a draft model, or one that replay runs.

    No work for drafters that compute nothing; None for those whose work nobody has counted.
    """
    drafter = getattr(drafter, "_inner", drafter)
    head: Any = getattr(drafter, "head", None)
    if head is None:
        return None if drafter is not None and drafter.spec.kv else Work(0, 0)
    if (settings := getattr(head, "_settings", None)) is not None:
        sizes = (settings.layers, settings.draft_vocab_size, len(head.spec.taps.layers))
        return draft_pass(*sizes, requests, rows, context, drafts, itemsize, _weight_itemsize(head._head))
    if (decoder := getattr(head, "_decoder", None)) is not None:
        each = [rows, *[1] * (drafts - 1)]
        weight = _weight_itemsize(decoder.head)
        passes = [target_pass(decoder.config, requests, n, context, itemsize, weight) for n in each]
        return sum(passes, start=Work(0, 0))
    return None


def _weight_itemsize(product: Any) -> int | None:
    """Bytes of a weight of a network's products, fewer than a cache's where a GPU keeps them in fp8."""
    return getattr(product, "weight_itemsize", None)
