"""Chooses the rows of the next pass: continuous batching, chunked prefill, preemption. Host only, no tensors.

There is no prefill or decode phase. A request has a number of known tokens to compute (one while decoding), followed
by its drafts; a pass takes as many of these rows as the token budget and the free pages allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from draftproof.cache.pages import PageAllocator
from draftproof.cache.windows import WindowPages, usable_by_all
from draftproof.engine.interface import ScheduledRequest
from draftproof.engine.progress import Progress, WindowBlocks


@dataclass(slots=True)
class PlannedRows:
    """One request's rows in a pass: `num_rows`, of which the last `num_sampled` are sampled (0 in mid-prefill).

    `start`: position of the first, an upper bound while an earlier pass is in flight.
    """

    request: Progress
    start: int
    num_rows: int
    num_sampled: int

    def scheduled(self, num_drafts: int) -> ScheduledRequest:
        """The rows as `StepInput` has them; `num_drafts` are wanted after the pass."""
        spec = self.request.spec
        return ScheduledRequest(
            slot=self.request.slot,
            start=self.start,
            num_rows=self.num_rows,
            num_sampled=self.num_sampled,
            num_drafts=num_drafts,
            num_logprobs=spec.params.logprobs,
            scored=self.request.scored_rows(self.start, self.num_rows),
            num_prompt_logprobs=spec.prompt_logprobs or 0,
        )


@dataclass(slots=True)
class SchedulerOutput:
    """One pass. `stalled`: a request must be preempted, which is allowed only once no pass is in flight; plan again
    then."""

    rows: list[PlannedRows] = field(default_factory=list)
    admitted: list[Progress] = field(default_factory=list)
    num_preempted: int = 0
    stalled: bool = False


class Scheduler:
    """Schedules running requests first, in order of admission; then waiting ones, by priority and arrival, while slots,
    budget and pages last. A choice waits while another choice computes their common prompt. Priority orders admission
    only: no request is preempted for it.

    `num_lookahead`: positions past its rows for which a request needs pages, since drafting may write them. Released
    slots and new blocks collect in `released` and `fresh_blocks` until the core puts them into a `StepInput`.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        num_lookahead: int,
        windows: Sequence[WindowPages] = (),
    ) -> None:
        """windows: the blocks of windowed layers, one entry per window; `pages`: those of all other layers."""
        self.pages = pages
        self.windows = tuple(windows)
        self.waiting: deque[Progress] = deque()
        self.running: list[Progress] = []
        self.held: list[Progress] | None = None  # all other requests, between `isolate` and `rejoin`
        # Whether a new request is to have drafts although `num_lost` of its cached tokens must be recomputed for that:
        # a prefix that the drafter has not seen serves the target only.
        self.will_draft: Callable[[Progress, int], bool] = lambda request, num_lost: False
        self.has_lookups = False  # some of several drafters have no keys that such a prefix could lack
        self.fresh_blocks: list[int] = []
        self.released: list[int] = []
        self.max_num_batched_tokens = max_num_batched_tokens
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_lookahead = num_lookahead

    def add(self, request: Progress) -> None:
        if self.held is None:
            self._wait(request)
        else:
            self.held.append(request)

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting or self.held)

    @property
    def num_soon(self) -> int:
        """Requests that have a slot, or will have one as soon as their rows fit into a pass."""
        return min(self._num_slots, len(self.running) + len(self.waiting))

    @property
    def num_decoding(self) -> int:
        """Requests with a slot that have an output already."""
        return sum([request.num_outputs > 0 for request in self.running])

    def schedule(self) -> SchedulerOutput:
        """Plan the next pass. It has no rows only if no request is waiting or running."""
        output = SchedulerOutput()
        budget = self.max_num_batched_tokens
        for request in self.running:
            self._register_pages(request)
            self._give_back(request)
        for request in list(self.running):
            if budget <= 0:
                break
            if request.slot < 0:  # preempted earlier in this loop
                continue
            budget -= self._schedule(request, budget, output, may_preempt=True)
            if output.stalled:
                return SchedulerOutput(stalled=True)
        for request in list(self.waiting) if self._free_slots else ():
            if not self._free_slots or budget <= 0 or output.num_preempted:
                break
            if self._is_computed_by_another(request):
                continue
            if not self._admit(request, budget, output):
                break
            self.waiting.remove(request)
            budget -= self._schedule(request, budget, output, may_preempt=False)
        assert output.rows or not (self.running or self.waiting), "nothing could be scheduled"
        return output

    def finish(self, request: Progress, *, is_over: bool) -> None:
        """Remove a request, wherever it is. `is_over`: it ended normally, so its full pages may be registered."""
        if request.slot >= 0:
            self.running.remove(request)
            if is_over:
                self._register_pages(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif self.held is not None and request in self.held:
            self.held.remove(request)

    def recompute_all(self, *, keep_cache: bool) -> None:
        """Release all slots and queue all requests again with nothing computed, which repairs whatever state an
        interrupted step left here and on the device. `keep_cache`: keep the prefix cache."""
        everybody = dict.fromkeys([*self.running, *self.waiting, *(self.held or ())])
        if not keep_cache:
            self.pages.clear()
            for window in self.windows:
                window.clear()
        for request in everybody:
            if keep_cache:
                self._release_blocks(request)
            request.forget()
        self.waiting = _in_turn([r for r in everybody if r.finish_reason is None])
        self.running, self.fresh_blocks, self.held = [], [], None
        self.released = list(range(self._num_slots))
        self._free_slots = list(reversed(self.released))

    def isolate(self, group: Collection[Progress]) -> None:
        """Schedule only this group until `rejoin`. All requests give up their slots and blocks."""
        everybody = [*self.running, *self.waiting, *(self.held or ())]
        chosen = set(group)
        for request in self.running:
            self._release(request)
        self.running = []
        self.waiting = _in_turn([r for r in everybody if r in chosen])
        self.held = list(_in_turn([r for r in everybody if r not in chosen]))

    def rejoin(self) -> None:
        """Schedule all requests again."""
        if self.held is not None:
            self.waiting = _in_turn([*self.waiting, *self.held])
            self.held = None

    def _is_computed_by_another(self, request: Progress) -> bool:
        """Whether a running request is computing the same prompt, whose pages can then be shared. Recognises choices of
        one user request, whose prompt is the same list object."""
        prompt, size = request.spec.token_ids, self.pages.block_size
        num_pages = (len(prompt) - 1) // size
        if not num_pages or not self.pages.sharing or not request.spec.reads_prefix_cache:
            return False
        return any(r.num_computed < num_pages * size and r.spec.token_ids is prompt for r in self.running)

    def _admit(self, request: Progress, budget: int, output: SchedulerOutput) -> bool:
        """Give it a slot, the pages of its cached prefix and blocks for its first rows. False if there are too few."""
        assert not request.blocks
        contents = request.contents if request.spec.reads_prefix_cache else []
        num_lost = self.pages.num_unseen(contents)
        found = self.pages.match(contents, with_drafts=num_lost > 0 and self.will_draft(request, num_lost))
        self.pages.shorten(found, usable_by_all(self.windows, found.nodes))
        num_cached = len(found.blocks) * self.pages.block_size
        num_rows = request.whole_rows(num_cached, min(budget, len(request.tokens) - num_cached))
        request.blocks = found.blocks
        for window in self.windows:
            blocks = window.hold(found.nodes)
            request.windows.append(WindowBlocks(blocks, num_gone=blocks.count(0)))
        request.num_registered = len(found.blocks)
        if not self._grow(request, num_cached + num_rows):
            self._release_blocks(request)
            request.forget()
            return False
        request.node = found.node
        request.num_computed = num_cached
        request.num_cached = max(request.num_cached, num_cached)
        request.draft_hole = found.draft_hole
        request.is_hole_partial = found.draft_hole is not None and self.has_lookups
        request.slot = self._free_slots.pop()
        self.running.append(request)
        output.admitted.append(request)
        return True

    def _schedule(self, request: Progress, budget: int, output: SchedulerOutput, *, may_preempt: bool) -> int:
        """Add the request's rows to the pass; returns how many. Drafts are dropped before a request is preempted."""
        num_known, start = request.num_to_compute, request.num_computed + request.num_pending
        num_rows = request.whole_rows(start, min(budget, num_known + request.num_drafts))
        if not self._grow(request, start + num_rows):
            num_rows = request.whole_rows(start, min(budget, num_known))
            while not self._grow(request, start + num_rows):
                assert may_preempt, "admission made room for the first rows"
                if any(r.num_pending for r in self.running):
                    output.stalled = True
                    return 0
                victim = self.running[-1]
                self._preempt(victim, output)
                if victim is request:
                    return 0
        output.rows.append(PlannedRows(request, start, num_rows, max(0, num_rows - num_known + 1)))
        return num_rows

    def _grow(self, request: Progress, num_positions: int) -> bool:
        missing = max(0, self._blocks_for(request, num_positions) - len(request.blocks))
        if min([self.pages.num_free, *(window.num_free for window in self.windows)]) < missing:
            return False
        fresh = _allocated(self.pages, missing)
        request.blocks += fresh
        self.fresh_blocks += fresh
        for window, held in zip(self.windows, request.windows, strict=True):
            held.blocks += _allocated(window, missing)
        return True

    def _give_back(self, request: Progress) -> None:
        """Release window blocks that no further row of the request sees. Safe with passes in flight: they read the
        blocks before a later pass can write to them."""
        for window, held in zip(self.windows, request.windows, strict=True):
            window.release(held.give_back(window.first_page(request.num_computed)))

    def _release_blocks(self, request: Progress) -> None:
        self.pages.release(request.blocks)
        # a waiting request has no entries in `windows`
        for window, held in zip(self.windows, request.windows, strict=False):
            window.release(held.held())

    def _blocks_for(self, request: Progress, num_positions: int) -> int:
        """Number of pages for the pass's rows and for what drafting may write after them, within the request's
        limit."""
        end = min(num_positions + self._num_lookahead, request.spec.limit)
        return -(-end // self.pages.block_size)

    def _preempt(self, victim: Progress, output: SchedulerOutput) -> None:
        """Release the victim's pages and queue it again; its tokens are kept and recomputed later, to the same bits."""
        output.rows = [rows for rows in output.rows if rows.request is not victim]
        if victim in output.admitted:
            output.admitted.remove(victim)
        output.num_preempted += 1
        self._wait(victim)
        self.running.remove(victim)
        self._release(victim)
        victim.num_preemptions += 1

    def _wait(self, request: Progress) -> None:
        turn, place = request.turn, len(self.waiting)
        while place and self.waiting[place - 1].turn > turn:
            place -= 1
        self.waiting.insert(place, request)

    def _release(self, request: Progress) -> None:
        self._release_blocks(request)
        self._free_slots.append(request.slot)
        self.released.append(request.slot)
        request.forget()

    def _register_pages(self, request: Progress) -> None:
        """Register full pages in the prefix cache, each with whether the draft layers are complete there."""
        page_end = (request.num_registered + 1) * self.pages.block_size
        if page_end > request.num_computed:
            return
        # a drafter that reads further ahead computed the rows just before a hole from drafts, not from known tokens
        margin = max(0, self.pages.lookahead - 1)
        # a drafter has seen one token more than was computed, not the whole prompt
        num_seen = min(len(request.tokens), request.num_computed + 1)
        contents = request.contents
        while page_end <= request.num_computed and self.pages.can_register(num_seen, request.num_registered):
            page = request.num_registered
            request.node = self.pages.register(
                request.blocks[page],
                request.node,
                contents,
                page,
                has_drafts=request.draft_hole is None or page_end + margin <= request.draft_hole,
                token_ids=request.tokens,
            )
            for window, held in zip(self.windows, request.windows, strict=True):
                if self.pages.sharing and held.blocks[page]:
                    window.register(held.blocks[page], request.node)
            request.num_registered += 1
            page_end += self.pages.block_size


def _allocated(group: PageAllocator | WindowPages, count: int) -> list[int]:
    blocks = group.allocate(count)
    assert blocks is not None, "there were so many"
    return blocks


def _in_turn(requests: list[Progress]) -> deque[Progress]:
    return deque(sorted(requests, key=lambda request: request.turn))
