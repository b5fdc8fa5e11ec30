"""Runs a draft network: feeds it the rows that its layout declares, unrolls it, samples its tokens.

Shapes: R requests, T target rows, N draft rows, M read rows, K drafts, F feature width, V columns of logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention, Rows
from draftproof.attention.given import GivenEmbeddings
from draftproof.drafters.base import (
    Drafter,
    DraftRuntime,
    DraftSpec,
    Draw,
    Proposal,
    RoundSize,
    Verified,
    no_proposal,
)
from draftproof.kernels.step.spec import DraftRows, Layout
from draftproof.kernels.stopping.record import StopRecord
from draftproof.models.cost import Cost
from draftproof.runtime.graphs import EAGER


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """Size of one pass of a head, per request: target states fused, rows fed, rows read (logits computed).
    `itemsize`: bytes of a cached element."""

    requests: int
    fused: int
    fed: int
    read: int
    context: int
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The rows that a head is fed after a target pass, and their tokens; `kernels.step.StepOps.draft_rows` has a worked
    example."""

    context: Literal["all", "last", "none"]
    shift: Literal[0, 1] = 0  # 1: the row at position p carries token p + 1 (EAGLE, MTP)
    anchor: bool = False  # append the newest token as a row of its own
    masks: int = 0  # then this many mask rows
    mask_token: int | None = None
    advance: Literal[0, 1] = 1  # 0: later rows keep the first one's position and context (borrowed keys)
    anchor_predicts: bool = True  # False: a block's first row has no draft of its own (DFlash)

    def num_rows(self, num_verified: int) -> int:
        """Rows fed for a request with `num_verified` verified rows."""
        context = {"all": num_verified, "last": 1, "none": 0}[self.context]
        return context + self.anchor + self.masks

    def kernels(self, num_read: int) -> Layout:
        """The layout in the kernels' form; num_read: rows read per request."""
        return Layout(
            context=("none", "last", "all").index(self.context),
            shift=self.shift,
            anchor=int(self.anchor),
            masks=self.masks,
            num_read=num_read,
            mask_token=self.mask_token or 0,
        )


class DraftHead(Protocol):
    """Level 2: a network that predicts the target's next tokens. `ids_V`: target id of each logits column; None: the
    same ids."""

    spec: DraftSpec
    layout: HeadLayout
    ids_V: Tensor | None

    def features(self, taps: tuple[Tensor, ...]) -> Tensor | None:
        """The tapped target states, fused: [T, F]; None where the head reads tokens only.

        A head whose mask rows have features returns those as an extra last row.
        """
        ...

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden_NH for `logits`, features of the next row or None)."""
        ...

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """The logits, fp32 [M, V]."""
        ...

    def cost(self, size: PassSize) -> Cost:
        """Lower bound of what a pass reads and computes. Never called on a user's head."""
        return Cost()


def __getattr__(name: str) -> Any:
    """`DraftMemory`: deprecated name of `DraftRuntime`, kept for one version."""
    if name != "DraftMemory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("DraftMemory: is DraftRuntime now", DeprecationWarning, stacklevel=2)
    return DraftRuntime


class Buffers(NamedTuple):
    """Inputs of a draft pass, apart from the taps and the sampler's inputs."""

    feed: tuple[Tensor, ...]
    read_M: Tensor | None  # rows of the result of `feed` that are passed to `draft`; None: all there are
    draft: tuple[Tensor, ...]


