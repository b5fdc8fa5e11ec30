"""The host half of the engine: plan a step, have it run, take its results in. Sees ids and numbers, never a tensor.

One step, from above: `schedule` says which rows are computed, `runner.run` launches them, and the results of the step
before come out as deltas. A step that raises costs the request that caused it, and nobody else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftproof.cache.events import CacheEvent
from draftproof.engine.checks import check_request
from draftproof.engine.costs import StepOutcome
from draftproof.engine.interface import (
    NONE_LEFT,
    DeviceFaultError,
    LogprobRow,
    PendingStep,
    RequestSpec,
    Resumed,
    RowResult,
    Runner,
    ScheduledRequest,
    StepInput,
)
from draftproof.engine.policy import Policy
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import PlannedRows, Scheduler, SchedulerOutput
from draftproof.grammar.matcher import Matcher
from draftproof.metrics import DrafterStats, EngineLoad, EngineStats
from draftproof.types import FinishReason

PLAIN_EVERY = 8  # steps without drafts are alike: the policy hears of one in so many


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one request; the first `num_accepted` tokens were drafts.

    `is_round`: not the token that a prompt's last chunk gives. `drafter`: index of the one that made the drafts;
    `drafter_faults`: of those that failed the request, one entry a fault. `stop_reason`: the stop token's id, None for
    an end-of-text token. `error`: why it ended with finish_reason "error".
    `queue_seconds`: until it had a place.
    """

    id: str
    token_ids: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    is_round: bool = False
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    drafter: int = 0
    drafter_faults: list[int] = field(default_factory=list)
    queue_seconds: float = 0.0


@dataclass(slots=True)
class InFlightStep:
    """A launched step and the requests it is for, in the order of its results."""

    requests: list[Progress]
    scheduled: list[ScheduledRequest]
    pending: PendingStep
    start: float  # when it was planned: seconds of `time.perf_counter`
    without_drafter: bool = False


