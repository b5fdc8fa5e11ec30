"""Unrolls a head in one pass: mask rows after the newest token, and a draft from each row that is read.

Shapes: R requests, T target rows, N draft rows, J rows read per request (row 0: the newest token's or last context
row), K drafts, H hidden, F feature width, V columns of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from draftproof.attention.base import BlockRows, PagedAttention, Rows
from draftproof.attention.given import GivenEmbeddings
from draftproof.drafters.base import DraftRuntime, Draw, RoundSize, Verified
from draftproof.drafters.head import Buffers, DraftHead, HeadLayout, PassSize, Unroll, draft_rows
from draftproof.kernels.rows import Gather
from draftproof.kernels.step.spec import DraftRows
from draftproof.models.cost import Cost

DrawSlot = Callable[[int, Tensor], Tensor]  # k, logits_RV -> tokens_R: the k-th draft of each request


@dataclass(frozen=True, slots=True)
class Block:
    """Results of a pass over blocks. Draft k is read from row `first + k`."""

    hidden_JRH: Tensor
    logits_KRV: Tensor  # fp32
    first: int
    anchor_R: Tensor  # the newest token
    before_R: Tensor  # the one before it
    ids_V: Tensor | None  # target id of each column of the logits
    gather: Gather
    price: Tensor | None = None  # `DraftRuntime.price`


class Decode(Protocol):
    """A rule that chooses a block's tokens when drafts depend on earlier drafts: returns (K tensors of R tokens, number
    of drafts to keep per request or None for all). Drawing a draft again replaces it."""

    def __call__(self, block: Block, draw: DrawSlot) -> tuple[list[Tensor], Tensor | None]: ...

    def cost(self, num_requests: int, num_drafts: int) -> Cost:
        """Lower bound of what choosing `num_drafts` tokens for each of `num_requests` reads and computes."""
        ...


class BlockHead(DraftHead, Protocol):
    """A head whose layers keep keys and values of target states instead of their own."""

    def remember(self, features_TF: Tensor, attn: PagedAttention) -> None:
        """Store every layer's keys and values of context rows."""
        ...


class _Fed(NamedTuple):
    """The rows of a pass, fields as in `kernels.step.DraftRows`."""

    tokens_N: Tensor
    source_N: Tensor
    positions_N: Tensor
    context_lens_N: Tensor
    slots_N: Tensor


class _Read(NamedTuple):
    drawn_KR: Tensor
    anchor_R: Tensor
    before_R: Tensor


class _OwnBlock(NamedTuple):
    """The rows of a block, for heads that are fed it after storing its context."""

    tokens_N: Tensor
    positions_N: Tensor
    context_lens_N: Tensor
    slots_N: Tensor
    block_ends_N: Tensor
    read_JR: Tensor