class Unroll(Protocol):
    """A scheme that gets drafts out of a head, in two parts: `feed`, sized by the verified rows, and `draft`, sized by
    the requests. Each is a function of buffers that can be recorded and replayed: no host reads, no data-dependent
    shapes. With prompts among the rows only the second recurs at the same size."""

    num_read: int  # rows read per request
    most_drafts: int
    stops: bool = False  # see `DraftSpec`

    def bind(self, runtime: DraftRuntime) -> None:
        """Called at start, before anything else."""
        return

    def admit(self, slot: int) -> None:
        """Called when a request takes a slot."""
        return

    def inputs(self, runtime: DraftRuntime, verified: Verified, fed: DraftRows) -> Buffers: ...

    def feed(
        self,
        runtime: DraftRuntime,
        given: tuple[Tensor, ...],
        taps: tuple[Tensor, ...],
        carried: GivenEmbeddings | None = None,
    ) -> tuple[Tensor, ...]:
        """Feed the rows to the head; returns states, among them those that `draft` reads, [N, ...] each. `carried`:
        embeddings that rows carry in place of their tokens'."""
        ...

    def draft(
        self, runtime: DraftRuntime, read: tuple[Tensor, ...], given: tuple[Tensor, ...], draw: Draw
    ) -> tuple[Tensor, ...]:
        """K tensors of R tokens, then optionally the number of drafts to use per request; `read`: [M, ...] each."""
        ...

    def passes(self, size: RoundSize, fed: int) -> list[PassSize]:
        """The head's passes in a round that begins with `fed` rows per request."""
        ...

    def choice_cost(self, size: RoundSize) -> Cost:
        """Cost of choosing tokens, in addition to the head's passes."""
        return Cost()


