"""The engine's step: plan, compute, verify, commit, draft. Everything it needs is handed to it.

On a GPU the next pass is launched before the last one's tokens are on the host, and a pass in which everybody decodes
is one CUDA graph from its row numbers to its packed result. Neither shows in what is computed.
Shapes: R requests of a pass, T its rows, M its sampled rows, W the most of one request, K drafts.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.cache.pages import PageAllocator
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import DraftSpec, Proposal, Verified, no_proposal
from draftproof.drafters.guard import Guard, Guarded
from draftproof.engine.outbox import Emission, Flight, deliver
from draftproof.engine.policy import Policy
from draftproof.engine.scheduler import Plan, Scheduler
from draftproof.engine.scores import Scorer
from draftproof.engine.sequence import Sequence
from draftproof.engine.state import Size, State
from draftproof.kernels.certify import own_precision, threads
from draftproof.kernels.graphs import EAGER, Graphs
from draftproof.kernels.ops import Ops
from draftproof.kernels.transfer import download, upload
from draftproof.metrics import EngineStats
from draftproof.models.decoder import Decoder
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.verifier import Verdict, Verifier

P = ParamSpec("P")
R = TypeVar("R")

MOST_GRAPH_ROWS = 64  # larger passes, but for those captured at the start, are long enough to run as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of; `build.build` puts it together."""

    target: Decoder
    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    draft_cache: PagedCache
    pages: PageAllocator
    scheduler: Scheduler
    state: State
    table: SamplingTable
    verifier: Verifier
    guard: Guard | None
    spec: DraftSpec
    policy: Policy
    scorer: Scorer
    graphs: Graphs
    num_drafts: int  # the most that are asked for; 0 without a drafter
    buckets: tuple[int, ...] = ()  # numbers of requests, ascending, that decoding passes are filled up to
    num_ahead: int = 0  # passes that may be in flight when a step ends
    num_threads: int = 1  # that certificates were made with: torch's setting around each pass
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True, slots=True)
class Checked:
    """A pass whose drafts have been verified."""

    verified: Verified
    verdict: Verdict
    draft_count_R: Tensor
    logits_MV: Tensor
    hidden_TH: Tensor


