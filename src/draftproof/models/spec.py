"""What a layer is made of, as data: a mixer over the rows of a request, a feed-forward part, and the norms around them.

Each kind of mixer or feed-forward part is one file: the data that a config is read into, and the module that is made of
it. `registry.py` has a row for each.
Shapes: T rows, H hidden size, X whatever width a piece is given, P positions, D rotated size.
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
    """Where a layer stands. `cache`: the index of the keys and values that it reads, among its model's; `input_size`:
    the width of its mixer's input; `state`: that of its first state."""

    hidden_size: int
    input_size: int
    cache: int
    tables: RopeTables
    state: int = 0


class WeightCount(NamedTuple):
    """Weights of products: those that a pass reads, and those that each of its rows is multiplied by."""

    read: float
    used: float


class Mixer(Protocol):
    """The part of a layer in which rows see those before them."""

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """x_TX [T, input_size], already normed -> [T, H]."""
        ...

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        ...


class MixerConfig(Protocol):
    """One layer's mixer as data; equal ones are equal."""

    @property
    def shape(self) -> AttentionShape | None:
        """What it asks of an attention backend; None: nothing."""
        ...

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What it keeps: of each token, in pages of one kind at most, none where it reads what another layer keeps; and
        of each slot, as many states as it likes."""
        ...

    @property
    def reads(self) -> int | None:
        """Index of the cache that it reads, where it has none of its own."""
        ...

    @property
    def leaves_rows(self) -> bool:
        """Whether its result for a row is made of what attention gives and of nothing else, so that fewer rows may
        attend than are stored (`PagedAttention.only`)."""
        ...

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings whose tables it wants."""
        ...

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of tensors' names, behind the layer's own, that files may hold and that nothing is made of."""
        ...

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> Mixer:
        """The module; prefix: what the layer's tensors begin with."""
        ...

    def num_weights(self, input_size: int, hidden_size: int) -> int:
        """Weights of its products."""
        ...

    def cases(self, where: Where, norms: Norms) -> Iterator[Case]:
        """The operators that it calls, with their shapes, less its products."""
        ...


class Ffn(Protocol):
    """The part of a layer that each row goes through alone."""

    def __call__(self, x_TH: Tensor, stream_TH: Tensor) -> Tensor:
        """x_TH: the normed rows; stream_TH: the stream that they were made from."""
        ...

    def partial_sums(self, x_TH: Tensor, stream_TH: Tensor) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        ...


class FfnConfig(Protocol):
    """One layer's feed-forward part as data; equal ones are equal."""

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, hidden_size: int) -> Ffn:
        """The module; prefix: what the layer's tensors begin with."""
        ...

    def num_weights(self, hidden_size: int, rows: int) -> WeightCount:
        """Weights of its products; of experts, those that so many rows choose if they choose evenly."""
        ...

    def cases(self, where: Where, norms: Norms, hidden_size: int) -> Iterator[Case]:
        """The operators that it calls, with their shapes, less its products."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `input_size` above 0: it adds a term made of an input of its own, of that size; `scaled`: what leaves
    it is multiplied by a number in the files. Both only where norms are a sandwich."""

    mixer: MixerConfig
    ffn: FfnConfig
    norms: Norms
    input_size: int = 0
    scaled: bool = False

    @property
    def window(self) -> int:
        """Positions that a row sees, 0: all before it."""
        return 0 if self.mixer.shape is None else self.mixer.shape.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a family's reader makes of a config: the layers, and constants around them. `logit_cap` 0: logits are not
    capped. `blank_id`: the token whose layers' inputs rows take that carry an embedding in place of a token's."""

    layers: tuple[LayerSpec, ...]
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    blank_id: int = 0
