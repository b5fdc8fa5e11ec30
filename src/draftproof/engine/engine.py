"""The engine's step: plan, compute, verify, commit, draft. Everything it needs is handed to it.

Shapes: R requests of a pass, T its rows, M its sampled rows, W drafts + 1, K drafts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.cache.pages import PageAllocator
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import DraftSpec, Verified
from draftproof.drafters.guard import Guard
from draftproof.engine.outbox import Emission, Outbox
from draftproof.engine.policy import Policy
from draftproof.engine.scheduler import Plan, Scheduler
from draftproof.engine.sequence import Sequence
from draftproof.engine.state import Batch, State
from draftproof.kernels.ops import Ops
from draftproof.metrics import EngineStats
from draftproof.models.decoder import Decoder
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.verifier import Verifier


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
    outbox: Outbox
    stats: EngineStats = field(default_factory=EngineStats)


class Engine:
    """Runs sequences to their end, a pass a step. Knows no text."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.stats = parts.stats

    def add(self, sequence: Sequence) -> None:
        self.parts.scheduler.add(sequence)

    @property
    def has_work(self) -> bool:
        scheduler = self.parts.scheduler
        return bool(scheduler.running or scheduler.waiting)

    def step(self) -> list[Emission]:
        """One pass over what the scheduler plans; what it added to each sequence."""
        plan = self.parts.scheduler.plan()
        self.place(plan)
        emissions = self.run(plan, self._wanted(plan))
        for emission in emissions:
            if emission.finish_reason is not None:
                self.finish(emission.sequence)
        return emissions

    def run(self, plan: Plan, wanted: list[int]) -> list[Emission]:
        """Compute the plan's rows, verify, commit, draft `wanted` tokens for each of its requests."""
        p, start = self.parts, time.perf_counter()
        batch = p.state.fill(plan)
        rows, tokens_SL = batch.rows, p.state.slots.tokens_SL
        attn = PagedAttention(p.ops, p.backend, p.cache, Rows(rows.positions_T, rows.slots_T, rows.ends_T))
        out = p.target(rows.tokens_T, attn, p.spec.taps.layers, p.spec.taps.final)
        logits_MV = p.target.logits(out.hidden_TH.index_select(0, rows.sampled_M))
        verdict = p.verifier.verify(
            logits_MV, rows.slots_M, rows.positions_M, tokens_SL, batch.slots_host, batch.verify
        )
        verified = p.state.commit(batch, verdict, out.taps, p.verifier.drawer, wanted)
        middle = time.perf_counter()
        self._propose(plan, batch, verified, max(wanted, default=0))
        end = time.perf_counter()
        emissions = p.outbox.deliver(plan, verdict, logits_MV, out.hidden_TH)
        self._account(plan, emissions, max(wanted, default=0), (start, middle, end))
        return emissions

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or aborted."""
        p = self.parts
        slot = p.scheduler.finish(sequence)
        if slot >= 0:
            self._vacate(slot)

    def place(self, plan: Plan) -> None:
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
        if plan.fresh_blocks and p.draft_cache.layers:
            p.draft_cache.zero(torch.tensor(plan.fresh_blocks, device=p.state.device))

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

    def _propose(self, plan: Plan, batch: Batch, verified: Verified, num_drafts: int) -> None:
        guard = self.parts.guard
        if guard is None or guard.off:
            for work in plan.work:
                work.sequence.num_drafts = 0
            return
        guarded = guard.propose(verified, num_drafts)
        self.parts.state.store_drafts(batch.verify.slots_R, guarded.proposal)
        for work, count in zip(plan.work, guarded.proposal.count_R.tolist(), strict=True):
            work.sequence.num_drafts = count
        for r in guarded.broken:
            plan.work[r].sequence.draft_broken |= bool(self.parts.spec.kv)
        self.stats.num_drafter_faults = guard.num_faults

    def _account(
        self, plan: Plan, emissions: list[Emission], num_drafts: int, times: tuple[float, float, float]
    ) -> None:
        p, stats, (start, middle, end) = self.parts, self.stats, times
        stats.num_steps += 1
        stats.target_seconds += middle - start
        stats.draft_seconds += end - middle
        stats.step_seconds += time.perf_counter() - start
        for e in emissions:
            stats.num_generated_tokens += len(e.token_ids)
            if e.is_round:
                stats.speculation.record(e.num_drafted, e.num_accepted)
            if e.num_drafted:
                p.policy.verified(e.sequence, e.num_drafted, e.num_accepted)
        if all(w.num_sampled for w in plan.work):  # a chunk of a prompt says nothing about decoding
            num_rows = sum(w.num_rows for w in plan.work)
            p.policy.timed(num_rows, num_drafts, middle - start, end - middle)
