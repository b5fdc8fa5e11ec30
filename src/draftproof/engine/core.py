"""The host half of the engine: plans a step, launches it and processes its results. Sees ids and numbers, no tensors.

`EngineCore._step` is one step: `scheduler.schedule` chooses the rows, `runner.run` launches them, and the results of
the step before become deltas. A step that raises fails only the request that caused it.

Elsewhere: how many drafts to ask for (`drafting.py`), masks and forced drafts of grammars (`grammars.py`), what a
result adds to a request (`deltas.py`), the search for the request that makes steps raise (`trials.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from draftproof.cache.events import CacheEvent
from draftproof.engine import grammars
from draftproof.engine.checks import check_request
from draftproof.engine.deltas import TokenDelta, take_over
from draftproof.engine.drafting import Drafting, Wanted
from draftproof.engine.in_flight import InFlightStep
from draftproof.engine.interface import (
    HEALTHY,
    DeviceFaultError,
    RequestSpec,
    Resumed,
    RowResult,
    Runner,
    ScheduledRequest,
    StepInput,
)
from draftproof.engine.policy import Policy
from draftproof.engine.progress import Progress, Round
from draftproof.engine.scheduler import PlannedRows, Scheduler, SchedulerOutput
from draftproof.engine.trials import Trials
from draftproof.metrics import DrafterStats, EngineLoad, EngineStats
from draftproof.types import FinishReason

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs requests to completion, one step at a time. Not thread-safe: one thread at a time may call it."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, policy: Policy, stats: EngineStats | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.stats = stats or EngineStats()
        self.stats.drafters = [DrafterStats(name) for name in runner.drafter_names]
        self.error: str | None = None  # why the engine has ended; None while it accepts requests
        self._is_paused = False
        self._requests: dict[str, Progress] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._deltas: list[TokenDelta] = []
        self._step_requests: list[Progress] = []  # requests of the current step: the suspects if it raises
        self._trials = Trials()
        # a launched step's result was lost, while its pages may be in the prefix cache
        self._is_result_lost = False
        self._is_shut_down = False
        self._num_arrived = 0
        self._num_matched = 0  # requests whose output follows a grammar
        self._health = HEALTHY  # the drafters', as last seen
        self.drafting = Drafting(runner, scheduler, policy)
        scheduler.will_draft, scheduler.has_lookups = self.drafting.will_draft, runner.is_divided

    def add_request(self, request_id: str, spec: RequestSpec, resumed: Resumed | None = None) -> None:
        """Queue a request. `resumed`: continue from this output of another engine; deltas hold only what is new.

        ValueError for a request that cannot be computed or an id that is running; RuntimeError once the engine ended.
        """
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
        """Remove a request and ignore its results that are in flight. An unknown id is ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    def step(self) -> list[TokenDelta]:
        """Run one step. Returns what the steps that have finished since the last call added to their requests."""
        if self.error is None:
            start = time.perf_counter()
            self._guarded(self._step)
            self.stats.num_steps += 1
            self.stats.step_seconds += time.perf_counter() - start
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self) -> None:
        start = time.perf_counter()
        self._step_requests = []
        self._choose_trial()
        if self._num_matched:  # a grammar's masks depend on the tokens and drafts that are still in flight
            self._take_in(0)
            grammars.choose_drafts(self.scheduler.running, self.runner)
        output = self._schedule()
        wanted = self.drafting.wanted(output.rows)
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

    def _launch(self, output: SchedulerOutput, wanted: Wanted, planned: float) -> None:
        """Launch the step, and advance the requests' bounds by the most it can add. `planned`: when planning began
        (`time.perf_counter`)."""
        start = time.perf_counter()
        step = self._step_input(output, wanted)
        requests = self._step_requests = [rows.request for rows in output.rows]
        for request in output.admitted:
            if request.queue_seconds is None:
                request.queue_seconds = start - request.queued
        pending = self.runner.run(step)
        is_divided = self.runner.is_divided
        is_missed = (step.without_drafter or step.without_models) and self.runner.drafter_has_kv
        for request, scheduled in zip(requests, step.scheduled, strict=True):
            if is_missed:
                if request.draft_hole is None or request.is_hole_partial or is_divided:
                    request.miss_drafter(scheduled.start, is_partial=is_divided)
            elif pending.draft_state_lost:
                is_partial = scheduled.slot not in pending.undrafted_slots
                request.miss_drafter(scheduled.start, is_partial=is_partial)
            request.num_drafts = scheduled.num_drafts
            request.num_pending += scheduled.num_sampled
            request.num_computed += scheduled.num_rows - scheduled.num_sampled
            request.num_scored += scheduled.scored[1]
        has_prompts = not step.all_decode and any(r.num_rows > r.num_sampled for r in output.rows)
        self._in_flight.append(
            InFlightStep(
                requests,
                list(step.scheduled),
                pending,
                planned,
                step.without_drafter,
                wanted.shadowing,
                has_prompts,
                step.without_drafter or step.without_models,
                self.runner.drafter_stops and bool(step.price.of_draft or step.price.of_row),
            )
        )
        self.stats.target_seconds += pending.target_seconds
        self.stats.draft_seconds += pending.draft_seconds
        self.stats.num_preemptions += output.num_preempted
        self.stats.num_cached_tokens += sum(r.num_computed for r in step.admitted)
        self.stats.launch_seconds += time.perf_counter() - start

    def _step_input(self, output: SchedulerOutput, wanted: Wanted) -> StepInput:
        scheduler = self.scheduler
        each = zip(output.rows, wanted.num_drafts, strict=True)
        scheduled = [rows.scheduled(num_drafts) for rows, num_drafts in each]
        step = StepInput(
            released=scheduler.released,
            admitted=[request.admission() for request in output.admitted],
            table_entries=[entry for rows in output.rows for entry in rows.request.new_entries()],
            fresh_blocks=scheduler.fresh_blocks,
            scheduled=scheduled,
            all_decode=all(r.num_rows == r.num_sampled == 1 + r.request.num_drafts for r in output.rows),
            without_drafter=wanted.without_drafter,
            without_models=wanted.without_models,
            most_model_drafts=wanted.most_model_drafts,
            price=wanted.price,
            masks=[grammars.masks(rows) for rows in output.rows] if self._num_matched else (),
            forced=grammars.forced(output.rows) if self._num_matched else (),
        )
        scheduler.released, scheduler.fresh_blocks = [], []
        return step

    def _take_in(self, async_depth: int) -> None:
        """Process finished steps until at most `async_depth` remain in flight."""
        while len(self._in_flight) > async_depth:
            flight = self._in_flight.popleft()
            try:
                self._process(flight)
            except BaseException:
                self._step_requests = flight.requests
                self._in_flight.clear()  # later steps depend on this one
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
        self.drafting.finished(
            flight, results, was_wanted=num_applied == len(results), num_steps=self.stats.num_steps
        )

    def _count_drafter_faults(self) -> None:
        health = self.runner.drafter_health()
        if health == self._health:
            return
        self._health = health
        self.drafting.drafters_changed(is_off=health.off)
        self.stats.num_drafter_faults = health.num_faults
        self.stats.last_drafter_fault = health.last_fault
        for drafter, num_faults in zip(self.stats.drafters, health.faults_each, strict=False):
            drafter.num_faults = num_faults

    def _apply(self, request: Progress, scheduled: ScheduledRequest, result: RowResult) -> None:
        """Apply a result to a request that still runs: add its delta, finish it, update statistics and policy. In this
        order: if the policy raises, the request goes on from its tokens, so they must have been told of."""
        delta, num_observed = take_over(request, scheduled, result)
        if delta.says_something:
            self._deltas.append(delta)
        reason = delta.finish_reason
        # a complete grammar ends in a delta of its own: a stopping delta's last token is left out of the text
        if reason is None and result.failure:
            reason = "stop"
            self._deltas.append(
                TokenDelta(request.id, finish_reason=reason, num_preemptions=request.num_preemptions)
            )
        if reason is not None:
            self._finish(request, reason)
        self.stats.num_generated_tokens += len(delta.token_ids)
        if delta.is_round:
            self.stats.record_round(delta.drafter, delta.num_drafted, delta.num_accepted)
        self._report(request, scheduled, result, delta, num_observed)

    def _report(
        self,
        request: Progress,
        scheduled: ScheduledRequest,
        result: RowResult,
        delta: TokenDelta,
        num_observed: int,
    ) -> None:
        """Tell the policy what became of the request's drafts, of which `num_observed` count, and of its new ones."""
        compares, is_last = self.drafting.compares, request.finish_reason is not None
        if compares:
            if request.shadows:
                self.drafting.compare(request, self.stats.num_steps, is_last=is_last)
            is_lookups = self.drafting.is_lookups
            only_lookups = not self.runner.is_divided
            if scheduled.num_drafts:
                request.num_asked += 1
                if result.num_proposed and (only_lookups or is_lookups(result.drafter)):
                    request.num_given += 1
            if only_lookups or is_lookups(delta.drafter):
                if request.is_followed and num_observed and not request.forced:
                    self.policy.verified(request, num_observed, delta.num_accepted, is_model=False)
                request.is_followed = False
                if is_last:
                    self.drafting.tell_asked(request)
                return
        if request.forced:  # they say nothing about the drafters' acceptance
            num_observed = 0
        num_asked = 0 if is_last or compares else max(0, min(scheduled.num_drafts, request.room))
        if num_observed or num_asked:
            num_outputs = request.num_outputs - len(delta.token_ids)
            request.rounds.append(
                Round(num_observed, delta.num_accepted, num_asked, result.num_proposed, num_outputs)
            )
        # at once in a chain: its policy hears of lookups meanwhile, and of all in their order
        self.drafting.tell_rounds(request, at_once=is_last or compares)

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
        """Have the runner release the slots of finished requests, which otherwise happens with the next step."""
        if not self.scheduler.released or self._in_flight or self.error is not None:
            return
        released, self.scheduler.released = self.scheduler.released, []
        self._step_requests = []
        self.runner.run(StepInput(released=released))
        self._count_drafter_faults()

    # Between steps.

    @property
    def policy(self) -> Policy:
        """Chooses how many drafts each request gets. May be replaced between steps."""
        return self.drafting.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.drafting.use(policy)

    @property
    def num_in_flight(self) -> int:
        """Number of launched steps whose results have not been processed."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return not self.scheduler.is_idle or bool(self._in_flight or self._deltas)

    @property
    def is_due(self) -> bool:
        """Whether `step` has something to do: rows, results in flight, or slots to release. Once the engine has ended:
        whether deltas are left to be collected."""
        if self.error is not None:
            return self.has_work
        return not self._is_paused and (self.has_work or bool(self.scheduler.released))

    def set_paused(self, is_paused: bool) -> None:
        """While paused no step is due; new requests are queued."""
        self._is_paused = is_paused

    def wake(self) -> None:
        """Nothing to do: no step of this engine blocks on other threads. See `Engine.wake`."""

    def loads(self) -> list[EngineLoad]:
        """The engine's current load, as a list of one entry."""
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
        """Start recording events of the prefix cache, for `take_cache_events`."""
        self.scheduler.pages.keep_events()

    def take_cache_events(self) -> list[CacheEvent]:
        """The events of the prefix cache since the last call."""
        return self.scheduler.pages.take_events()

    def drain(self) -> None:
        """Wait for the steps in flight. `step` returns their deltas."""
        if self.error is None:
            self._guarded(lambda: self._take_in(0))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Running requests are recomputed, to the same bits."""
        self.drain()
        self.recompute_all()

    def recompute_all(self) -> None:
        """Discard everything computed: recompute all requests from their ids, with an empty prefix cache."""
        self._trials.clear()
        self._recompute(keep_cache=False)

    def shutdown(self) -> None:
        """End the engine: drop the requests that still run, without deltas, and free the runner's memory."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.error = self.error or "the engine has been shut down"
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._finish(request, "abort")
        self._deltas = []
        self.runner.shutdown()

    # Drafting without generating.

    def draft(self, spec: RequestSpec, num_drafts: int) -> list[int]:
        """What the drafter would propose after the spec's last token, without generating anything.

        All tokens but the last are computed like a chunk of a prompt, whose next token is known; only that drafts are
        asked for differs. ValueError while other requests run, and as in `add_request`; RuntimeError once the engine
        has ended.
        """
        if not self.scheduler.is_idle:
            raise ValueError("draft: other requests are running; finish or close their streams first")
        self.drain()  # only steps of finished requests are in flight
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
            wanted = Wanted([num_drafts if is_last else 0])
            self._launch(replace(output, rows=[chunk]), wanted, time.perf_counter())
            self._take_in(0)
            if is_last:
                return self.runner.known_drafts(request.slot, len(request.tokens), request.num_drafts)

    # Steps that raise.

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call `work`. If it raises, the request at fault gets an error delta and the others are recomputed."""
        try:
            work()
        except DeviceFaultError as error:
            self._end(str(error))
        except Exception as error:
            self._after_failure(error)
        except BaseException:  # Ctrl-C: the interrupted step has no known state
            self.recompute_all()
            raise

    def _after_failure(self, error: Exception) -> None:
        """A step raised: find the request at fault and fail it alone. All others are recomputed from their ids."""
        logger.warning("a step raised; its requests are recomputed from their ids", exc_info=error)
        failed = list(self._step_requests)
        try:
            self._take_in(0)
        except DeviceFaultError as fault:
            self._end(str(fault))
            return
        except Exception:  # earlier steps are lost as well, and recomputed
            pass
        # no request can be at fault: a bug of the engine; harmless if it only released slots while idle
        if not failed and not self.scheduler.is_idle:
            self.recompute_all()
            raise error
        guilty = self._trials.convict(failed)
        if guilty is not None:
            reason = f"{type(error).__name__}: {error}"
            self._fail(guilty, f"computing this request failed, and others are not affected: {reason}")
        # pages of a step that was never launched are not in the prefix cache, so the cache may stay
        self._recompute(keep_cache=not self._is_result_lost)

    def _recompute(self, *, keep_cache: bool) -> None:
        self._in_flight.clear()
        self._is_result_lost = False
        self.scheduler.recompute_all(keep_cache=keep_cache)

    def _choose_trial(self) -> None:
        """Isolate the first group of suspects that is not cleared yet; resume normal scheduling when none is left."""
        if not self._trials:
            return
        is_over = self._trials.acquit()
        if not self._trials:
            self.scheduler.rejoin()
        elif is_over or self.scheduler.held is None:
            self._take_in(0)
            self.scheduler.isolate(self._trials.group)

    def _fail(self, request: Progress, error: str) -> None:
        self._deltas.append(TokenDelta(request.id, finish_reason="error", error=error))
        self._finish(request, "error")

    def _end(self, reason: str) -> None:
        """The device failed: end the engine and fail every request, once."""
        self.error = f"the engine has ended: {reason}"
        self._in_flight.clear()
        for request in list(self._requests.values()):
            self._fail(request, self.error)