def _as_certified(method: Callable[P, R]) -> Callable[P, R]:
    """A method of Engine that runs as certificates were made: at their number of threads, and in the dtypes that the
    model has, whatever a caller set for himself (`torch.autocast` would choose others)."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        engine = args[0]
        assert isinstance(engine, Engine)
        with threads(engine.parts.num_threads), own_precision():
            return method(*args, **kwargs)

    return run


class Engine:
    """Runs sequences to their end, a pass a step. Knows no text."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.stats = parts.stats
        self._flights: deque[Flight] = deque()
        self._whole: set[Size] = set()  # captured passes

    def add(self, sequence: Sequence) -> None:
        self.parts.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        scheduler = self.parts.scheduler
        return bool(scheduler.running or scheduler.waiting or self._flights)

    @torch.inference_mode(False)  # buffers outlive the call, so they must not take on a caller's mode
    @_as_certified
    def step(self) -> list[Emission]:
        """One pass over what the scheduler plans; what the passes that came back added to their sequences."""
        try:
            return self._step()
        except BaseException:
            self.restart()
            raise

    def restart(self) -> None:
        """A step broke off halfway (Ctrl-C, no memory): trust nothing computed, compute everybody again."""
        self._flights.clear()
        for slot in self.parts.scheduler.restart():
            self._vacate(slot)

    def _step(self) -> list[Emission]:
        start, emissions = time.perf_counter(), []
        plan = self.parts.scheduler.plan()
        if plan.stalled:
            emissions += self._deliver(0)
            plan = self.parts.scheduler.plan()
        if plan.work:
            self.launch(plan, self._wanted(plan))
        emissions += self._deliver(self.parts.num_ahead if plan.work else 0)
        self.stats.num_steps += 1
        self.stats.step_seconds += time.perf_counter() - start
        return emissions

    @torch.inference_mode(False)
    @_as_certified
    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture the passes in which everybody decodes, largest first, with nobody taking part.

        progress: (done, total), before each and at the end.
        """
        p = self.parts
        sizes = [Size.decoding(R, 1 + p.num_drafts, p.num_drafts) for R in reversed(p.buckets) if p.num_ahead]
        for done, size in enumerate(sizes):
            progress(done, len(sizes))
            if p.graphs.prepare(("step", size), partial(self._step_tensors, size), (p.state.idle(size),)):
                self._whole.add(size)
        if sizes:
            progress(len(sizes), len(sizes))

    @torch.inference_mode(False)
    @_as_certified
    def rehearse(self) -> None:
        """The largest passes there can be, with nobody taking part: what they need beside weights and cache."""
        p = self.parts
        most = p.scheduler.max_num_batched_tokens
        num_prompts = -(-most // p.state.max_len)  # that it takes to fill a pass
        each = most // num_prompts
        prompts = Size(num_prompts, num_prompts * each, each, num_prompts, 1, p.num_drafts, repeats=False)
        for size in (prompts, *(Size.decoding(R, 1 + p.num_drafts, p.num_drafts) for R in p.buckets)):
            self._step_tensors(size, p.state.idle(size))

    @torch.inference_mode(False)
    @_as_certified
    def launch(self, plan: Plan, wanted: list[int]) -> None:
        """Compute the plan's rows, verify, commit, draft `wanted` tokens for each of its requests."""
        p = self.parts
        self._place(plan)
        slots = [w.sequence.slot for w in plan.work]
        whole, size = p.table.is_plain(slots), self._padded(plan, wanted)
        whole = whole and size in self._whole
        if size is None or (size.num_rows > MOST_GRAPH_ROWS and not whole):
            repeats = not p.buckets and sum(w.num_rows for w in plan.work) <= MOST_GRAPH_ROWS
            size = Size.of(plan.work, wanted, repeats=repeats)
        else:
            rows = size.most_sampled
            plan.work = [replace(w, num_rows=rows, num_sampled=rows) for w in plan.work]
        work_4R = p.state.load(plan.work, wanted, size.num_requests)
        if whole:
            tensors = p.graphs.run(("step", size), partial(self._step_tensors, size), (work_4R,))
        else:
            tensors = self._run_parts(plan, size, work_4R)
        result_RX, logits_MV, hidden_TH = tensors
        scores = p.scorer.outputs(plan, result_RX, logits_MV), p.scorer.prompts(plan, hidden_TH)
        self._flights.append(Flight(plan, download([result_RX]), *scores))
        for work, number in zip(plan.work, wanted, strict=True):
            s = work.sequence
            s.num_drafts = number
            s.num_pending += work.num_sampled
            s.num_computed += work.num_rows - work.num_sampled

    def _padded(self, plan: Plan, wanted: list[int]) -> Size | None:
        """A pass of a size that comes again: every request has as many rows, some are nobody's. None where that cannot
        be: with a prompt, or with drafts that there is no room for."""
        work = plan.work
        if any(w.num_rows != w.num_sampled or w.num_rows != 1 + w.sequence.num_drafts for w in work):
            return None
        num_requests = next((R for R in self.parts.buckets if len(work) <= R), None)
        each = max(w.num_rows for w in work)
        num_drafts = self.parts.num_drafts if any(wanted) else 0
        return None if num_requests is None else Size.decoding(num_requests, each, num_drafts)

    def _run_parts(self, plan: Plan, size: Size, work_4R: Tensor) -> tuple[Tensor, ...]:
        """`_step_tensors` with the host looking on: where requests ask for more, or the drafter thinks on the host."""
        start, nobody = time.perf_counter(), self.parts.state.scratch_slot
        slots = [w.sequence.slot for w in plan.work for _ in range(w.num_sampled)]
        checked = self._verify(size, work_4R, slots + [nobody] * (size.num_sampled - len(slots)))
        middle = time.perf_counter()
        guarded = self._propose(checked.verified, size.num_drafts)
        closed = self._close(checked, guarded.proposal)
        for work in plan.work:
            work.sequence.draft_broken |= guarded.raised and bool(self.parts.spec.kv)
        self._clock(plan, size.num_drafts, middle - start, time.perf_counter() - middle)
        return closed

    def _step_tensors(self, size: Size, work_4R: Tensor) -> tuple[Tensor, ...]:
        """A whole pass over requests that ask for no processing, as a function of device memory alone.

        The drafter is ours. Where it fails the pass cannot be captured, so nothing guards it here.
        """
        checked, guard = self._verify(size, work_4R, []), self.parts.guard
        if guard is None:
            return self._close(checked, no_proposal(checked.verified))
        return self._close(checked, guard.drafter.propose(checked.verified, size.num_drafts))

    def _verify(self, size: Size, work_4R: Tensor, slots_host: list[int]) -> Checked:
        """Compute the rows, accept drafts, move the slots on."""
        p = self.parts
        rows, verify = p.state.fill(size, work_4R)
        inputs = (rows.tokens_T, rows.positions_T, rows.slots_T, rows.ends_T, rows.sampled_M)
        graphs = p.graphs if size.repeats else EAGER
        key = ("target", size.num_rows, size.num_sampled, size.most_rows)
        logits_MV, hidden_TH, *taps = graphs.run(key, partial(self._target, size.most_rows), inputs)
        verdict = p.verifier.verify(
            logits_MV, rows.slots_M, rows.positions_M, p.state.slots.tokens_SL, slots_host, verify
        )
        verified = p.state.commit(size, rows, work_4R, verdict, tuple(taps), p.verifier.drawer)
        return Checked(verified, verdict, rows.draft_count_R, logits_MV, hidden_TH)

    def _close(self, checked: Checked, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        """Store the drafts: (the result as `outbox.Flight` describes it, logits_MV, hidden_TH)."""
        p, verdict = self.parts, checked.verdict
        stored = p.state.store_drafts(checked.verified, proposal, p.target.config.vocab_size)
        columns = (verdict.num_emitted_R, checked.draft_count_R, *stored)
        result_RX = torch.cat((verdict.tokens_RW, torch.stack(columns, 1)), dim=1)
        return result_RX, checked.logits_MV, checked.hidden_TH

    def _target(
        self,
        most_rows: int,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        ends_T: Tensor,
        sampled_M: Tensor,
    ) -> tuple[Tensor, ...]:
        """One target pass: logits of the sampled rows, hidden state of all, the drafter's taps."""
        p = self.parts
        attn = PagedAttention(
            p.ops, p.backend, p.cache, Rows(positions_T, slots_T, ends_T, most_each=most_rows)
        )
        out = p.target(tokens_T, attn, p.spec.taps.layers, p.spec.taps.final)
        return (p.target.logits(p.ops.gather(out.hidden_TH, sampled_M)), out.hidden_TH, *out.taps)

    @torch.inference_mode(False)
    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or aborted. What is in flight for it is dropped when it arrives."""
        slot = self.parts.scheduler.finish(sequence)
        if slot >= 0:
            self._vacate(slot)

    def settle(self) -> None:
        """Wait for what is in flight, for its effect on sequences alone."""
        self._deliver(0)

    def _deliver(self, num_ahead: int) -> list[Emission]:
        """Bring passes home until at most `num_ahead` are in flight."""
        p, emissions = self.parts, []
        while len(self._flights) > num_ahead:
            arrived, broken = deliver(self._flights.popleft())
            for emission in arrived:
                self._account(emission)
                if emission.finish_reason is not None:
                    self.finish(emission.sequence)
            if broken and p.guard is not None:
                p.guard.count_bad_ids(len(broken))
            for s in broken:
                s.draft_broken = bool(p.spec.kv)
            emissions += arrived
        if p.guard is not None:
            self.stats.num_drafter_faults = p.guard.num_faults
            self.stats.last_drafter_fault = p.guard.last_fault
        return emissions

    def _place(self, plan: Plan) -> None:
        """Carry out what the plan decided about slots and pages."""
        p = self.parts
        for slot, _ in plan.preempted:
            self._vacate(slot)
            self.stats.num_preemptions += 1
        for s in plan.admitted:
            p.state.admit(s.slot, s.tokens, s.num_computed, s.limit)
            p.table.admit(s.slot, s.params, s.row_seed, s.num_prompt, s.stop_ids, s.bad_words_ids)
            if p.guard is not None:
                p.guard.call("admit", s.slot, list(s.tokens), s.num_computed)
            self.stats.num_cached_tokens += s.num_computed
        for work in plan.work:
            s = work.sequence
            p.state.set_blocks(s.slot, s.blocks)
        fresh, p.scheduler.fresh_blocks = p.scheduler.fresh_blocks, []
        if fresh and p.draft_cache.layers:
            p.draft_cache.zero(upload(fresh, p.state.device))

    def _vacate(self, slot: int) -> None:
        self.parts.state.release(slot)
        self.parts.table.release(slot)
        if self.parts.guard is not None:
            self.parts.guard.call("release", slot)

    def _wanted(self, plan: Plan) -> list[int]:
        """Drafts to ask for after this pass, per request of the plan; 0 where its prompt is not through."""
        p = self.parts
        if p.guard is None or p.guard.off:
            return [0] * len(plan.work)
        asked = [w.sequence for w in plan.work if w.num_sampled and not w.sequence.draft_broken]
        numbers = dict(zip(map(id, asked), p.policy.choose(asked), strict=True))
        return [numbers.get(id(w.sequence), 0) for w in plan.work]

    def _propose(self, verified: Verified, num_drafts: int) -> Guarded:
        guard = self.parts.guard
        return Guarded(no_proposal(verified)) if guard is None else guard.propose(verified, num_drafts)

    def _account(self, emission: Emission) -> None:
        self.stats.num_generated_tokens += len(emission.token_ids)
        if emission.is_round:
            self.stats.speculation.record(emission.num_drafted, emission.num_accepted)
        if emission.num_drafted:
            self.parts.policy.verified(emission.sequence, emission.num_drafted, emission.num_accepted)

    def _clock(self, plan: Plan, num_drafts: int, target_seconds: float, draft_seconds: float) -> None:
        self.stats.target_seconds += target_seconds
        self.stats.draft_seconds += draft_seconds
        if self.parts.num_ahead:  # what the host sees then is how long a launch takes
            return
        if all(w.num_rows == w.num_sampled for w in plan.work):  # prompts say nothing about decoding
            num_rows = sum(w.num_rows for w in plan.work)
            self.parts.policy.timed(num_rows, num_drafts, target_seconds, draft_seconds)
