"""A layer as data: a mixer over the rows of a request, a feed-forward part, and the norms around them.

Each kind of mixer or feed-forward part is one file: the data that a config is read into, and the module built from it.
`registry.py` has a row for each.
Shapes: T rows, H hidden size, X width of a part's input, P positions, D rotated size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.attention.exactness import AttentionShape
from draftproof.cache.pool import CacheSpec
from draftproof.kernels.exactness import Case
from draftproof.models.builder import LayerBuilder
from draftproof.models.cases import Where
from draftproof.models.rope import RopeConfig

RopeTables = Mapping[RopeConfig, Tensor]  # cosines and sines [P, D] of each rotary embedding
LayerFn = Callable[[Tensor, Tensor, PagedAttention], tuple[Tensor, Tensor]]

# Where a layer's norms are:
#   pre       before the mixer and before the feed-forward part
#   sandwich  before and after each of them
NormStyle = Literal["pre", "sandwich"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The norms of a layer. `offset` is added to their stored weights, in fp32."""

    eps: float
    offset: float = 0.0
    style: NormStyle = "pre"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A layer's place in its model. `input_size`: width of its mixer's input; `cache`: index of the cache that it
    reads; `state`: index of its first state."""

    hidden_size: int
    input_size: int
    cache: int
    tables: RopeTables
    state: int = 0


class WeightCount(NamedTuple):
    """Numbers of weights: those that a pass reads, and those that each of its rows is multiplied with."""

    read: float
    used: float


class Mixer(Protocol):
    """The part of a layer in which rows attend to earlier rows."""

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """x_TX [T, input_size], already normed -> [T, H]."""
        ...

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        ...


class MixerConfig(Protocol):
    """One layer's mixer as data; compared by value."""

    @property
    def shape(self) -> AttentionShape | None:
        """Its attention shape; None: it uses no attention backend."""
        ...

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What it stores: at most one paged cache per token (none if it reads another layer's), and any number of
        states per slot."""
        ...

    @property
    def reads(self) -> int | None:
        """Index of the cache that it reads; None: its own."""
        ...

    @property
    def leaves_rows(self) -> bool:
        """Whether a row's output depends only on its attention result, so that fewer rows may attend than are stored
        (`PagedAttention.only`)."""
        ...

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings whose tables it needs."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of tensor names, after the layer's prefix, that files may contain and that are not used."""
        ...

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> Mixer:
        """The module; prefix: of the layer's tensors."""
        ...

    def num_weights(self, input_size: int, hidden_size: int) -> int:
        """Weights of its products."""
        ...

    def cases(self, where: Where, norms: Norms) -> Iterator[Case]:
        """The operators that it calls, with their shapes, less its products."""
        ...


class Ffn(Protocol):
    """The part of a layer that processes each row by itself."""

    def __call__(self, x_TH: Tensor, stream_TH: Tensor) -> Tensor:
        """x_TH: the normed rows; stream_TH: the stream before the norm."""
        ...

    def partial_sums(self, x_TH: Tensor, stream_TH: Tensor) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        ...


class FfnConfig(Protocol):
    """One layer's feed-forward part as data; compared by value."""

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, hidden_size: int) -> Ffn:
        """The module; prefix: of the layer's tensors."""
        ...

    def num_weights(self, hidden_size: int, rows: int) -> WeightCount:
        """Weights of its products; for experts, the expected number that `rows` rows choose if they choose evenly."""
        ...

    def cases(self, where: Where, norms: Norms, hidden_size: int) -> Iterator[Case]:
        """The operators that it calls, with their shapes, less its products."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `input_size` above 0: it adds a term computed from its own input of that size; `scaled`: its output is
    multiplied by a number in the files. Both only with sandwich norms."""

    mixer: MixerConfig
    ffn: FfnConfig
    norms: Norms
    input_size: int = 0
    scaled: bool = False

    @property
    def window(self) -> int:
        """Number of positions that a row attends to; 0: all before it."""
        return 0 if self.mixer.shape is None else self.mixer.shape.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A family reader's result: the layers, and the model's constants. `logit_cap` 0: logits are not capped.
    `blank_id`: the token whose per-layer inputs are used by rows that carry an embedding in place of a token's."""

    layers: tuple[LayerSpec, ...]
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    blank_id: int = 0
