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
    """Hidden states of the target that are passed to the drafter. Id i is the stream that enters layer i; num_layers is
    the last layer's output before the final norm. `final`: also the state after the final norm, passed last."""

    layers: tuple[int, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnEmbeddings:
    """A drafter's own encoder for a prompt's images. `encode`: an image's tensors from the target's processor ->
    [N, X], see `attention.given`; `num_bytes`: size of its weights; `is_whole`: an image's rows attend to each other
    where the target's do; `windows_only`: they do so only in layers with windows."""

    encode: Callable[[Mapping[str, Tensor]], Tensor]
    hidden_size: int
    added: Added = NOTHING_ADDED
    num_bytes: int = 0
    is_whole: bool = False
    windows_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """What a method needs, as data. The engine decides by this alone, never by the method's name."""

    taps: Taps = field(default_factory=Taps)
    kv: tuple[PagedKV, ...] = ()  # own layers, on the target's block table
    states: tuple[StateSpec, ...] = ()  # states per slot of own layers; a user's class must be trusted
    attention: tuple[AttentionShape, ...] = ()  # of own layers, each kind once; empty: not known
    # indices of the target's caches that are read in place; in `DraftRuntime.cache` they follow the own layers
    borrow: tuple[int, ...] = ()
    reads_ahead: int = 0  # K/V at position p depend on tokens up to p + reads_ahead
    lookahead: int = 0  # positions past the verified rows that a pass writes to, if more than K
    host_tokens: bool = False  # reads Verified.history: on a GPU the engine then waits for the device
    takes_embeddings: bool = False  # its rows carry embeddings where the target's do; else those rows' tokens
    # its own image encoder, at most one (a chain: its members'); empty: the target's embeddings are used
    embeds: tuple[OwnEmbeddings, ...] = ()
    # ends a proposal before the first draft that does not pay at `DraftRuntime.price`
    estimates: bool = False
    stops: bool = False  # and makes no drafts beyond the end of a proposal
    # proposes nothing itself: the engine drafts the tokens that a request's grammar forces
    forced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The outcome of one target pass over R requests, prefill chunks included. Read-only.

    Example, two requests, K = 2: request 0 verified [s5 d6 d7] at positions 5..7 and kept s5, d6 (live 2, next r7 at
    position 7); request 1 is a chunk of its prompt, 4 rows at 0..3, all live, next = its prompt token 4, k = 0:
    tokens_T = s5 d6 d7 x0 x1 x2 x3, query_start_loc_R1 = 0 3 7, live_R = 2 4, next_R = r7 x4, k_R = 2 0.
    """

    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64
    query_start_loc_R1: Tensor  # int64: request r's rows are [r] to [r + 1] - 1
    slots_R: Tensor  # int64
    live_R: Tensor  # int64: rows that survived; later rows are padding
    next_R: Tensor  # int64: the token that follows the last live row
    k_R: Tensor  # int64: drafts wanted; 0: only update the drafter's state
    taps: tuple[Tensor, ...]  # [T, H] each, as declared
    draw: Draw
    # request -> its known tokens including the next: int32, on the host; only for drafters that declare host_tokens
    history: Callable[[int], Tensor]
    repeats: bool = False  # passes with this number of rows recur, so graphs of them pay
    given: GivenRows | None = None  # embeddings that some positions carry in place of tokens

    @property
    def num_requests(self) -> int:
        return len(self.slots_R)

    @property
    def pass_of_rows(self) -> PassOfRows:
        """The pass in the form that updates per-slot states."""
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

    A chain adds drafter_R, the member that drafted, and broken_R: bit i is set where member i's drafts were cut at an
    invalid token id.
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
    """Size of a round: `num_drafts` for each of `requests`, after `rows` verified rows at `context` tokens.

    `itemsize`: bytes of a cached element.
    """

    requests: int
    rows: int
    context: int
    num_drafts: int
    itemsize: int = 2


class KnownTokens(NamedTuple):
    """Every slot's prompt and output including the token of the last pass, int32 [S, L], and the number of known tokens
    per row, int64 [S]."""

    tokens_SL: Tensor
    length_S: Tensor

    def on_host(self, slots_R: Tensor) -> tuple[KnownTokens, Tensor]:
        """Tokens on the host, and the row of each of these slots there. On a GPU it waits for the device."""
        if self.tokens_SL.device.type == "cpu":
            return self, slots_R
        length_R = self.length_S.index_select(0, slots_R).cpu()
        most = int(length_R.max()) if len(length_R) else 0
        tokens_RL = self.tokens_SL[:, :most].index_select(0, slots_R).cpu()
        return KnownTokens(tokens_RL, length_R), torch.arange(len(slots_R))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRuntime:
    """What the engine passes to a drafter at start: operators, and caches on the target's block table, the drafter's
    own layers first, then the borrowed ones. `host_looks`: reading a value on the host is free, since there is no
    device to wait for. `known`: every slot's tokens, read-only; None for a user's class and outside an engine.
    `price`: fp32 [4], `RowPrice` of the next pass: `others` tokens, `rows` rows. Draft j, counted from 0, pays if its
    survival probability is at least (others + 1 + the sum of those before it) / (rows + j), the tokens per row without
    it; with 0 rows each draft pays. And what is to be expected of drafts that are not made yet, see `Stopping`. It
    changes from pass to pass. None: estimates are not used.
    `turns`: positions on the target's axes, for rotary embeddings with several axes."""

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
        """Whether rotary positions of this step's rows need more than the state kept per slot."""
        return self.turns is not None and self.turns.window is not None

    def attention(self, rows: Rows) -> PagedAttention:
        if self.turns is not None:
            rows.turns = self.turns
        return PagedAttention(self.ops, self.backend, self.cache, rows)


class Drafter:
    """Level 1: anything that proposes drafts. A user's class need not inherit from it and needs only `spec` and
    `propose`; the package's own drafters inherit."""

    spec: DraftSpec

    def bind(self, runtime: DraftRuntime) -> None:
        """Called at start (twice on a GPU) with the caches that `spec.kv`, `spec.states` and `spec.borrow` declare."""

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        """Called when a request takes a slot; `num_cached` of its tokens come from cached pages."""

    def restrict(self, slot: int, members: Sequence[int]) -> None:
        """Called after `admit` if a request names members of a chain: only these propose for it."""

    def limit_models(self, slots: Sequence[int], num_drafts: int | None, *, are_shown: bool) -> Drafter:
        """Called before a pass over these slots if this is a chain of lookups and others: members that run a model make
        at most `num_drafts` drafts for a request, None: no limit. Not `are_shown`: they do not see the pass, and are
        not asked for these requests again. Returns the drafter to ask in this pass: this one, or the only member that
        may propose, whose drafts count as the first drafter's."""
        return self

    def release(self, slot: int) -> None:
        """Called when a request leaves its slot, finished or preempted."""

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """Update the state and propose up to k_R drafts per request. num_drafts >= max(k_R), may be 0: no drafts."""
        raise NotImplementedError

    def cost(self, size: RoundSize) -> Cost | None:
        """Lower bound of what a round reads and computes; zero for a drafter without weights. None: unknown."""
        return Cost()


def is_lookup(drafter: Drafter) -> bool:
    """Whether the drafter finds drafts in known tokens alone: it reads no weights and keeps no keys."""
    size = RoundSize(requests=1, rows=1, context=1, num_drafts=1)
    return not drafter.spec.kv and drafter.cost(size) == Cost()


def name_of(drafter: Drafter) -> str:
    """The drafter's name in messages: its own `name`, else its class."""
    return str(getattr(drafter, "name", type(drafter).__name__))
