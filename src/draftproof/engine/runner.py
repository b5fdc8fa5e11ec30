"""The device half of the engine: slots, caches, target, drafter, verifier and graphs. Runs the steps it is handed.

On a GPU a pass in which everybody decodes is one CUDA graph from its row numbers to its packed result, and the next
may be launched before the last has been read. Neither shows in what is computed.
Shapes: R requests of a pass, T its rows, M its sampled rows, W the most of one request, K drafts, X result columns.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.attention.given import GivenEmbeddings, WholeRows
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Taps, Verified
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.engine.costs import MAX_GRAPH_ROWS, levels_of, rounded_rows
from draftproof.engine.interface import (
    HEALTHY,
    NO_NUMBER,
    NONE_LEFT,
    DeviceFaultError,
    DrafterHealth,
    RowResult,
    ScheduledRequest,
    StepInput,
    StepSize,
)
from draftproof.engine.items import SlotItems, StepItems
from draftproof.engine.logprobs import LogprobScorer, Scores
from draftproof.engine.state import BatchShape, State
from draftproof.kernels.ops import Ops
from draftproof.models.decoder import Decoder
from draftproof.runtime.graphs import EAGER, Graphs, Key
from draftproof.runtime.threads import is_undisturbed, own_precision, threads
from draftproof.runtime.transfer import ArrivingRows, IntegerRows, device_seconds, upload
from draftproof.sampling import sampler
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.verifier import Verifier, VerifyResult

P = ParamSpec("P")
R = TypeVar("R")

MOST_PREPARED_BYTES = 1 << 26  # memory of programs, beyond which none is recorded before it is needed
PassOutputs = tuple[IntegerRows, Tensor, Tensor]  # result_RX, logits_MV, hidden_TH


@dataclass(frozen=True, slots=True)
class VerifiedPass:
    """A pass whose drafts have been verified."""

    verified: Verified
    result: VerifyResult
    draft_count_R: Tensor
    logits_MV: Tensor
    hidden_TH: Tensor


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step on its way to the host. `result`: one tensor, a row a request and perhaps more; columns: W tokens,
    emitted, drafted, proposed, broken (a bit a drafter), drafter. `faults`: drafters that raised."""

    runner: ModelRunner
    scheduled: Sequence[ScheduledRequest]
    result: ArrivingRows | None = None  # None: nothing was computed
    is_warming: bool = False
    output_scores: Scores | None = None
    prompt_scores: Scores | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_state_lost: bool = False
    undrafted_slots: tuple[int, ...] = ()
    faults: tuple[int, ...] = ()

    def wait(self) -> list[RowResult]:
        """The one place where results are read from the device."""
        if self.result is None:
            return []
        try:
            rows = self.result.wait()[: len(self.scheduled)]
            self.runner.count_bad_ids(
                [(s.slot, row[-2]) for s, row in zip(self.scheduled, rows, strict=True)]
            )
            results = [self._row(r, row) for r, row in enumerate(rows)]
        except torch.AcceleratorError as error:
            raise _device_fault(error) from error
        return results

    def _row(self, index: int, row: list[int]) -> RowResult:
        *tokens, num_emitted, num_drafted, num_proposed, broken, drafter = row
        token_ids, failure = tokens[:num_emitted], ""
        if token_ids and token_ids[-1] < 0:  # by law 1 only the last can be, since a draft never equals it
            failure = NONE_LEFT if token_ids.pop() == sampler.NONE_LEFT else NO_NUMBER
        result = RowResult(token_ids, num_drafted, num_proposed, drafter=drafter, failure=failure)
        result.drafter_faults = self.faults
        if broken:
            sandboxes, slot = self.runner.sandboxes, self.scheduled[index].slot
            wrong = [number for number in range(len(sandboxes)) if broken >> number & 1]
            result.drafter_faults += tuple(wrong)
            result.draft_state_lost = any(sandboxes[number].spec.kv for number in wrong)
            result.nobody_drafts = not any(s.drafts_for(slot) for s in sandboxes)
        if self.output_scores is not None:
            result.logprobs = self.output_scores.rows_of(index, token_ids)
        if self.prompt_scores is not None:
            result.prompt_logprobs = self.prompt_scores.rows_of(index, None)
        return result