class Parallel(Unroll):
    """One pass for all drafts. `block`: the head if it caches target states (its layout has no context)."""

    def __init__(self, head: DraftHead, block: BlockHead | None = None, decode: Decode | None = None) -> None:
        self._head = head
        self._block = block
        self._decode = decode
        self._first = 0 if head.layout.anchor_predicts else 1
        self.num_read = 1 + head.layout.masks
        self.most_drafts = self.num_read - self._first
        self._context = HeadLayout(context="all").kernels(1)

    def inputs(self, runtime: DraftRuntime, verified: Verified, fed: DraftRows) -> Buffers:
        read_JR = fed.read_RJ.t().contiguous()
        if self._block is None:
            rows = _Fed(fed.tokens_N, fed.source_N, fed.positions_N, fed.context_lens_N, fed.slots_N)
            next_R = verified.next_R
            return Buffers(feed=rows, read_M=read_JR.view(-1), draft=_Read(fed.drawn_KR, next_R, next_R))
        if not len(fed.drawn_KR):
            return Buffers(feed=(fed.positions_N, fed.slots_N), read_M=None, draft=())
        context = draft_rows(runtime, self._context, verified, 0)
        before_R = verified.tokens_T[context.read_RJ[:, 0]]
        ends_RJ = fed.context_lens_N.view(-1, self.num_read)
        block_ends_N = ends_RJ[:, -1:].expand_as(ends_RJ).contiguous().view(-1)
        block = _OwnBlock(
            fed.tokens_N, fed.positions_N, fed.context_lens_N, fed.slots_N, block_ends_N, read_JR
        )
        return Buffers(
            feed=(context.positions_N, context.slots_N),
            read_M=None,
            draft=(*_Read(fed.drawn_KR, verified.next_R, before_R), *block),
        )

    def feed(
        self,
        runtime: DraftRuntime,
        given: tuple[Tensor, ...],
        taps: tuple[Tensor, ...],
        carried: GivenEmbeddings | None = None,
    ) -> tuple[Tensor, ...]:
        """As in `Unroll`; a head that caches target states returns nothing."""
        features_TF = self._head.features(taps)
        if self._block is not None:
            assert features_TF is not None
            positions_T, slots_T = given
            self._block.remember(features_TF, runtime.attention(Rows(positions_T, slots_T, positions_T)))
            return ()
        i = _Fed(*given)
        features_NF = None if features_TF is None else runtime.ops.gather(features_TF, i.source_N)
        whole = None if carried is None else carried.whole
        rows = Rows(i.positions_N, i.slots_N, i.context_lens_N, given=carried, whole=whole)
        attn = runtime.attention(rows)
        return (self._head(i.tokens_N, features_NF, attn)[0],)

    def draft(
        self, runtime: DraftRuntime, read: tuple[Tensor, ...], given: tuple[Tensor, ...], draw: Draw
    ) -> tuple[Tensor, ...]:
        i, own = _Read(*given[:3]), given[3:]
        read_MH = self._block_states(runtime, _OwnBlock(*own)) if own else read[0]
        return self._chosen(read_MH.view(self.num_read, len(i.anchor_R), -1), i, draw, runtime)

    def _block_states(self, runtime: DraftRuntime, i: _OwnBlock) -> Tensor:
        """The states of a block's rows, in reading order."""
        block = BlockRows(i.block_ends_N, i.read_JR)
        rows = Rows(i.positions_N, i.slots_N, i.context_lens_N, block, max_query_len=self.num_read)
        hidden_NH, _ = self._head(i.tokens_N, None, runtime.attention(rows))
        return runtime.ops.gather(hidden_NH, i.read_JR.view(-1))

    def _chosen(self, hidden_JRH: Tensor, i: _Read, draw: Draw, runtime: DraftRuntime) -> tuple[Tensor, ...]:
        """The drafts. Rows are ordered by draft, then request, so each draft's logits are contiguous."""
        num, first, ids_V = len(i.drawn_KR), self._first, self._head.ids_V
        _, R, hidden = hidden_JRH.shape
        logits = self._head.logits(hidden_JRH[first : first + num].view(num * R, hidden))
        logits_KRV = logits.view(num, R, -1)

        def slot(k: int, logits_RV: Tensor) -> Tensor:
            return draw(logits_RV, None, i.drawn_KR[k], ids_V)

        if self._decode is None:
            return tuple(slot(k, logits_KRV[k]) for k in range(num))
        given = Block(
            hidden_JRH, logits_KRV, first, i.anchor_R, i.before_R, ids_V, runtime.ops.gather, runtime.price
        )
        tokens, count_R = self._decode(given, slot)
        return (*tokens, *(() if count_R is None else (count_R,)))

    def passes(self, size: RoundSize, fed: int) -> list[PassSize]:
        """One pass; without drafts a block is not fed, only target states are stored."""
        fed = 0 if self._block is not None and not size.num_drafts else fed
        return [
            PassSize(
                requests=size.requests,
                fused=size.rows,
                fed=fed,
                read=size.num_drafts,
                context=size.context,
                itemsize=size.itemsize,
            )
        ]

    def choice_cost(self, size: RoundSize) -> Cost:
        if self._decode is None or not size.num_drafts:
            return Cost()
        return self._decode.cost(size.requests, size.num_drafts)