class HeadDrafter(Drafter):
    """The drafter around a head. Final: a method that does not fit implements `Drafter` itself. Its spec is the head's
    plus what follows from the head's layout."""

    def __init__(self, head: DraftHead, unroll: Unroll | None = None) -> None:
        self._layout_fed = layout = head.layout
        reads_ahead = max(head.spec.reads_ahead, layout.shift)
        lookahead = max(head.spec.lookahead, layout.anchor + layout.masks)
        self.head = head
        self.unroll = unroll or Recurrent(head)
        stops = self.unroll.stops
        self.spec = replace(
            head.spec,
            reads_ahead=reads_ahead,
            lookahead=lookahead,
            estimates=head.spec.estimates or stops,
            stops=stops,
        )
        self._fed = layout.kernels(self.unroll.num_read)
        # if nothing is drafted, rows only update the cache
        context = "all" if layout.context == "none" else layout.context
        self._layout_idle = HeadLayout(context=context, shift=layout.shift)
        self._idle = self._layout_idle.kernels(1)
        self.runtime: DraftRuntime | None = None

    def bind(self, runtime: DraftRuntime) -> None:
        self.runtime = runtime
        self.unroll.bind(runtime)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self.unroll.admit(slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """Feed the verified rows, then draft `num_drafts` tokens per request, or the head's maximum."""
        runtime = self.runtime
        unroll = self.unroll
        assert runtime is not None, "bind comes before propose"
        num = min(num_drafts, unroll.most_drafts)
        if not num and not self.spec.kv:
            return no_proposal(verified)
        num_requests = len(verified.slots_R)
        drawn = self._drawn(runtime, verified, num)
        tokens_RK = (
            runtime.ops.concat([drawn_R[:, None] for drawn_R in drawn[:num]])
            if num
            else verified.next_R.new_empty((num_requests, 0))
        )
        if self.spec.stops and len(drawn) > num:
            return Proposal(tokens_RK, drawn[num])  # at most as many as are wanted
        count_R = verified.k_R if num == num_drafts else verified.k_R.clamp(max=num)
        return Proposal(tokens_RK, torch.minimum(count_R, drawn[num]) if len(drawn) > num else count_R)

    def _carried(self, verified: Verified, fed: DraftRows) -> GivenEmbeddings | None:
        """Embeddings that fed rows carry in place of their tokens'; None without any, or if the head takes none."""
        if verified.given is None or not self.spec.takes_embeddings:
            return None
        is_fed_N = fed.positions_N >= 0
        tokens_at_N = torch.where(is_fed_N, fed.positions_N + self.head.layout.shift, -1)
        return verified.given.of(self.spec.embeds).at(fed.slots_N, tokens_at_N)

    def _drawn(self, runtime: DraftRuntime, verified: Verified, num: int) -> tuple[Tensor, ...]:
        """The result of `Unroll.draft`; empty if `num` is 0."""
        unroll, draw = self.unroll, verified.draw
        fed = draft_rows(runtime, self._fed if num else self._idle, verified, num)
        given = unroll.inputs(runtime, verified, fed)
        carried = self._carried(verified, fed)
        assert carried is None or not verified.repeats

        def feed(*buffers: Tensor) -> tuple[Tensor, ...]:
            split = len(given.feed)
            return unroll.feed(runtime, buffers[:split], buffers[split:], carried)

        key = (("feed", self), len(verified.tokens_T), len(given.feed[0]))
        graphs = runtime.graphs if verified.repeats else EAGER
        states = graphs.run(key, feed, (*given.feed, *verified.taps))
        if not num:
            return ()
        read = states
        if given.read_M is not None:
            read = tuple(runtime.ops.gather(x, given.read_M) for x in states)

        def draft(*buffers: Tensor) -> tuple[Tensor, ...]:
            first, last = len(read), len(read) + len(given.draft)
            own = buffers[first:last]
            return unroll.draft(runtime, buffers[:first], own, draw.over(buffers[last:]))

        key = (("draft", self), len(verified.slots_R), num)
        # not recordable: a draw without inputs depends on more than the buffers, as do positions in a step with images
        graphs = runtime.graphs if draw.inputs and not runtime.has_window else EAGER
        return graphs.run(key, draft, (*read, *given.draft, *draw.inputs))

    def cost(self, size: RoundSize) -> Cost:
        num = min(size.num_drafts, self.unroll.most_drafts)
        if not num and not self.spec.kv:
            return Cost()
        size, layout = replace(size, num_drafts=num), self._layout_fed if num else self._layout_idle
        passes = self.unroll.passes(size, layout.num_rows(size.rows))
        return sum(map(self.head.cost, passes), self.unroll.choice_cost(size))


def draft_rows(runtime: DraftRuntime, layout: Layout, verified: Verified, num_drafts: int) -> DraftRows:
    v = verified
    return runtime.ops.step.draft_rows(
        layout,
        v.query_start_loc_R1,
        v.tokens_T,
        v.positions_T,
        v.slots_R,
        v.live_R,
        v.next_R,
        v.k_R,
        num_drafts,
    )


class _Fed(NamedTuple):
    """The fields of `kernels.step.DraftRows` that describe the first pass."""

    tokens_N: Tensor
    source_N: Tensor
    positions_N: Tensor
    context_lens_N: Tensor
    slots_N: Tensor


class _Steps(NamedTuple):
    """Drafts wanted; positions of the drafts, and of the rows that they are read from."""

    slots_R: Tensor
    k_R: Tensor
    drawn_KR: Tensor
    positions_KR: Tensor
    context_lens_KR: Tensor


class _Stop:
    """Decides in one round, after each draft, whether there is a next one. Without a record there always is. See
    `Stopping`."""

    def __init__(self, runtime: DraftRuntime, record: StopRecord | None, steps: _Steps) -> None:
        self._runtime = runtime
        self._record = record
        self._steps = steps
        # number of drafts of each request, if it is decided here
        self.counts = () if record is None else (torch.empty_like(steps.k_R),)
        # there is no next one, as far as the host may look: not while a program is recorded
        self.is_seen = False

    def leaving_out(self, step: int) -> AbstractContextManager[None]:
        """A context for what draft `step` takes: left out where a recorded program is repeated, if there is none."""
        if self._record is None or not step:
            return nullcontext()
        return self._runtime.graphs.unless(self._record.is_over_1)

    def count(self, step: int, logits_RV: Tensor, drawn_R: Tensor) -> None:
        """Count this draft of each request whose proposal has not ended."""
        runtime, record, i = self._runtime, self._record, self._steps
        if record is None:
            return
        assert runtime.known is not None and runtime.price is not None
        runtime.ops.stopping(
            step,
            logits_RV,
            drawn_R,
            i.slots_R,
            i.k_R,
            *runtime.known,
            runtime.price,
            record,
            *self.counts,
        )
        self.is_seen = not runtime.graphs.is_recording and bool(record.is_over_1)


class Recurrent(Unroll):
    """One row per step. It carries the token drafted before; its position is the read row's + step, or unchanged.

    `leaves_rows`: the head can be given attention in which only the read rows attend, and then returns those: of a
    prompt's other rows it only stores keys and values. Recurring sizes are recorded with all rows, as the target's.

    Where it is known what a draft costs, `Ops.stopping` ends proposals that do not pay to go on with, by how sure the
    head is. Later drafts are then not made.
    """

    num_read = 1
    most_drafts = 1 << 30
    stops = True

    def __init__(self, head: DraftHead, *, leaves_rows: bool = False) -> None:
        self._head = head
        self._leaves_rows = leaves_rows
        self._record: StopRecord | None = None

    def bind(self, runtime: DraftRuntime) -> None:
        if runtime.price is not None and runtime.known is not None:
            self._record = StopRecord.empty(len(runtime.known.length_S))

    def admit(self, slot: int) -> None:
        if self._record is not None:
            self._record.close(slot)

    def inputs(self, runtime: DraftRuntime, verified: Verified, fed: DraftRows) -> Buffers:
        positions_KR = fed.positions_KR
        context_lens_KR = fed.context_lens_KR
        if not self._head.layout.advance:
            step_K1 = torch.arange(len(positions_KR), device=positions_KR.device)[:, None]
            positions_KR = (positions_KR - step_K1).clamp(min=-1)
            context_lens_KR = (context_lens_KR - step_K1).clamp(min=0)
        read_R = fed.read_RJ[:, 0].contiguous()
        rows = _Fed(fed.tokens_N, fed.source_N, fed.positions_N, fed.context_lens_N, fed.slots_N)
        draft = _Steps(verified.slots_R, verified.k_R, fed.drawn_KR, positions_KR, context_lens_KR)
        if self._leaves_rows and not verified.repeats and verified.given is None:
            return Buffers(feed=(*rows, read_R), read_M=None, draft=draft)
        return Buffers(feed=rows, read_M=read_R, draft=draft)

    def feed(
        self,
        runtime: DraftRuntime,
        given: tuple[Tensor, ...],
        taps: tuple[Tensor, ...],
        carried: GivenEmbeddings | None = None,
    ) -> tuple[Tensor, ...]:
        num_own = len(_Fed._fields)
        i, only = _Fed(*given[:num_own]), given[num_own:]
        features_TF = self._head.features(taps)
        features_NF = None if features_TF is None else runtime.ops.gather(features_TF, i.source_N)
        whole = None if carried is None else carried.whole
        rows = Rows(i.positions_N, i.slots_N, i.context_lens_N, given=carried, whole=whole)
        attn = runtime.attention(rows)
        if only:
            attn = attn.only(only[0])
        hidden_NH, feedback_NF = self._head(i.tokens_N, features_NF, attn)
        return (hidden_NH,) if feedback_NF is None else (hidden_NH, feedback_NF)

    def draft(
        self, runtime: DraftRuntime, read: tuple[Tensor, ...], given: tuple[Tensor, ...], draw: Draw
    ) -> tuple[Tensor, ...]:
        head, i = self._head, _Steps(*given)
        stop = _Stop(runtime, self._record, i)
        hidden_RH = read[0]
        feedback_RF = read[1] if len(read) > 1 else None
        drawn: list[Tensor] = []
        for step in range(len(i.drawn_KR)):
            if stop.is_seen:
                drawn.append(drawn[-1])  # nobody uses it
                continue
            with stop.leaving_out(step):
                if step:
                    attn = runtime.attention(
                        Rows(i.positions_KR[step], i.slots_R, i.context_lens_KR[step], max_query_len=1)
                    )
                    hidden_RH, feedback_RF = head(drawn[-1], feedback_RF, attn)
                logits_RV = head.logits(hidden_RH)
                drawn.append(draw(logits_RV, None, i.drawn_KR[step], head.ids_V))
                stop.count(step, logits_RV, drawn[-1])
        return (*drawn, *stop.counts)

    def passes(self, size: RoundSize, fed: int) -> list[PassSize]:
        common = {"requests": size.requests, "context": size.context, "itemsize": size.itemsize}
        first = PassSize(fused=size.rows, fed=fed, read=min(1, size.num_drafts), **common)
        return [first] + [PassSize(fused=0, fed=1, read=1, **common)] * (size.num_drafts - 1)