def _verify_key(shape: BatchShape) -> Key:
    return "verify", shape.num_requests, shape.num_rows, shape.most_rows, shape.processing


def _target_key(shape: BatchShape, taps: Taps) -> Key:
    return "target", shape.num_rows, shape.most_rows, taps


def _device_fault(error: torch.AcceleratorError) -> DeviceFaultError:
    """What a GPU does not recover from; running out of memory is not among it."""
    first_line = str(error).strip().partition("\n")[0]
    return DeviceFaultError(f"the GPU failed ({first_line}); start a new process")


def _as_certified(method: Callable[P, R]) -> Callable[P, R]:
    """A method of ModelRunner that runs as certificates were made: at their number of threads, and in the dtypes that
    the model has, whatever a caller set for himself (`torch.autocast` would choose others). Buffers outlive the call,
    so they do not take on a caller's inference mode."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        runner = args[0]
        assert isinstance(runner, ModelRunner)
        if is_undisturbed(runner.num_threads):  # asking costs less than setting
            return method(*args, **kwargs)
        with torch.inference_mode(False), threads(runner.num_threads), own_precision():
            return method(*args, **kwargs)

    return run


@dataclass(kw_only=True)
class ModelRunner:
    """See `interface.Runner`; `build.build` puts it together."""

    target: Decoder
    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    draft_cache: PagedCache
    state: State
    table: SamplingTable
    verifier: Verifier
    drafter: Drafter | None  # its sandbox, or a chain of them
    sandboxes: tuple[DrafterSandbox, ...]
    spec: DraftSpec
    scorer: LogprobScorer
    items: SlotItems
    graphs: Graphs
    on_device: bool = True  # our drafter, a function of device memory alone: its pass may be recorded
    max_num_batched_tokens: int
    num_drafts: int  # the most that are asked for; 0 without a drafter
    drafter_names: tuple[str, ...] = ()  # one for each of `sandboxes`
    most_forced: int = 0  # drafts that the host may put in the place of others; counted for the last drafter
    levels: tuple[
        int, ...
    ] = ()  # numbers of drafts that captured steps are made for, ascending; 0: without drafter
    buckets: tuple[int, ...] = ()  # numbers of requests, ascending, that decoding passes are filled up to
    mixed_sizes: tuple[
        int, ...
    ] = ()  # numbers of rows, ascending, that passes with prompts are filled up to; larger ones run as they are
    drafter_may_rest: bool = True  # steps without drafts may be hidden from it
    async_depth: int = 0  # passes that may be in flight when a step ends
    price: Tensor | None = None  # lent to a drafter that estimates what its drafts are worth, where rows cost
    num_threads: int = 1  # that certificates were made with: torch's setting around each pass
    captured: set[BatchShape] = field(default_factory=set)  # full steps

    @property
    def vocab_size(self) -> int:
        return self.table.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.state.max_len

    @property
    def max_num_seqs(self) -> int:
        return self.state.scratch_slot

    @property
    def drafter_has_kv(self) -> bool:
        return bool(self.spec.kv)

    @property
    def drafter_estimates(self) -> bool:
        return self.price is not None

    def drafter_health(self) -> DrafterHealth:
        each = tuple(sandbox.num_faults for sandbox in self.sandboxes)
        if not any(each):
            return HEALTHY
        last_fault = next(s.last_fault for s in reversed(self.sandboxes) if s.num_faults)
        return DrafterHealth(all(s.off for s in self.sandboxes), sum(each), last_fault, each)

    def count_bad_ids(self, found: Sequence[tuple[int, int]]) -> None:
        """`found`: (slot, the drafters, a bit each, whose drafts for it had to be cut at an id that is none)."""
        if not any(broken for _, broken in found):
            return
        for number, sandbox in enumerate(self.sandboxes):
            slots = [slot for slot, broken in found if broken >> number & 1]
            if slots:
                sandbox.count_bad_ids(slots)

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        """See `interface.Runner`."""
        return self.state.tokens(slot, num_known, num_drafts)

    @_as_certified
    def run(self, step: StepInput) -> LaunchedStep:
        """Compute the step's rows, verify, commit, draft what is wanted."""
        try:
            self._place(step)
            if not step.scheduled:
                return LaunchedStep(runner=self, scheduled=())
            return self._launch(step)
        except torch.AcceleratorError as error:
            raise _device_fault(error) from error

    def _place(self, step: StepInput) -> None:
        """Slots that are given up, slots that are taken, new blocks."""
        for slot in step.released:
            self.state.release(slot)
            self.table.release(slot)
            if self.drafter is not None:
                self.drafter.release(slot)
            self.items.release(slot)
        states = self.cache.states + self.draft_cache.states
        for a in step.admitted:
            for state in states:
                state.admit(a.slot)
            self.state.admit(a.slot, a.token_ids, a.num_computed, a.limit)
            self.table.admit(
                a.slot, a.params, a.row_seed, a.num_prompt, a.stop_ids, a.bad_words_ids, is_masked=a.is_masked
            )
            if self.drafter is not None:
                self.drafter.admit(a.slot, list(a.token_ids), a.num_computed)
                if a.members:
                    self.drafter.restrict(a.slot, a.members)
            if a.items:
                self.items.admit(a.slot, a.items)
        for slot, position, drafts in step.forced:
            self.state.force(slot, position, drafts)
        if step.fresh_blocks and self.draft_cache.layers and not step.without_drafter:
            self.draft_cache.zero(upload(step.fresh_blocks, self.state.device))

    def _launch(self, step: StepInput) -> LaunchedStep:
        items = self.items.begin(step.scheduled)
        if items is not None:  # these rows are not a function of the slots' memory alone
            step = replace(step, all_decode=False)
        scheduled, shape = step.scheduled, self._padded(step)
        if self.price is not None:
            self.price.fill_(step.price)
        has_processing = self.table.has_processing(s.slot for s in scheduled)
        processing = self.table.generation if has_processing else 0
        full_graph = shape is not None and self._capture(shape, processing)
        if shape is None or (shape.num_rows > MAX_GRAPH_ROWS and not full_graph):
            repeats = not self.buckets and sum(s.num_rows for s in scheduled) <= MAX_GRAPH_ROWS
            repeats = repeats and items is None
            if step.all_decode and repeats and self.graphs is not EAGER:
                scheduled = self._rounded(scheduled)
            shape = BatchShape.of(scheduled, repeats=repeats, with_drafter=not step.without_drafter)
            if step.all_decode:
                shape = self._widened(shape)
            elif items is None:
                shape = self._filled_up(shape)
        else:
            num_rows = shape.most_sampled
            scheduled = [s._replace(num_rows=num_rows, num_sampled=num_rows) for s in scheduled]
        shape = replace(
            shape,
            processing=processing,
            only_sampled=items is None and self._leaves_rows(shape, scheduled),
        )
        scheduled_4R = self.state.load(scheduled, shape, step.table_entries)
        if step.masks:
            firsts = itertools.accumulate((s.num_sampled for s in scheduled), initial=0)
            self.table.load_masks([(at, mask) for at, mask in zip(firsts, step.masks, strict=False) if mask])
        launched = LaunchedStep(runner=self, scheduled=scheduled)
        num_warming = self.graphs.num_warming
        if full_graph:
            function = partial(self.step_tensors, shape)
            tensors = self.graphs.run(("step", shape), function, (scheduled_4R,))
        else:
            recorded = step.all_decode and shape.repeats and self.graphs.calls_once
            tensors = self._run_parts(launched, shape, scheduled_4R, items, recorded=recorded)
        launched.is_warming = self.graphs.num_warming > num_warming
        result_RX, logits_MV, hidden_TH = tensors
        launched.output_scores = self.scorer.outputs(scheduled, result_RX.tensor, logits_MV)
        launched.prompt_scores = self.scorer.prompts(scheduled, hidden_TH, self.state.slots.tokens_SL)
        launched.result = result_RX.download()
        return launched

    def _rounded(self, scheduled: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Rows that verify nothing beside those that are there, so that sizes come again. Drafting has the pages for
        them; beyond a request's limit they go to the scrap page."""
        num_rows = sum(s.num_rows for s in scheduled)
        missing = rounded_rows(len(scheduled), num_rows, self.num_drafts) - num_rows
        filled = []
        for s in scheduled:
            more = min(missing, 1 + self.num_drafts - s.num_rows)
            missing -= more
            filled.append(s._replace(num_rows=s.num_rows + more, num_sampled=s.num_sampled + more))
        return filled

    def _capture(self, shape: BatchShape, processing: int) -> bool:
        """Whether steps of this shape are captured. One with processing is when it is met first, so that batches
        without pay nothing for it."""
        processed = replace(shape, processing=processing)
        if shape in self.captured and processed not in self.captured:
            function = partial(self.step_tensors, processed)
            if self.graphs.prepare(("step", processed), function, (self.state.idle(processed),)):
                self.captured.add(processed)
        return processed in self.captured

    def _leaves_rows(self, shape: BatchShape, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether nobody wants what the last layer makes of rows that are not sampled. Sizes that come again are
        recorded with all rows, of which few are left out there."""
        taps = self._taps(shape)
        if taps.final or self.target.config.num_layers in taps.layers or not self.target.leaves_rows:
            return False
        some = 0 < shape.num_sampled < shape.num_rows
        return some and not shape.repeats and not any(s.scored[1] for s in scheduled)

    def _taps(self, shape: BatchShape) -> Taps:
        """What the drafter wants of the target's pass."""
        return self.spec.taps if shape.with_drafter else Taps()

    def _padded(self, step: StepInput) -> BatchShape | None:
        """The graph bucket that a step in which everybody decodes is padded to, with as many rows each as its level of
        drafts asks for; None for others."""
        scheduled = step.scheduled
        num_requests = next((R for R in self.buckets if len(scheduled) <= R), None)
        if not step.all_decode or num_requests is None:
            return None
        most = max(max(s.num_rows - 1, s.num_drafts) for s in scheduled)
        if not step.without_drafter and self.num_drafts:
            most = max(most, 1)
        level = next((k for k in self.levels if k >= most), most)
        with_drafter = self.drafter is not None and not step.without_drafter
        return self._decoding(num_requests, level, with_drafter=with_drafter)

    def _filled_up(self, shape: BatchShape) -> BatchShape:
        """A step with prompts, of a size that comes again: rows that belong to nobody are added, as one request more.
        They are few enough to have places in the scratch slot. Without such sizes (a row costs a CPU more than what a
        program saves) whose rows they are matters as little."""
        if not self.mixed_sizes:
            return replace(shape, most_rows=shape.num_rows)
        num_rows = next((n for n in self.mixed_sizes if n >= shape.num_rows), 0)
        missing = num_rows - shape.num_rows
        if not num_rows or missing > self.max_model_len:
            return shape
        return replace(
            shape,
            num_requests=shape.num_requests + (missing > 0),
            num_rows=num_rows,
            most_rows=num_rows,
            num_drafts=next(k for k in (0, *self.levels, shape.num_drafts) if k >= shape.num_drafts),
            repeats=True,
        )

    def _run_parts(
        self,
        launched: LaunchedStep,
        shape: BatchShape,
        scheduled_4R: Tensor,
        items: StepItems | None = None,
        *,
        recorded: bool,
    ) -> PassOutputs:
        """`step_tensors` with the host looking on: where requests ask for more, or the drafter thinks on the host.

        recorded: all that this reads lies where it lay when such a step ran first, `scheduled_4R` too.
        """
        drafter, graphs = self.drafter, self.graphs if recorded else EAGER
        start = time.perf_counter()
        if drafter is None or not shape.with_drafter:
            function = partial(self.step_tensors, shape, scheduled_4R, items)
            closed = graphs.run(("step", shape), function, (), at_once=self._is_known(shape))
            launched.target_seconds = time.perf_counter() - start
            return closed
        checked = self._checked(shape, scheduled_4R, graphs, items)
        middle = time.perf_counter()
        draft = partial(self._draft, drafter, checked, shape.num_drafts)
        is_watched = any(sandbox.must_watch for sandbox in self.sandboxes)
        number = 0 if is_watched or not self.on_device else graphs.holds(_verify_key(shape))
        closed, launched.faults = (graphs if number else EAGER).run(
            ("draft", shape, number), draft, (), at_once=True
        )
        if launched.faults:
            self._lose_state(launched)
        launched.target_seconds, launched.draft_seconds = middle - start, time.perf_counter() - middle
        return closed

    def _checked(
        self, shape: BatchShape, scheduled_4R: Tensor, graphs: Graphs, items: StepItems | None = None
    ) -> VerifiedPass:
        """`verify_rows` by `graphs`, a part of a step that a draft pass follows."""
        function = partial(self.verify_rows, shape, scheduled_4R, items)
        return graphs.run(_verify_key(shape), function, (), at_once=self._is_known(shape))

    def _is_known(self, shape: BatchShape) -> bool:
        """Whether the target's pass, most of such a step, is recorded."""
        return self.graphs.holds(_target_key(shape, self._taps(shape))) > 0

    def _draft(
        self, drafter: Drafter, checked: VerifiedPass, num_drafts: int
    ) -> tuple[PassOutputs, tuple[int, ...]]:
        """(what `_close` gives, the drafters that raised)."""
        proposal = drafter.propose(checked.verified, num_drafts)
        faults = tuple(i for i, sandbox in enumerate(self.sandboxes) if sandbox.error is not None)
        return self._close(checked, proposal, with_drafter=True), faults

    def _lose_state(self, launched: LaunchedStep) -> None:
        """What the drafters that raised should have kept of everybody's rows is missing."""
        failed, slots = [self.sandboxes[i] for i in launched.faults], [s.slot for s in launched.scheduled]
        for sandbox in failed:
            sandbox.lose(slots)
        launched.draft_state_lost = any(sandbox.spec.kv for sandbox in failed)
        launched.undrafted_slots = tuple(
            slot for slot in slots if not any(s.drafts_for(slot) for s in self.sandboxes)
        )

    def step_tensors(
        self, shape: BatchShape, scheduled_4R: Tensor, items: StepItems | None = None
    ) -> PassOutputs:
        """A whole pass, without `items` a function of device memory alone: (result_RX, logits_MV, hidden_TH).

        The drafter is trusted. A pass in which it fails cannot be captured, so that raises here.
        """
        checked, drafter = self.verify_rows(shape, scheduled_4R, items), self.drafter
        if drafter is None or not shape.with_drafter:
            return self._close(checked, self.state.no_drafts(shape.num_requests), with_drafter=False)
        closed, faults = self._draft(drafter, checked, shape.num_drafts)
        for number in faults:
            error = self.sandboxes[number].error
            assert error is not None
            raise error
        return closed

    def verify_rows(
        self, shape: BatchShape, scheduled_4R: Tensor, items: StepItems | None = None
    ) -> VerifiedPass:
        """Compute the rows, accept drafts, move the slots on. items: with these it is never recorded."""
        rows, verify = self.state.fill(shape, scheduled_4R)
        given, whole = (None, None) if items is None else (items.given, items.whole)
        carried = None if given is None else given.at(rows.slots_T, rows.positions_T)
        only_M = rows.sampled_M if shape.only_sampled else None
        taps = self._taps(shape)
        target = partial(self.target_pass, shape.most_rows, taps, carried, whole, only_M)
        graphs = self.graphs if shape.repeats else EAGER
        hidden_TH, *tapped = graphs.run(_target_key(shape, taps), target, rows.inputs)
        hidden_MH = hidden_TH if shape.only_sampled else self.ops.gather(hidden_TH, rows.sampled_M)
        logits_MV = self.target.logits(hidden_MH)
        result = self.verifier.verify(
            logits_MV,
            rows.slots_M,
            rows.positions_M,
            self.state.slots.tokens_SL,
            verify,
            has_processing=shape.processing > 0,
        )
        drawer = self.verifier.drawer
        verified = self.state.commit(shape, rows, scheduled_4R, result, tuple(tapped), drawer, given)
        return VerifiedPass(verified, result, rows.draft_count_R, logits_MV, hidden_TH)

    def target_pass(
        self,
        most_rows: int,
        taps: Taps,
        given: GivenEmbeddings | None,
        whole: WholeRows | None,
        only_M: Tensor | None,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
    ) -> tuple[Tensor, ...]:
        """The target's layers: hidden state of all rows or of `only_M`, `taps` of all."""
        rows = Rows(
            positions_T,
            slots_T,
            context_lens_T,
            max_query_len=most_rows,
            whole=whole,
            turns=self.items.turns,
        )
        attn = PagedAttention(self.ops, self.backend, self.cache, rows)
        out = self.target(tokens_T, attn, taps.layers, taps.final, given, only_M)
        return (out.hidden_TH, *out.taps)

    def _commit(self, verified: Verified, *, with_drafter: bool) -> None:
        """The one place where rows become permanent in what layers keep of slots: when all who see the pass's rows have
        written theirs, the drafter's layers too if it was shown them."""
        states = self.cache.states + (self.draft_cache.states if with_drafter else [])
        if states:
            rows = verified.pass_of_rows
            for state in states:
                state.commit(rows)

    def _close(self, checked: VerifiedPass, proposal: Proposal, *, with_drafter: bool) -> PassOutputs:
        """Commit, and store the drafts: (the result as `LaunchedStep` describes it, logits_MV, hidden_TH)."""
        self._commit(checked.verified, with_drafter=with_drafter)
        result = checked.result
        stored = self.state.store_drafts(checked.verified, proposal, self.target.config.vocab_size)
        drafter_R = proposal.drafter_R
        if drafter_R is None:
            drafter_R = self.state.nothing_S[: len(result.num_emitted_R)]
        num_stored_R, broken_R = stored
        if proposal.broken_R is not None:
            broken_R = proposal.broken_R
        columns = (result.num_emitted_R, checked.draft_count_R, num_stored_R, broken_R, drafter_R)
        result_RX = self.ops.concat((result.tokens_RW, *(column_R[:, None] for column_R in columns)))
        return IntegerRows(result_RX), checked.logits_MV, checked.hidden_TH

    @_as_certified
    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture the steps in which everybody decodes, largest first, with nobody taking part.

        progress: (done, total), before each and at the end.
        """
        shapes = [
            self._decoding(R, level, with_drafter=level > 0)
            for R in reversed(self.buckets)
            for level in reversed(levels_of(R, self.levels))
            if self.async_depth
        ]
        for done, shape in enumerate(shapes):
            progress(done, len(shapes))
            function = partial(self.step_tensors, shape)
            if self.graphs.prepare(("step", shape), function, (self.state.idle(shape),)):
                self.captured.add(shape)
        if shapes:
            progress(len(shapes), len(shapes))

    @_as_certified
    def rehearse(self) -> None:
        """Dummy-run the largest passes, to measure peak activation memory."""
        most, longest = self.max_num_batched_tokens, self.state.max_len
        num_slots = self.state.scratch_slot
        num_prompts = min(-(-most // longest), num_slots)  # as many as fill a pass, or as there can be
        each = min(most // num_prompts, longest)
        prompts = BatchShape(
            num_prompts, num_prompts * each, each, num_prompts, 1, self.num_drafts, repeats=False
        )
        for shape in (prompts, *(self._decoding(R, self.num_drafts) for R in self.buckets)):
            self.step_tensors(shape, self.state.idle(shape))

    @_as_certified
    def prepare_rows(self, num_rows: int) -> bool:
        """Record the target's pass of so many rows, a part of all steps with as many, whoever's they are. False where
        it is not, or is to be the last, since such passes keep much memory."""
        if num_rows > self.max_model_len:
            return False
        idle = ScheduledRequest(self.state.scratch_slot, 0, num_rows, 1, self.num_drafts)
        shape = self._widened(BatchShape.of([idle], repeats=True))
        rows, _ = self.state.fill(shape, self.state.load([idle], shape))
        taps = self._taps(shape)
        target = partial(self.target_pass, shape.most_rows, taps, None, None, None)
        is_recorded = self.graphs.prepare(_target_key(shape, taps), target, rows.inputs)
        return is_recorded and self.graphs.num_bytes < MOST_PREPARED_BYTES

    @_as_certified
    def measure(self, size: StepSize) -> tuple[float, float]:
        """Seconds of a step in which nobody takes part, by the device's clock: (target's pass, draft pass). Where a
        step is one graph, all of it counts as the target's. A drafter that thinks on the host is not run."""
        num_requests, each = size.num_requests, 1 + size.num_verified
        with_drafter = self.drafter is not None and size.num_verified + size.num_drafts > 0
        shape = BatchShape.decoding(num_requests, each, size.num_drafts, with_drafter=with_drafter)
        shape = self._widened(shape)
        slots = [self.state.scratch_slot] * num_requests
        if size.context:  # keys are read that lie apart, as those of requests do
            slots = list(range(num_requests))
            self._spread(slots)
        scheduled = [ScheduledRequest(slot, size.context, each, each, size.num_drafts) for slot in slots]
        self.state.slots.computed_S[slots] = size.context
        scheduled_4R = self.state.load(scheduled, shape)
        try:
            return self._measured(shape, scheduled, scheduled_4R)
        finally:
            self.state.slots.computed_S[slots] = 0
            self.state.block_tables_GSB[:, slots] = 0

    def _measured(
        self, shape: BatchShape, scheduled: Sequence[ScheduledRequest], scheduled_4R: Tensor
    ) -> tuple[float, float]:
        if shape in self.captured:
            function = partial(self.step_tensors, shape)
            run = partial(self.graphs.run, ("step", shape), function, (scheduled_4R,))
            return device_seconds(run), 0.0
        recorded = self.graphs.calls_once and shape.num_rows <= MAX_GRAPH_ROWS
        if shape.with_drafter and not self.on_device:
            start = time.perf_counter()
            self._checked(shape, scheduled_4R, self.graphs if recorded else EAGER)
            return time.perf_counter() - start, 0.0
        launched = LaunchedStep(runner=self, scheduled=scheduled)
        self._run_parts(launched, shape, scheduled_4R, recorded=recorded)
        return launched.target_seconds, launched.draft_seconds

    def _spread(self, slots: Sequence[int]) -> None:
        """Blocks for every page of these slots, which no request has; where there are too few they come again."""
        for layer in (*self.cache.layers, *self.draft_cache.layers):
            table_SB = layer.block_table_SB
            device, num_pages, num_blocks = table_SB.device, table_SB.shape[1], max(1, len(layer.k) - 1)
            slot_R1 = torch.arange(len(slots), device=device)[:, None]
            page_B = torch.arange(num_pages, device=device)
            table_SB[slots] = ((page_B * len(slots) + slot_R1) % num_blocks + 1).int()

    def _widened(self, shape: BatchShape) -> BatchShape:
        """A step of the same rows that any number of drafts fits into, so that there are fewer shapes to record."""
        most = 1 + self.num_drafts
        if self.buckets or self.drafter is None:
            return shape
        if not shape.with_drafter:
            return shape if self.graphs is EAGER else replace(shape, most_rows=most)
        spec = self.spec
        reads = spec.kv or spec.borrow or spec.taps.layers or spec.taps.final
        is_cheap = self.on_device and not reads  # no model: few drafts take it as long as many
        num_drafts = self.num_drafts if is_cheap else shape.num_drafts
        return replace(shape, most_rows=most, most_sampled=most, num_drafts=num_drafts)

    def _decoding(self, num_requests: int, num_drafts: int, *, with_drafter: bool = True) -> BatchShape:
        return BatchShape.decoding(num_requests, 1 + num_drafts, num_drafts, with_drafter=with_drafter)

    def shutdown(self) -> None:
        """Give all memory back; nothing can be run any more."""
        is_gpu = self.state.device.type == "cuda"
        self.__dict__.clear()
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