class EngineCore:
    """Runs requests to their end, a step at a time. One thread at a time may call it."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, policy: Policy, stats: EngineStats | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.policy = policy
        self.stats = stats or EngineStats()
        self.stats.drafters = [DrafterStats(name) for name in runner.drafter_names]
        self.error: str | None = None  # why the engine takes no more requests
        self._is_paused = False
        self._requests: dict[str, Progress] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._deltas: list[TokenDelta] = []
        self._step_requests: list[Progress] = []  # those in the step that is being made
        # Groups under suspicion of a fault, each request with its number of tokens then.
        self._trials: deque[list[tuple[Progress, int]]] = deque()
        self._is_result_lost = False  # a step's pages may be in the prefix cache, and its result never came
        self._is_shut_down = False
        self._num_arrived = 0
        self._num_matched = 0  # requests whose output follows a grammar
        scheduler.will_draft = self._will_draft
        self._last_result = 0.0  # when a step's result was last taken in: seconds of `time.perf_counter`

    def add_request(self, request_id: str, spec: RequestSpec, resumed: Resumed | None = None) -> None:
        """Queue a request. ValueError for one that cannot be computed, and for an id that is running; RuntimeError once
        the engine has ended. `resumed`: it goes on from there, token for token, and deltas have what is new."""
        if self.error is not None:
            raise RuntimeError(self.error)
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: is running already; give another")
        check_request(spec, self.runner.vocab_size, self.runner.max_model_len)
        request = Progress(id=request_id, spec=spec, arrival=self._num_arrived, tokens=list(spec.token_ids))
        if spec.grammar is not None:
            request.matcher = spec.grammar.matcher()
            self._num_matched += 1
        if resumed is None:
            self.stats.num_prompt_tokens += len(spec.token_ids)
        else:
            request.resume(resumed)
        self._queue(request)

    def abort(self, request_id: str) -> None:
        """Take a request out; an id that is not running is ignored. What is in flight for it is dropped."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and whose results have not been taken in."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return not self.scheduler.is_idle or bool(self._in_flight or self._deltas)

    @property
    def is_due(self) -> bool:
        """Whether a step has something to do: rows, results on their way, or slots to give back; once the engine has
        ended, whether somebody has not been told."""
        if self.error is not None:
            return self.has_work
        return not self._is_paused and (self.has_work or bool(self.scheduler.released))

    def set_paused(self, is_paused: bool) -> None:
        """While it is paused no step is due; requests are taken and wait."""
        self._is_paused = is_paused

    def wake(self) -> None:
        """Called by any thread when there is something to do between two steps: no step of this engine waits for
        another's doing, so none is to be woken."""

    def loads(self) -> list[EngineLoad]:
        """What the engine is at; one entry."""
        pages = self.scheduler.pages
        return [
            EngineLoad(
                stats=self.stats,
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_free_blocks=pages.num_free,
                num_blocks=pages.num_blocks - 1,
                block_size=pages.block_size,
            )
        ]

    def keep_cache_events(self) -> None:
        """From now on note what happens in the prefix cache, for `take_cache_events`."""
        self.scheduler.pages.keep_events()

    def take_cache_events(self) -> list[CacheEvent]:
        """What has happened in the prefix cache since this was last asked."""
        return self.scheduler.pages.take_events()

    def step(self) -> list[TokenDelta]:
        """One step; what the steps that came back added to their requests."""
        if self.error is None:
            start = time.perf_counter()
            self._guarded(self._step)
            self.stats.num_steps += 1
            self.stats.step_seconds += time.perf_counter() - start
        deltas, self._deltas = self._deltas, []
        return deltas

    def drain(self) -> None:
        """Wait for what is in flight; its deltas come with the next step's."""
        if self.error is None:
            self._guarded(lambda: self._take_in(0))

    def reset_prefix_cache(self) -> None:
        """Forget what prompts that start alike have in common; what runs is computed again, to the same bits."""
        self.drain()
        self.recompute_all()

    def recompute_all(self) -> None:
        """Trust nothing computed: everybody is computed again from its ids, and nothing is cached."""
        self._trials.clear()
        self._recompute(keep_cache=False)

    def shutdown(self) -> None:
        """End: requests that still run get no answer, and the runner gives its memory back."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.error = self.error or "the engine has been shut down"
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._finish(request, "abort")
        self._deltas = []
        self.runner.shutdown()

    def draft(self, spec: RequestSpec, num_drafts: int) -> list[int]:
        """What the drafter would propose after the spec's last token, without generating anything.

        All tokens but the last are computed, as a prompt's chunk; the last is known to follow them, as the next prompt
        token of a chunk is. Asking for drafts there is all that differs from an ordinary chunk. ValueError while other
        requests run, and as in `add_request`; RuntimeError once the engine has ended.
        """
        if not self.scheduler.is_idle:
            raise ValueError("draft: other requests are running; finish or close their streams first")
        self.drain()  # what is under way is of requests that have ended
        if self.error is not None:
            raise RuntimeError(self.error)
        check_request(spec, self.runner.vocab_size, self.runner.max_model_len)
        request = Progress(id="draft", spec=spec, arrival=self._num_arrived, tokens=list(spec.token_ids))
        self._queue(request)
        try:
            drafts = self._draft(request, num_drafts)
        except BaseException as error:
            self._finish(request, "abort")
            self.recompute_all()
            if isinstance(error, DeviceFaultError):
                self._end(str(error))
            raise
        self._finish(request, "abort")
        self._tell_releases()
        return drafts

    def _draft(self, request: Progress, num_drafts: int) -> list[int]:
        while True:
            output = self.scheduler.schedule()
            rows = output.rows[0]
            left = len(request.tokens) - 1 - request.num_computed
            is_last = rows.num_rows >= left
            chunk = PlannedRows(request, rows.start, min(rows.num_rows, left), 0)
            output, wanted = replace(output, rows=[chunk]), [num_drafts if is_last else 0]
            self._launch(output, wanted, time.perf_counter(), is_shown=True)
            self._take_in(0)
            if is_last:
                return self.runner.known_drafts(request.slot, len(request.tokens), request.num_drafts)

    # The step.

    def _step(self) -> None:
        start = time.perf_counter()
        self._step_requests = []
        self._choose_trial()
        if self._num_matched:  # what may follow depends on the tokens and drafts that are under way
            self._take_in(0)
            self._choose_drafts()
        output = self._schedule()
        wanted = self._wanted_drafts(output)
        self.stats.planning_seconds += time.perf_counter() - start
        if output.rows:
            self._launch(output, wanted, start)
        self._take_in(self.runner.async_depth if output.rows else 0)
        if self.scheduler.is_idle:
            self._tell_releases()

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        if output.stalled:
            self._take_in(0)
            output = self.scheduler.schedule()
        return output

    def _wanted_drafts(self, output: SchedulerOutput) -> list[int]:
        """Drafts to ask for after this step, per request; 0 where its prompt is not through."""
        if not self.runner.num_drafts or self.runner.drafter_health().off:
            return [0] * len(output.rows)
        able = [r for r in output.rows if r.num_sampled and r.request.can_draft]
        asked = [r.request for r in able if not self._is_prompt(r) or self._will_draft(r.request)]
        num_others = len(output.rows) - len(asked)
        chosen = zip(asked, self.policy.choose(asked, num_others), strict=True)
        numbers = {id(request): request.at_most(number) for request, number in chosen}
        return [numbers.get(id(r.request), 0) for r in output.rows]

    def _launch(
        self, output: SchedulerOutput, wanted: Sequence[int], planned: float, *, is_shown: bool = False
    ) -> None:
        """Hand the step to the runner, and count on what it will have done. `planned`: when its planning began;
        `is_shown`: the drafter sees the rows whatever they are worth."""
        start = time.perf_counter()
        step = self._step_input(
            output, wanted, without_drafter=not is_shown and self._can_do_without_drafter(output.rows, wanted)
        )
        requests = self._step_requests = [rows.request for rows in output.rows]
        for request in output.admitted:
            if request.queue_seconds is None:
                request.queue_seconds = start - request.queued
        pending = self.runner.run(step)
        is_missed = step.without_drafter and self.runner.drafter_has_kv
        for request, scheduled in zip(requests, step.scheduled, strict=True):
            if is_missed:
                request.miss_drafter(scheduled.start)
            elif pending.draft_state_lost:
                is_partial = scheduled.slot not in pending.undrafted_slots
                request.miss_drafter(scheduled.start, is_partial=is_partial)
            request.num_drafts = scheduled.num_drafts
            request.num_pending += scheduled.num_sampled
            request.num_computed += scheduled.num_rows - scheduled.num_sampled
            request.num_scored += scheduled.scored[1]
        self._in_flight.append(
            InFlightStep(requests, list(step.scheduled), pending, planned, step.without_drafter)
        )
        self.stats.target_seconds += pending.target_seconds
        self.stats.draft_seconds += pending.draft_seconds
        self.stats.num_preemptions += output.num_preempted
        self.stats.num_cached_tokens += sum(r.num_computed for r in step.admitted)
        self.stats.launch_seconds += time.perf_counter() - start

    def _step_input(
        self, output: SchedulerOutput, wanted: Sequence[int], *, without_drafter: bool
    ) -> StepInput:
        scheduler = self.scheduler
        scheduled = [
            _scheduled(rows, num_drafts) for rows, num_drafts in zip(output.rows, wanted, strict=True)
        ]
        step = StepInput(
            released=scheduler.released,
            admitted=[request.admission() for request in output.admitted],
            table_entries=[entry for rows in output.rows for entry in rows.request.new_entries()],
            fresh_blocks=scheduler.fresh_blocks,
            scheduled=scheduled,
            all_decode=all(r.num_rows == r.num_sampled == 1 + r.request.num_drafts for r in output.rows),
            without_drafter=without_drafter,
            price=self.policy.price() if self.runner.drafter_estimates and any(wanted) else 0.0,
            masks=[self._masks(rows) for rows in output.rows] if self._num_matched else (),
            forced=_forced(output.rows) if self._num_matched else (),
        )
        scheduler.released, scheduler.fresh_blocks = [], []
        return step

    def _choose_drafts(self) -> None:
        """Drafts of outputs that follow a grammar: they end where it refuses one, since the target will, too; and what
        it leaves no choice about takes their place, where there is a drafter for that. No pass is in flight."""
        for request in self.scheduler.running:
            matcher = request.matcher
            if matcher is None:
                continue
            request.forced, request.is_cut, request.drafts = [], False, []
            if request.num_drafts:
                waiting = self.runner.known_drafts(request.slot, len(request.tokens), request.num_drafts)
                request.drafts = waiting[: matcher.num_allowed(waiting)]
                request.is_cut = len(request.drafts) < len(waiting)
            forced = self._forced(request, matcher)
            if request.drafts[: len(forced)] != forced:
                request.forced, request.drafts, request.is_cut = forced, forced, False
                request.drafter = len(self.runner.drafter_names) - 1
            request.num_drafts = len(request.drafts)

    def _forced(self, request: Progress, matcher: Matcher) -> list[int]:
        """What must follow the output, as far as there is room for it."""
        most, spec = self.runner.most_forced, request.spec
        is_open = request.num_outputs > 0 and request.num_to_compute == 1
        if not most or not is_open:
            return []
        if spec.members and len(self.runner.drafter_names) - 1 not in spec.members:
            return []
        room = request.at_most(min(most, spec.limit - len(request.tokens) - 1))
        return matcher.forced(room) if room > 0 else []

    def _masks(self, rows: PlannedRows) -> bytes:
        """What the request's grammar lets each sampled row have. The matcher stays where it is: it follows the tokens
        that stand, and drafts are none yet."""
        request = rows.request
        if request.matcher is None or not rows.num_sampled:
            return b""
        return request.matcher.masks(request.drafts[: rows.num_sampled - 1], rows.num_sampled)

    def _can_do_without_drafter(self, rows: Sequence[PlannedRows], wanted: Sequence[int]) -> bool:
        """Whether the drafter has nothing to do: nobody has drafts or wants any, and prompts do without it."""
        runner = self.runner
        if not runner.num_drafts or not runner.drafter_may_rest:
            return False
        if any(wanted) or any(r.num_sampled > 1 for r in rows):
            return False
        if not runner.drafter_has_kv:
            return True
        prompts = [r for r in rows if self._is_prompt(r) and r.request.can_draft]
        return not any(self._will_draft(r.request) for r in prompts)

    def _is_prompt(self, rows: PlannedRows) -> bool:
        """Whether the drafter could do without these rows if it is to draft nothing for their request."""
        return self.runner.drafter_has_kv and rows.num_rows > rows.num_sampled

    def _will_draft(self, request: Progress, num_lost: int = 0) -> bool:
        """Whether a prompt is to be shown to the drafter, by how many will decode beside it before long, and by how
        many cached tokens the target would have to compute again for that."""
        if not self.runner.num_drafts or self.runner.drafter_health().off or request.spec.most_drafts == 0:
            return False
        return self.policy.will_draft(request, self.scheduler.num_soon - 1, num_lost)

    def _take_in(self, async_depth: int) -> None:
        """Process finished steps until at most `async_depth` remain in flight."""
        while len(self._in_flight) > async_depth:
            flight = self._in_flight.popleft()
            try:
                self._process(flight)
            except BaseException:
                self._step_requests = flight.requests
                self._in_flight.clear()  # what was launched after it builds on it
                self._is_result_lost = True
                raise
        self._count_drafter_faults()

    def _process(self, flight: InFlightStep) -> None:
        start = time.perf_counter()
        results = flight.pending.wait()
        self.stats.waiting_seconds += time.perf_counter() - start
        start = time.perf_counter()
        num_applied = 0
        for request, scheduled, result in zip(flight.requests, flight.scheduled, results, strict=True):
            if request.finish_reason is None and request.slot >= 0:
                self._apply(request, scheduled, result)
                num_applied += 1
        self.stats.results_seconds += time.perf_counter() - start
        self._tell_policy(flight, results, was_wanted=num_applied == len(results))

    def _count_drafter_faults(self) -> None:
        health = self.runner.drafter_health()
        self.stats.num_drafter_faults = health.num_faults
        self.stats.last_drafter_fault = health.last_fault
        for drafter, num_faults in zip(self.stats.drafters, health.faults_each, strict=False):
            drafter.num_faults = num_faults

    def _apply(self, request: Progress, scheduled: ScheduledRequest, result: RowResult) -> None:
        """A pass's effect on one request that is still there."""
        delta = TokenDelta(request.id, prompt_logprobs=result.prompt_logprobs, drafter=request.drafter)
        request.num_scores_out += len(result.prompt_logprobs)
        first = min(scheduled.start, request.num_computed)  # `start` is an upper bound where steps overlap
        if scheduled.num_sampled:
            request.num_pending -= scheduled.num_sampled
            self._emit(request, result, delta)
        if request.num_pending == 0:
            request.num_drafts = result.num_proposed
        request.drafter = result.drafter
        request.drafter_faults += result.drafter_faults
        if result.draft_state_lost:
            request.miss_drafter(first, is_partial=not result.nobody_drafts)
        num_asked = min(scheduled.num_drafts, request.spec.limit - len(request.tokens) - 1)
        if num_asked > 0 and delta.finish_reason is None:
            self.policy.proposed(request, num_asked, result.num_proposed)
        if delta.token_ids or delta.finish_reason is not None or delta.prompt_logprobs:
            delta.num_cached_tokens = request.num_cached
            delta.num_preemptions = request.num_preemptions
            delta.drafter_faults, request.drafter_faults = request.drafter_faults, []
            delta.queue_seconds = request.queue_seconds or 0.0
            self._deltas.append(delta)
        reason = delta.finish_reason
        if reason is None and result.failure:  # with no token of its own, which would be left out of the text
            reason = "stop"
            self._deltas.append(
                TokenDelta(request.id, finish_reason=reason, num_preemptions=request.num_preemptions)
            )
        if reason is not None:
            self._finish(request, reason)

    def _emit(self, request: Progress, result: RowResult, delta: TokenDelta) -> None:
        """Take over the tokens up to the one that ends the output, and count the round."""
        num_kept, delta.finish_reason, delta.stop_reason = stopping_point(
            request.spec, len(request.tokens), result.token_ids
        )
        if request.matcher is not None:
            request.matcher.advance(result.token_ids[:num_kept])
        if result.failure and delta.finish_reason is None:
            delta.error = _why_no_token(request, num_kept, result.failure)
            delta.finish_reason = None if delta.error is None else "error"
        num_accepted = len(result.token_ids) - (not result.failure)
        delta.is_round = request.num_outputs > 0
        delta.token_ids = result.token_ids[:num_kept]
        delta.logprobs = result.logprobs[:num_kept]
        delta.num_drafted, delta.num_accepted = result.num_drafted, min(num_accepted, num_kept)
        request.tokens += delta.token_ids
        request.num_computed = len(request.tokens) - 1
        self.stats.num_generated_tokens += num_kept
        if delta.is_round:
            self.stats.speculation.record(delta.num_drafted, delta.num_accepted)
        if delta.is_round and delta.num_drafted:
            of_drafter = self.stats.drafters[delta.drafter].speculation
            of_drafter.record(delta.num_drafted, delta.num_accepted)
        # what lies behind the end of the output was neither hit nor miss
        is_whole = num_kept == len(result.token_ids) and not result.failure
        num_observed = delta.num_drafted if is_whole else delta.num_accepted
        if is_whole and request.is_cut and num_observed == delta.num_accepted == len(request.drafts):
            num_observed += 1  # the grammar refused one before the target could
        if num_observed and not request.forced:  # which says nothing of other drafts
            self.policy.verified(request, num_observed, delta.num_accepted)

    def _tell_policy(self, flight: InFlightStep, results: Sequence[RowResult], *, was_wanted: bool) -> None:
        """What a step took in which everybody decoded: prompts say nothing about decoding, nor do steps whose parts are
        yet to be recorded, nor those that ran ahead of somebody's end (not `was_wanted`): where it was everybody's, the
        device may have been idle ever since.

        Where steps overlap it is the time since the result before it. A step that was launched on an idle device counts
        from its planning, if it could not overlap; else it says nothing about those that do.
        """
        now, before = time.perf_counter(), self._last_result
        self._last_result = now
        is_ahead = self.runner.async_depth > 0
        is_late = is_ahead and flight.start > before
        if not self.runner.num_drafts or not was_wanted or is_late or flight.pending.is_warming:
            return
        if flight.without_drafter and self.stats.num_steps % PLAIN_EVERY:
            return
        num_rows = num_drafts = num_tokens = context = 0
        for scheduled, result in zip(flight.scheduled, results, strict=True):
            if scheduled.num_rows != scheduled.num_sampled:
                self._tell_of_prompts(flight)
                return
            num_rows += scheduled.num_rows
            num_drafts = max(num_drafts, scheduled.num_drafts)
            num_tokens += len(result.token_ids)
            context += scheduled.start
        seconds = now - (before if is_ahead else flight.start)
        pending = flight.pending
        passes = seconds if is_ahead else pending.target_seconds + pending.draft_seconds
        host_seconds = max(0.0, seconds - passes)
        self.policy.finished(
            StepOutcome(len(results), num_rows, num_drafts, num_tokens, context, seconds, host_seconds)
        )

    def _tell_of_prompts(self, flight: InFlightStep) -> None:
        """What the drafter took for a step with prompts, where the host's clock says so."""
        if not self.runner.async_depth and not flight.without_drafter:
            num_rows = sum(s.num_rows for s in flight.scheduled)
            self.policy.prompted(num_rows, flight.pending.draft_seconds)

    # Requests that come and go.

    def _queue(self, request: Progress) -> None:
        self._num_arrived += 1
        self._requests[request.id] = request
        request.queued = time.perf_counter()
        self.scheduler.add(request)

    def _finish(self, request: Progress, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._num_matched -= request.matcher is not None
        self.scheduler.finish(request, is_over=reason in ("stop", "length"))
        self._requests.pop(request.id, None)

    def _tell_releases(self) -> None:
        """An idle engine keeps nothing on the device that belongs to somebody who has left."""
        if not self.scheduler.released or self._in_flight or self.error is not None:
            return
        released, self.scheduler.released = self.scheduler.released, []
        self._step_requests = []
        self.runner.run(StepInput(released=released))
        self._count_drafter_faults()

    # Steps that raise.

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do what may raise, so that whoever is to blame hears of it in a delta and nobody else does."""
        try:
            work()
        except DeviceFaultError as error:
            self._end(str(error))
        except Exception as error:
            self._after_failure(error)
        except BaseException:  # Ctrl-C, halfway through something
            self.recompute_all()
            raise

    def _after_failure(self, error: Exception) -> None:
        """Somebody's rows made a step raise: find out whose by halves, and let it alone pay.

        Everybody is computed again from its ids. A suspect is cleared once it has emitted the token that it was about
        to, and fails if its step raises again while nobody else is in it; every trial clears, halves or fails a group,
        so this ends.
        """
        failed = list(self._step_requests)
        try:
            self._take_in(0)
        except DeviceFaultError as fault:
            self._end(str(fault))
            return
        except Exception:  # the steps before are lost like this one, and computed again
            pass
        if (
            not failed and not self.scheduler.is_idle
        ):  # our own doing; where slots were taken back, nobody is hurt
            self.recompute_all()
            raise error
        tried = self._end_trial(failed)
        if len(failed) == 1 and tried == failed:
            reason = f"{type(error).__name__}: {error}"
            self._fail(failed[0], f"computing this request failed, and others are not affected: {reason}")
        else:
            marked = [(r, len(r.tokens)) for r in failed if r.finish_reason is None]
            half = (len(marked) + 1) // 2
            self._trials.extendleft(group for group in (marked[half:], marked[:half]) if group)
        # a failed step's pages are registered only once it has been launched
        self._recompute(keep_cache=not self._is_result_lost)

    def _end_trial(self, failed: Sequence[Progress]) -> list[Progress]:
        """Take the trial off the list in which these failed; who took part in it, nobody if they failed outside one."""
        if not self._trials:
            return []
        tried = [r for r, _ in self._trials[0]]
        if any(r not in tried for r in failed):
            return []
        self._trials.popleft()
        return [r for r in tried if r.finish_reason is None]

    def _recompute(self, *, keep_cache: bool) -> None:
        self._in_flight.clear()
        self._is_result_lost = False
        self.scheduler.recompute_all(keep_cache=keep_cache)

    def _choose_trial(self) -> None:
        """Isolate the first group in which somebody has not been cleared."""
        if not self._trials:
            return
        num_before = len(self._trials)
        while self._trials:
            group = [(r, mark) for r, mark in self._trials[0] if r.finish_reason is None]
            if any(len(r.tokens) <= mark for r, mark in group):
                break
            self._trials.popleft()
        if not self._trials:
            self.scheduler.rejoin()
        elif len(self._trials) < num_before or self.scheduler.held is None:
            self._take_in(0)
            self.scheduler.isolate([r for r, _ in self._trials[0]])

    def _fail(self, request: Progress, error: str) -> None:
        self._deltas.append(TokenDelta(request.id, finish_reason="error", error=error))
        self._finish(request, "error")

    def _end(self, reason: str) -> None:
        """The device is gone: everybody hears so, once."""
        self.error = f"the engine has ended: {reason}"
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._fail(request, self.error)


def _forced(rows: Sequence[PlannedRows]) -> list[tuple[int, int, list[int]]]:
    """Drafts of ours, as `StepInput.forced` has them, where there are rows for them."""
    return [
        (r.request.slot, len(r.request.tokens), r.request.forced[: r.num_sampled - 1])
        for r in rows
        if r.request.forced and r.num_sampled > 1
    ]


def _scheduled(rows: PlannedRows, num_drafts: int) -> ScheduledRequest:
    request = rows.request
    return ScheduledRequest(
        slot=request.slot,
        start=rows.start,
        num_rows=rows.num_rows,
        num_sampled=rows.num_sampled,
        num_drafts=num_drafts,
        num_logprobs=request.spec.params.logprobs,
        scored=request.scored_rows(rows.start, rows.num_rows),
        num_prompt_logprobs=request.spec.prompt_logprobs or 0,
    )


def stopping_point(
    spec: RequestSpec, num_tokens: int, token_ids: Sequence[int]
) -> tuple[int, FinishReason | None, int | None]:
    """How many of the new tokens stand, and why the output ends with them: (number, finish reason, stop reason).

    num_tokens: prompt and output before them.
    """
    num_outputs = num_tokens - len(spec.token_ids)
    for number, token in enumerate(token_ids, start=1):
        enough = num_outputs + number >= spec.params.min_tokens
        if enough and token in spec.stop_ids:
            return number, "stop", None if token in spec.eos_ids else token
        if num_tokens + number == spec.limit:
            return number, "length", None
    return len(token_ids), None, None


def _why_no_token(request: Progress, num_kept: int, failure: str) -> str | None:
    """What is wrong where a row has no token. None: nothing, since the output's grammar is complete and left the
    end-of-text token alone, which something else, such as min_tokens, ruled out."""
    if failure != NONE_LEFT:
        return "the target's logits held no number"
    if request.matcher is not None and request.matcher.is_complete:
        return None
    params = request.spec.params
    if request.matcher is not None and request.matcher.error:
        return f"structured_outputs: the grammar cannot be followed any further: {request.matcher.error}"
    fields = ("structured_outputs", "allowed_token_ids", "bad_words", "stop_token_ids")
    names = [name for name in fields if getattr(params, name)]
    if params.min_tokens:
        names.append(f"min_tokens={params.min_tokens}")
    num_outputs = request.num_outputs + num_kept
    return f"no token is possible after {num_outputs}: {', '.join(names)} rule out all of them; ask for less"
