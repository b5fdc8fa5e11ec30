"""Which rows the next pass computes: continuous batching, chunked prefill, preemption. Host only; knows no tensors.

There are no phases. A sequence has so many known tokens to compute, one while decoding, and its drafts on top when all
of those fit; the pass takes as many as the token budget and the pages allow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from draftproof.cache.pages import PageAllocator
from draftproof.engine.sequence import Sequence


@dataclass(slots=True)
class Work:
    """One sequence's rows in a pass: `num_rows`, of which the last `num_sampled` are sampled (0 in mid-prefill).

    `start`: position of the first, an upper bound while an earlier pass is in flight.
    """

    sequence: Sequence
    start: int
    num_rows: int
    num_sampled: int


@dataclass(slots=True)
class Plan:
    """One pass. `stalled`: somebody must be preempted, and may only be when no pass is in flight: plan again then."""

    work: list[Work] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[tuple[int, Sequence]] = field(default_factory=list)  # slot it had, sequence
    stalled: bool = False


class Scheduler:
    """Running sequences first, in order of arrival; then waiting ones, while slots, budget and pages last.

    `num_lookahead` is how many positions past its rows a sequence needs pages for: what drafting may write.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        num_lookahead: int,
    ) -> None:
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.fresh_blocks: list[int] = []  # handed out since somebody last took this list: to be cleared
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.max_num_batched_tokens = max_num_batched_tokens
        self._num_lookahead = num_lookahead

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """The next pass; no work only when nothing is waiting or running."""
        plan = Plan()
        budget = self.max_num_batched_tokens
        for sequence in list(self.running):
            self._register_pages(sequence)
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence not in self.running:  # preempted by an earlier one of this very loop
                continue
            budget -= self._schedule(sequence, budget, plan, may_preempt=True)
            if plan.stalled:
                return Plan(stalled=True)
        while self.waiting and self._free_slots and budget > 0 and not plan.preempted:
            if not self._admit(self.waiting[0], budget, plan):
                break
            budget -= self._schedule(self.waiting.popleft(), budget, plan, may_preempt=False)
        assert plan.work or not (self.running or self.waiting), "nothing could be scheduled"
        return plan

    def finish(self, sequence: Sequence) -> int:
        """Take a sequence out, wherever it is; the slot it had, or -1."""
        slot = sequence.slot
        if slot >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        return slot

    def restart(self) -> list[int]:
        """Everybody waits again with nothing computed, and nothing is cached; the slots that were in use."""
        slots = [s.slot for s in self.running]
        going_on = [s for s in (*self.running, *self.waiting) if s.finish_reason is None]
        self.waiting = deque(dict.fromkeys(going_on))
        self.running, self.fresh_blocks = [], []
        for sequence in self.waiting:
            _reset(sequence)
        self._free_slots = list(range(self._num_slots - 1, -1, -1))
        self.pages.clear()
        return slots

    def _admit(self, sequence: Sequence, budget: int, plan: Plan) -> bool:
        """Give it a slot, the pages of its cached prefix and room for its first rows; False if there is none."""
        assert not sequence.blocks
        found = self.pages.match(sequence.tokens if sequence.reads_prefix_cache else [])
        num_cached = len(found.blocks) * self.pages.block_size
        num_rows = min(budget, len(sequence.tokens) - num_cached)
        missing = self._blocks_for(sequence, num_cached + num_rows) - len(found.blocks)
        fresh = self.pages.allocate(missing)
        if fresh is None:
            self.pages.release(found.blocks)
            return False
        sequence.blocks = found.blocks + fresh
        sequence.num_registered = len(found.blocks)
        sequence.node = found.node
        sequence.num_computed = num_cached
        sequence.num_cached = max(sequence.num_cached, num_cached)
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        plan.admitted.append(sequence)
        self.fresh_blocks += fresh
        return True

    def _schedule(self, sequence: Sequence, budget: int, plan: Plan, *, may_preempt: bool) -> int:
        """Add the sequence's rows to the plan; how many. Drafts are dropped sooner than anybody is preempted."""
        num_known, start = sequence.num_to_compute, sequence.num_computed + sequence.num_pending
        num_rows = min(budget, num_known + sequence.num_drafts)
        if not self._grow(sequence, start + num_rows):
            num_rows = min(budget, num_known)
            while not self._grow(sequence, start + num_rows):
                assert may_preempt, "admission made room for the first rows"
                if any(s.num_pending for s in self.running):
                    plan.stalled = True
                    return 0
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is sequence:
                    return 0
        plan.work.append(Work(sequence, start, num_rows, max(0, num_rows - num_known + 1)))
        return num_rows

    def _grow(self, sequence: Sequence, num_positions: int) -> bool:
        missing = self._blocks_for(sequence, num_positions) - len(sequence.blocks)
        fresh = self.pages.allocate(max(0, missing))
        if fresh is None:
            return False
        sequence.blocks += fresh
        self.fresh_blocks += fresh
        return True

    def _blocks_for(self, sequence: Sequence, num_positions: int) -> int:
        """Pages for the pass's rows and for what drafting after it may write, never past the sequence's limit."""
        end = min(num_positions + self._num_lookahead, sequence.limit)
        return -(-end // self.pages.block_size)

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Its pages go back, its tokens stay: it is computed again later, to the same bits."""
        plan.work = [w for w in plan.work if w.sequence is not victim]
        if victim in plan.admitted:
            plan.admitted.remove(victim)
        plan.preempted.append((victim.slot, victim))
        self.waiting.appendleft(victim)
        self.running.remove(victim)
        self._release(victim)
        victim.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        _reset(sequence)

    def _register_pages(self, sequence: Sequence) -> None:
        """Full pages become shareable; not where a drafter's fault left a hole in the draft layers."""
        page_end = (sequence.num_registered + 1) * self.pages.block_size
        if page_end > sequence.num_computed or sequence.draft_broken:
            return
        # a drafter knows one token more than was computed, not the whole prompt
        num_seen = min(len(sequence.tokens), sequence.num_computed + 1)
        while page_end <= sequence.num_computed and self.pages.can_register(
            num_seen, sequence.num_registered
        ):
            page = sequence.num_registered
            sequence.node = self.pages.register(sequence.blocks[page], sequence.node, sequence.tokens, page)
            sequence.num_registered += 1
            page_end += self.pages.block_size


def _reset(sequence: Sequence) -> None:
    sequence.slot = -1
    sequence.blocks = []
    sequence.num_computed = sequence.num_pending = sequence.num_drafts = sequence.num_registered = 0
    sequence.num_scored = len(sequence.prompt_logprobs)
    sequence.draft_broken = False
