"""The device half of the engine: owns slots, caches, target, drafter, verifier and graphs, and carries out steps.

A step is `run`: place requests in slots (`_place`), then `_launch` one pass over all rows: target, sampling and
verification (`verify_rows`), drafting (`_draft`), and the packed result (`_close`). `step_tensors` is that pass as one
function of device memory, `run_parts` the same pass in parts.

On a GPU a pass in which every request decodes is one CUDA graph from row numbers to packed result, and the next step
may be launched before the last result has been read. Neither changes any output bit.
Shapes: R requests of a pass, T rows, M sampled rows, W most sampled rows of a request, K drafts, X result columns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.attention.given import GivenEmbeddings, WholeRows
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Taps, Verified
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.engine.costs import MAX_GRAPH_ROWS, levels_of
from draftproof.engine.interface import HEALTHY, DrafterHealth, ScheduledRequest, StepInput
from draftproof.engine.items import SlotItems, StepItems
from draftproof.engine.launched import LaunchedStep, device_fault
from draftproof.engine.logprobs import LogprobScorer
from draftproof.engine.shapes import BatchShape, Shapes
from draftproof.engine.state import State
from draftproof.kernels.ops import Ops
from draftproof.models.decoder import Decoder
from draftproof.runtime.graphs import EAGER, OFTEN, SOON, Graphs, Key, at_once
from draftproof.runtime.threads import as_certified
from draftproof.runtime.transfer import IntegerRows, Numbers
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.verifier import Verifier, VerifyResult

# result_RX, logits_MV, hidden_TH
PassOutputs = tuple[IntegerRows, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """The input of a pass: its shape and its rows, as `State.load` returns them. `items`: embeddings that rows carry in
    place of tokens; such a pass is never recorded."""

    shape: BatchShape
    scheduled_4R: Tensor
    items: StepItems | None = None


@dataclass(frozen=True, slots=True)
class VerifiedPass:
    """A pass whose drafts have been verified."""

    verified: Verified
    result: VerifyResult
    draft_count_R: Tensor
    logits_MV: Tensor
    hidden_TH: Tensor


def _verify_key(shape: BatchShape) -> Key:
    return "verify", shape.num_requests, shape.num_rows, shape.most_rows, shape.processing


def target_key(shape: BatchShape, taps: Taps) -> Key:
    return "target", shape.num_rows, shape.most_rows, taps


def _filled(scheduled: Sequence[ScheduledRequest], each: int) -> Sequence[ScheduledRequest]:
    """The requests, each with `each` rows, all sampled."""
    return [s._replace(num_rows=each, num_sampled=each) for s in scheduled]


@dataclass(kw_only=True)
class ModelRunner:
    """Implements `interface.Runner`. Built by `loading/wiring.py`."""

    target: Decoder
    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    draft_cache: PagedCache
    state: State
    table: SamplingTable
    verifier: Verifier
    drafter: Drafter | None  # one sandboxed drafter, or a chain of them
    sandboxes: tuple[DrafterSandbox, ...]
    spec: DraftSpec
    scorer: LogprobScorer
    items: SlotItems
    graphs: Graphs
    shapes: Shapes
    on_device: bool = True  # the drafter is a function of device memory alone: its pass may be recorded
    max_num_batched_tokens: int
    num_drafts: int  # maximum per request; 0 without a drafter
    drafter_names: tuple[str, ...] = ()  # one for each of `sandboxes`
    most_forced: int = 0  # maximum number of forced drafts per request; attributed to the last drafter
    drafter_may_rest: bool = True  # the drafter need not see steps without drafts
    lookups: frozenset[int] = frozenset()  # drafters that run no model, by their indices
    is_divided: bool = False  # some drafters run no model and others do
    async_depth: int = 0  # passes that may be in flight when a step ends
    price: Numbers | None = None  # `StepInput.price`, in memory that a drafter reads
    num_threads: int = 1  # thread count of the certificates, which torch is set to for each pass
    captured: set[BatchShape] = field(default_factory=set)  # shapes of whole steps that are CUDA graphs

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

    @property
    def drafter_stops(self) -> bool:
        return self.price is not None and self.spec.stops

    def drafter_health(self) -> DrafterHealth:
        each = tuple(sandbox.num_faults for sandbox in self.sandboxes)
        if not any(each):
            return HEALTHY
        last_fault = next(s.last_fault for s in reversed(self.sandboxes) if s.num_faults)
        return DrafterHealth(all(s.off for s in self.sandboxes), sum(each), last_fault, each)

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        """See `interface.Runner`."""
        return self.state.tokens(slot, num_known, num_drafts)

    def keep_drafts(self, slot: int, num_drafts: int) -> None:
        """See `interface.Runner`."""
        self.state.keep_drafts(slot, num_drafts)

    @as_certified
    def run(self, step: StepInput) -> LaunchedStep:
        """Launch a step: compute its rows, verify, commit, and draft as many tokens as are wanted."""
        try:
            self._place(step)
            if not step.scheduled:
                return LaunchedStep(sandboxes=self.sandboxes, scheduled=())
            return self._launch(step)
        except torch.AcceleratorError as error:
            raise device_fault(error) from error

    def _place(self, step: StepInput) -> None:
        """Release and admit slots, store forced drafts, clear new blocks of the draft cache."""
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
            self.draft_cache.zero(step.fresh_blocks)

    def _launch(self, step: StepInput) -> LaunchedStep:
        items = self.items.begin(step.scheduled)
        if items is not None:  # not a function of the slots' memory alone, so it cannot be a graph
            step = replace(step, all_decode=False)
        if self.price is not None and not step.without_drafter:
            self.price.items[:] = step.price
        drafter = self.drafter
        if drafter is not None and self.is_divided:
            slots = [s.slot for s in step.scheduled]
            are_shown = not (step.without_drafter or step.without_models)
            drafter = drafter.limit_models(slots, step.most_model_drafts, are_shown=are_shown)
        has_processing = self.table.has_processing(s.slot for s in step.scheduled)
        processing = self.table.generation if has_processing else 0
        padded = self.shapes.padded(step)
        full_graph = padded is not None and self._capture(padded, processing)
        if padded is not None and (full_graph or padded.num_rows <= MAX_GRAPH_ROWS):
            scheduled, shape = _filled(step.scheduled, padded.most_sampled), padded
        else:
            scheduled, shape = self.shapes.fitted(
                step, has_items=items is not None, is_recorded=self.graphs is not EAGER
            )
        only_sampled = items is None and self._leaves_rows(shape, scheduled)
        if processing or only_sampled:
            shape = replace(shape, processing=processing, only_sampled=only_sampled)
        scheduled_4R = self.state.load(scheduled, shape, step.table_entries)
        if step.masks:
            firsts = itertools.accumulate((s.num_sampled for s in scheduled), initial=0)
            self.table.load_masks([(at, mask) for at, mask in zip(firsts, step.masks, strict=False) if mask])
        launched = LaunchedStep(sandboxes=self.sandboxes, scheduled=scheduled)
        given = Pass(shape, scheduled_4R, items)
        num_warming = self.graphs.num_warming
        if full_graph:
            function = partial(self.step_tensors, shape)
            tensors = self.graphs.run(("step", shape), function, (scheduled_4R,))
        else:
            recorded = step.all_decode and shape.repeats and self.graphs.calls_once
            tensors = self.run_parts(launched, given, drafter, recorded=recorded)
        launched.is_warming = self.graphs.num_warming > num_warming
        result_RX, logits_MV, hidden_TH = tensors
        launched.output_scores = self.scorer.outputs(scheduled, result_RX.tensor, logits_MV)
        launched.prompt_scores = self.scorer.prompts(scheduled, hidden_TH, self.state.slots.tokens_SL)
        launched.result = result_RX.download()
        return launched

    def _capture(self, shape: BatchShape, processing: int) -> bool:
        """Whether steps of this shape and processing are captured. Shapes with processing are captured at first use,
        so that engines that never need them pay nothing."""
        processed = replace(shape, processing=processing)
        if shape in self.captured and processed not in self.captured:
            function = partial(self.step_tensors, processed)
            if self.graphs.prepare(("step", processed), function, (self.state.idle(processed),)):
                self.captured.add(processed)
        return processed in self.captured

    def _leaves_rows(self, shape: BatchShape, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether the last layer may skip the rows that are not sampled: nothing taps or scores them. Recurring shapes
        are recorded with all rows, since few of theirs could be skipped."""
        if shape.repeats:
            return False
        taps = self.taps(shape)
        if taps.final or self.target.config.num_layers in taps.layers or not self.target.leaves_rows:
            return False
        some = 0 < shape.num_sampled < shape.num_rows
        return some and not any(s.scored[1] for s in scheduled)

    def taps(self, shape: BatchShape) -> Taps:
        """The target's hidden states that the drafter reads in a pass of this shape."""
        return self.spec.taps if shape.with_drafter else Taps()

    def run_parts(
        self, launched: LaunchedStep, given: Pass, drafter: Drafter | None, *, recorded: bool
    ) -> PassOutputs:
        """`step_tensors` in parts, which are timed and may run on the host: for steps that are no single graph.

        drafter: to be asked, the engine's or a member of it; recorded: everything read, `given.scheduled_4R` included,
        has the same addresses in every step of this shape, so the parts may be recorded and replayed.
        """
        shape, graphs = given.shape, self.graphs if recorded else EAGER
        start = time.perf_counter()
        if drafter is None or not shape.with_drafter:
            function = partial(self._plain, given)
            closed = graphs.run(("step", shape), function, (), when=partial(self._recorded_when, shape))
            launched.target_seconds = time.perf_counter() - start
            return closed
        checked = self.checked(given, graphs)
        number = graphs.latest
        middle = time.perf_counter()
        draft = partial(self._draft, drafter, checked, shape.num_drafts)
        asked = (drafter,) if isinstance(drafter, DrafterSandbox) else self.sandboxes
        is_watched = any(sandbox.must_watch for sandbox in asked)
        if is_watched or not self.on_device:
            number = 0
        key = "drafting", shape, number, drafter is self.drafter
        closed, faults = (graphs if number else EAGER).run(key, draft, (), when=at_once)
        if faults:
            launched.fail(faults)
        launched.target_seconds, launched.draft_seconds = middle - start, time.perf_counter() - middle
        return closed

    def checked(self, given: Pass, graphs: Graphs) -> VerifiedPass:
        """`verify_rows` through `graphs`, as the part of a step before the draft pass."""
        function = partial(self.verify_rows, given)
        when = partial(self._recorded_when, given.shape)
        return graphs.run(_verify_key(given.shape), function, (), when=when)

    def _recorded_when(self, shape: BatchShape) -> int:
        """See `Graphs.run`: sooner if the target's pass of this shape, most of the step's calls, is recorded."""
        return SOON if self.graphs.holds(target_key(shape, self.taps(shape))) else OFTEN

    def _draft(
        self, drafter: Drafter, checked: VerifiedPass, num_drafts: int
    ) -> tuple[PassOutputs, tuple[int, ...]]:
        """Draft and close the pass: (outputs, indices of the drafters that raised)."""
        proposal = drafter.propose(checked.verified, num_drafts)
        faults = tuple(i for i, sandbox in enumerate(self.sandboxes) if sandbox.error is not None)
        return self._close(checked, proposal, with_drafter=True), faults

    def step_tensors(self, shape: BatchShape, scheduled_4R: Tensor) -> PassOutputs:
        """A whole pass as a function of device memory alone: (result_RX, logits_MV, hidden_TH).

        The drafter must be trusted. Its exceptions are raised, since such a pass cannot be captured.
        """
        given, drafter = Pass(shape, scheduled_4R), self.drafter
        if drafter is None or not shape.with_drafter:
            return self._plain(given)
        closed, faults = self._draft(drafter, self.verify_rows(given), shape.num_drafts)
        for number in faults:
            error = self.sandboxes[number].error
            assert error is not None
            raise error
        return closed

    def _plain(self, given: Pass) -> PassOutputs:
        """A whole pass that the drafter does not see."""
        checked = self.verify_rows(given)
        return self._close(checked, self.state.no_drafts(given.shape.num_requests), with_drafter=False)

    def verify_rows(self, given: Pass) -> VerifiedPass:
        """Run the target over the rows, sample, verify the drafts and advance the slots."""
        shape, items = given.shape, given.items
        rows, verify = self.state.fill(shape, given.scheduled_4R)
        embeds, whole = (None, None) if items is None else (items.given, items.whole)
        carried = None if embeds is None else embeds.at(rows.slots_T, rows.positions_T)
        only_M = rows.sampled_M if shape.only_sampled else None
        taps = self.taps(shape)
        target = partial(self.target_pass, shape.most_rows, taps, carried, whole, only_M)
        graphs = self.graphs if shape.repeats else EAGER
        hidden_TH, *tapped = graphs.run(target_key(shape, taps), target, rows.inputs)
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
        verified = self.state.commit(shape, rows, given.scheduled_4R, result, tuple(tapped), drawer, embeds)
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
        """The target's layers: final hidden states of all rows or of `only_M`, then `taps` of all rows."""
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
        """Commit the pass's rows to the layers' per-slot states: the only place that does. Called once target and, if
        it saw the rows, drafter have written theirs."""
        states = self.cache.states + (self.draft_cache.states if with_drafter else [])
        if states:
            rows = verified.pass_of_rows
            for state in states:
                state.commit(rows)

    def _close(self, checked: VerifiedPass, proposal: Proposal, *, with_drafter: bool) -> PassOutputs:
        """Commit and store the drafts: (the result as described in `LaunchedStep`, logits_MV, hidden_TH)."""
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

    @as_certified
    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture the decode-only steps as CUDA graphs with dummy requests, largest first.

        progress: called with (done, total) before each capture and at the end.
        """
        shapes = [
            BatchShape.decoding(R, 1 + level, level, with_drafter=level > 0)
            for R in reversed(self.shapes.buckets)
            for level in reversed(levels_of(R, self.shapes.levels))
            if self.async_depth
        ]
        for done, shape in enumerate(shapes):
            progress(done, len(shapes))
            function = partial(self.step_tensors, shape)
            if self.graphs.prepare(("step", shape), function, (self.state.idle(shape),)):
                self.captured.add(shape)
        if shapes:
            progress(len(shapes), len(shapes))

    @as_certified
    def rehearse(self) -> None:
        """Dummy-run the largest passes, to measure peak activation memory."""
        most, longest = self.max_num_batched_tokens, self.state.max_len
        num_slots = self.state.scratch_slot
        num_prompts = min(-(-most // longest), num_slots)  # the fewest that fill the pass
        each = min(most // num_prompts, longest)
        prompts = BatchShape(
            num_prompts, num_prompts * each, each, num_prompts, 1, self.num_drafts, repeats=False
        )
        k = self.num_drafts
        full = [BatchShape.decoding(R, 1 + k, k) for R in self.shapes.buckets]
        for shape in (prompts, *full):
            self.step_tensors(shape, self.state.idle(shape))

    def shutdown(self) -> None:
        """Free all memory. The runner cannot be used afterwards."""
        is_gpu = self.state.device.type == "cuda"
        self.__dict__.clear()
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
