"""The interface between the engine and a draft method: declared needs, and `propose`.

Shapes: S slots, L positions, R requests, T flat target rows, N draft rows, K draft slots, M rows that are sampled,
V columns of logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.attention.exactness import AttentionShape
from draftproof.attention.given import NOTHING_ADDED, Added, GivenRows
from draftproof.attention.turns import Turns
from draftproof.cache.pool import PagedCache, PagedKV
from draftproof.cache.states import PassOfRows, StateSpec
from draftproof.kernels.ops import Ops
from draftproof.models.cost import Cost
from draftproof.runtime.graphs import Graphs
from draftproof.sampling.sampler import Draw as Draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Target states kept for the drafter. Id i = the stream entering layer i; num_layers = the last layer's output
    before the final norm. `final`: the state after the final norm, given last."""

    layers: tuple[int, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnEmbeddings:
    """What a drafter makes of a prompt's images by itself. `encode`: an image's tensors, as the target's processor
    gives them -> [N, X], see `attention.given`; `num_bytes`: of its weights; `is_whole`: an image's rows see each other
    where the target's do, `windows_only`: in layers with windows alone."""

    encode: Callable[[Mapping[str, Tensor]], Tensor]
    hidden_size: int
    added: Added = NOTHING_ADDED
    num_bytes: int = 0
    is_whole: bool = False
    windows_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """The needs of a method, as data: all that the engine reads of a drafter."""

    taps: Taps = field(default_factory=Taps)
    kv: tuple[PagedKV, ...] = ()  # own layers, on the target's block table
    states: tuple[StateSpec, ...] = ()  # what own layers keep of slots; a user's class must be trusted
    attention: tuple[AttentionShape, ...] = ()  # of own layers, each kind once; none: nobody says
    borrow: tuple[
        int, ...
    ] = ()  # indices of the target's caches that are read in place: they follow the own ones
    reads_ahead: int = 0  # K/V at position p depend on tokens up to p + reads_ahead
    lookahead: int = 0  # positions past the verified rows that a pass writes to, where they are more than K
    host_tokens: bool = False  # reads Verified.history: on a GPU the engine then waits for the device
    takes_embeddings: bool = False  # its rows carry embeddings where the target's do; else those rows' tokens
    embeds: tuple[
        OwnEmbeddings, ...
    ] = ()  # they are its own, one at most (a chain: its members'); none: the target's
    estimates: bool = (
        False  # ends a proposal before the first draft that is likely to survive less than the price
    )
    forced: bool = (
        False  # proposes nothing itself: the engine does, what a request's grammar leaves no choice about
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The outcome of one target pass over R requests, prefill chunks included. Read-only.

    Example, two requests, K = 2: request 0 verified [s5 d6 d7] at positions 5..7 and kept s5, d6 (live 2, next r7 at
    position 7); request 1 is a chunk of its prompt, 4 rows at 0..3, all live, next = its prompt token 4, k = 0:
    tokens_T = s5 d6 d7 x0 x1 x2 x3, query_start_loc_R1 = 0 3 7, live_R = 2 4, next_R = r7 x4, k_R = 2 0.
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64
    query_start_loc_R1: Tensor  # int64: request r's rows are from [r] up to, not with, [r + 1]
    slots_R: Tensor  # int64
    live_R: Tensor  # int64: rows that survived; later rows are padding
    next_R: Tensor  # int64: the token that follows the last live row
    k_R: Tensor  # int64: drafts wanted; 0 = keep state in step only
    taps: tuple[Tensor, ...]  # [T, H] each, as declared
    draw: Draw
    # request -> its known tokens, the next included: int32, on the host. For drafters that declare host_tokens
    history: Callable[[int], Tensor]
    repeats: bool = False  # passes of this many rows come again: worth running as graphs
    given: GivenRows | None = None  # embeddings that some of the positions carry in place of tokens

    @property
    def num_requests(self) -> int:
        return len(self.slots_R)

    @property
    def pass_of_rows(self) -> PassOfRows:
        """The pass as what keeps states of slots reads it."""
        return PassOfRows.of(
            self.slots_R, self.query_start_loc_R1, self.positions_T, self.live_R, self.tokens_T
        )

    @property
    def cu_R1(self) -> Tensor:  # noqa: N802
        """The old name of `query_start_loc_R1`, for one version."""
        warnings.warn("Verified.cu_R1: is query_start_loc_R1 now", DeprecationWarning, stacklevel=2)
        return self.query_start_loc_R1


@dataclass(slots=True)
class Proposal:
    """Draft tokens: request r's are tokens_RK[r, :count_R[r]]; the engine trims to k_R.

    A chain's says more: drafter_R, the member that drafted, and broken_R, bit i of which is set where member i's drafts
    were cut at an id that is none.
    """

    tokens_RK: Tensor  # int64
    count_R: Tensor  # int64
    drafter_R: Tensor | None = None  # int64
    broken_R: Tensor | None = None  # int64


def no_proposal(verified: Verified) -> Proposal:
    """A proposal of no drafts for any request."""
    k_R = verified.k_R
    return Proposal(k_R.new_zeros((len(k_R), 0)), torch.zeros_like(k_R))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSize:
    """How much a round drafts: for each of `requests`, after `rows` verified rows at `context` tokens.

    `itemsize`: bytes of a number in the cache.
    """

    requests: int
    rows: int
    context: int
    num_drafts: int
    itemsize: int = 2


class KnownTokens(NamedTuple):
    """Every slot's prompt and output, the token that the last pass gave included: int32 [S, L], and how many of a row
    are known: int64 [S]."""

    tokens_SL: Tensor
    length_S: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRuntime:
    """What the engine lends a drafter at start: operators, and caches on the target's block table, the drafter's own
    layers first, then the borrowed ones. `host_looks`: reading a value on the host costs nothing, since there is no
    device to wait for. `known`: every slot's tokens, only to be read; None for a user's class, and outside an engine.
    `price`: fp32 [1], the tokens that a row of the next pass must bring, so that verifying a draft that is less likely
    to survive costs more than it gives; changes from pass to pass. None: no estimate is of use.
    `turns`: where rows stand on the target's axes, for layers that turn by several."""

    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    graphs: Graphs
    host_looks: bool = False
    known: KnownTokens | None = None
    price: Tensor | None = None
    turns: Turns | None = None

    @property
    def has_window(self) -> bool:
        """Whether rows of this step turn by more than what slots hold."""
        return self.turns is not None and self.turns.window is not None

    def attention(self, rows: Rows) -> PagedAttention:
        if self.turns is not None:
            rows.turns = self.turns
        return PagedAttention(self.ops, self.backend, self.cache, rows)


class Drafter:
    """Level 1: anything that proposes. A user's class need not inherit from it, and may leave out all but `spec` and
    `propose`; the package's own drafters do inherit."""

    spec: DraftSpec

    def bind(self, runtime: DraftRuntime) -> None:
        """Called at start, on a GPU twice, with the caches that `spec.kv`, `spec.states` and `spec.borrow` declare."""

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        """Called when a request takes a slot; `num_cached` of its tokens come from cached pages."""

    def restrict(self, slot: int, members: Sequence[int]) -> None:
        """Called after `admit` where a request names members of a chain: only these propose for it."""

    def release(self, slot: int) -> None:
        """Called when a request leaves its slot, finished or preempted."""

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """num_drafts = max(k_R), may be 0: state is kept in step and nothing is proposed."""
        raise NotImplementedError

    def cost(self, size: RoundSize) -> Cost | None:
        """What a round reads and computes at least; nothing, for a drafter without weights. None: nobody knows."""
        return Cost()


def name_of(drafter: Drafter) -> str:
    """The drafter's name in messages: its own `name`, else its class."""
    return str(getattr(drafter, "name", type(drafter).__name__))
