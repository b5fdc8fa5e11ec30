"""The core's dealings with its policy: who is asked for drafts, who sees a step, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftproof.engine.in_flight import InFlightStep
from draftproof.engine.interface import RowResult, Runner
from draftproof.engine.policy import Policy
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import PlannedRows, Scheduler

PLAIN_EVERY = 8  # steps without drafts are alike: the policy hears of one in so many


class Drafting:
    """Asks `policy` where there is a drafter to be asked, and tells it what steps took that say something."""

    def __init__(self, runner: Runner, scheduler: Scheduler, policy: Policy) -> None:
        self.policy = policy
        self._runner = runner
        self._scheduler = scheduler
        self._last_result = 0.0  # when a step's result was last taken in: seconds of `time.perf_counter`

    def wanted(self, rows: Sequence[PlannedRows]) -> list[int]:
        """Drafts to ask for after a step of these rows, per request; 0 where its prompt is not through."""
        if not self._runner.num_drafts or self._runner.drafter_health().off:
            return [0] * len(rows)
        able = [r for r in rows if r.num_sampled and r.request.can_draft]
        asked = [r.request for r in able if not self._is_prompt(r) or self.will_draft(r.request)]
        num_others = len(rows) - len(asked)
        chosen = zip(asked, self.policy.choose(asked, num_others), strict=True)
        numbers = {id(request): request.at_most(number) for request, number in chosen}
        return [numbers.get(id(r.request), 0) for r in rows]

    def price(self, wanted: Sequence[int]) -> float:
        """What a drafter that estimates may be told of the next pass's rows; 0 where it makes no drafts."""
        return self.policy.price() if self._runner.drafter_estimates and any(wanted) else 0.0

    def may_rest(self, rows: Sequence[PlannedRows], wanted: Sequence[int]) -> bool:
        """Whether the drafter has nothing to do: nobody has drafts or wants any, and prompts do without it."""
        runner = self._runner
        if not runner.num_drafts or not runner.drafter_may_rest:
            return False
        if any(wanted) or any(r.num_sampled > 1 for r in rows):
            return False
        if not runner.drafter_has_kv:
            return True
        prompts = [r for r in rows if self._is_prompt(r) and r.request.can_draft]
        return not any(self.will_draft(r.request) for r in prompts)

    def _is_prompt(self, rows: PlannedRows) -> bool:
        """Whether the drafter could do without these rows if it is to draft nothing for their request."""
        return self._runner.drafter_has_kv and rows.num_rows > rows.num_sampled

    def will_draft(self, request: Progress, num_lost: int = 0) -> bool:
        """Whether a prompt is to be shown to the drafter, by how many will decode beside it before long, and by how
        many cached tokens the target would have to compute again for that."""
        runner = self._runner
        if not runner.num_drafts or runner.drafter_health().off or request.spec.most_drafts == 0:
            return False
        return self.policy.will_draft(request, self._scheduler.num_soon - 1, num_lost)

    def finished(
        self, flight: InFlightStep, results: Sequence[RowResult], *, was_wanted: bool, num_steps: int
    ) -> None:
        """What a step took in which everybody decoded: prompts say nothing about decoding, nor do steps whose parts are
        yet to be recorded, nor those that ran ahead of somebody's end (not `was_wanted`): where it was everybody's, the
        device may have been idle ever since. `num_steps`: how many there have been.

        Where steps overlap it is the time since the result before it. A step that was launched on an idle device counts
        from its planning, if it could not overlap; else it says nothing about those that do.
        """
        now, before = time.perf_counter(), self._last_result
        self._last_result = now
        is_ahead = self._runner.async_depth > 0
        is_late = is_ahead and flight.start > before
        if not self._runner.num_drafts or not was_wanted or is_late or flight.pending.is_warming:
            return
        if flight.without_drafter and num_steps % PLAIN_EVERY:
            return
        if flight.has_prompts:
            self._prompted(flight)
            return
        seconds = now - (before if is_ahead else flight.start)
        pending = flight.pending
        passes = seconds if is_ahead else pending.target_seconds + pending.draft_seconds
        self.policy.finished(flight.outcome(results, seconds, max(0.0, seconds - passes)))

    def _prompted(self, flight: InFlightStep) -> None:
        """What the drafter took for a step with prompts, where the host's clock says so."""
        if not self._runner.async_depth and not flight.without_drafter:
            num_rows = sum(s.num_rows for s in flight.scheduled)
            self.policy.prompted(num_rows, flight.pending.draft_seconds)
