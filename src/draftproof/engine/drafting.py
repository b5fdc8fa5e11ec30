"""Between core and policy: how many drafts each request gets, whether the drafter sees a step, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftproof.engine.in_flight import InFlightStep
from draftproof.engine.interface import RowPrice, RowResult, Runner, ScheduledRequest
from draftproof.engine.kept_choice import RESTING_EVERY
from draftproof.engine.policy import Parts, Policy
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import PlannedRows, Scheduler
from draftproof.engine.shadows import Shadow, Shadowing, compare_all

COMPARED_EVERY = 4  # steps between comparisons of drafts with the output
# Steps between reports of how often lookups had drafts, where none are compared, and the requests whose drafts are then
# followed until they are verified, as each takes some microseconds: a few, or half of more.
FOLLOWED_EVERY, FEW_FOLLOWED = 8, 2
# Rounds of a request that are told of together, while not each step is to be told of: one at a time, they take a few
# per cent of a small model's step, since nothing that telling reads is in the caches then.
ROUNDS_TOGETHER = 4
# Steps after one with prompts, on a CPU, that say nothing of how long such steps take, if they begin within so many
# seconds: a prompt's products slow the processor for a while (a Xeon with AMX by 1.6 at first, by 1.1 after four
# steps), and have taken the weights out of the caches. Example: `small` for one request, an EPYC. Steps of 1.2 ms take
# 1.7, 1.55, 1.4, 1.35, 1.3, 1.3, 1.2 ms. Steps that end long after a prompt count: it hardly slows them. Example: with
# drafts for 64 requests the first takes 50 ms, and a text has three of all 64.
AFTER_PROMPTS, SLOWED_SECONDS, LONG_AFTER = 6, 0.01, 0.04
# Steps in a row that are left out for that, or since too few are alike in a row: under steady load there may be no
# others.
MOST_LEFT_OUT = 64
# Overlapping steps whose average says how long such steps take. Example: steps with one draft for each of 64 requests
# of an 8B model take 1.20 plain ones. When they were reported one by one at first, they seemed to take 1.10, and that
# was believed for good: what later ones took was put down to the machine's pace.
NUM_AVERAGED = 4


def can_compare(runner: Runner) -> bool:
    """Whether lookups' drafts can be compared with the output without being verified: they cost hardly anything, and
    the host knows them before it plans the next step."""
    has_lookups = bool(runner.lookups) and (runner.is_divided or not runner.drafter_has_kv)
    return has_lookups and runner.drafter_may_rest and not runner.async_depth


def num_followed(num_requests: int) -> int:
    """How many of so many requests have their drafts followed after a report."""
    return min(num_requests, max(FEW_FOLLOWED, num_requests // 2))


class Wanted(NamedTuple):
    """Drafts to ask for after a step, per request. `shadowing`: what is to become of them; see `InFlightStep`. The
    others: see `StepInput`."""

    num_drafts: Sequence[int]
    shadowing: Shadowing | None = None
    price: RowPrice = RowPrice()
    without_drafter: bool = False
    without_models: bool = False
    most_model_drafts: int | None = None


@dataclass(slots=True)
class Repeat:
    """Steps of `requests`, which all decode, for which the policy need not be asked again: they want the same drafts.
    So that those without take hardly longer than where there is no drafter. `is_asked`: whether the policy was asked at
    all; not if nobody can draft."""

    requests: Sequence[Progress]
    wanted: Wanted
    num_left: int
    is_asked: bool = True
    num_steps: int = 0  # so far, that the policy has not heard of

    def holds(self, rows: Sequence[PlannedRows]) -> bool:
        """Whether the next step is one of them, and count it. One that verifies drafts, such as a grammar's, may not
        skip the drafter."""
        if not self.num_left or len(rows) != len(self.requests):
            return False
        for planned, request in zip(rows, self.requests, strict=True):
            is_shown = planned.num_rows > 1 and self.wanted.without_drafter
            if is_shown or planned.request is not request or planned.num_rows != planned.num_sampled:
                return False
        self.num_left -= 1
        self.num_steps += 1
        return True


class StepRun:
    """Overlapping steps of one size in a row, whose time is averaged: when a result is seen depends on what the host is
    at, so that single steps of 8.3 ms seemed to take 7.0 to 11.5. The first of a row is left out once there are others:
    the result before it may have been a prompt's, which is seen late, so that it seems as much shorter."""

    def __init__(self) -> None:
        self._size: tuple[int, int, int] | None = None
        self._start = 0.0  # seconds of `time.perf_counter`
        self._num_steps = 0
        self._has_first = False  # the steps counted are the first of a row
        self._num_left_out = 0  # steps since an average was told

    def count(self, scheduled: Sequence[ScheduledRequest] | None, before: float) -> None:
        """Count a finished step; None: one that is not to be told of. `before`: when the result before was seen."""
        if scheduled is None:
            self._size = None
            return
        most_rows, most_drafts = max(s.num_rows for s in scheduled), max(s.num_drafts for s in scheduled)
        size = len(scheduled), most_rows, most_drafts
        if size != self._size or self._has_first:
            self._has_first = size != self._size
            self._size, self._start, self._num_steps = size, before, 0
        self._num_steps += 1
        self._num_left_out += 1

    def taken(self, now: float) -> tuple[float, bool]:
        """(average seconds of the steps counted so far, whether that is typical). The next run starts once they are
        `NUM_AVERAGED`."""
        num_steps, start = self._num_steps, self._start
        if num_steps >= NUM_AVERAGED:
            self._start, self._num_steps, self._num_left_out = now, 0, 0
        return (now - start) / num_steps, _is_typical(self._num_left_out)


class Drafting:
    """Consults `policy` where a drafter can draft, and reports to it the times of steps that are informative."""

    def __init__(self, runner: Runner, scheduler: Scheduler, policy: Policy) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._has_kv = runner.drafter_has_kv
        self.can_compare = can_compare(runner)
        self.use(policy)
        self._is_off = False  # all drafters are switched off
        self._choosing_seconds = 0.0  # that the policy took to choose for the last step
        self._run = StepRun()
        self._last_result = 0.0  # when a step's result was last taken in: seconds of `time.perf_counter`
        self._last_end = 0.0  # when the policy had heard of it
        self._num_since_prompts = 0  # finished steps
        self._last_prompts = (
            0.0  # when the last step with prompts had finished: seconds of `time.perf_counter`
        )
        self._num_left_out = 0  # finished steps since one that no prompt has slowed
        self._first_followed = 0  # the request whose proposal is told of first
        # since a step with drafts was reported, in all such steps: tokens, and requests
        self._num_tokens = 0
        self._num_requests = 0

    def use(self, policy: Policy) -> None:
        """Consult this policy from now on."""
        self._repeat: Repeat | None = None
        self.policy = policy
        # whether it learns from comparing lookups' drafts with the output, not from verifying them
        self.compares = self.can_compare and policy.compares

    def drafters_changed(self, *, is_off: bool) -> None:
        """Some drafter has failed, so some requests may no longer draft; `is_off`: none can."""
        self._is_off = is_off
        self._end_repeat()

    def wanted(self, rows: Sequence[PlannedRows]) -> Wanted:
        """Drafts to ask for after a step of these rows; 0 for a request whose prompt is not complete."""
        if not self._runner.num_drafts:
            return Wanted([0] * len(rows))
        if self._repeat is not None:
            if self._repeat.holds(rows):
                self._choosing_seconds = 0.0
                return self._repeat.wanted
            self._end_repeat()
        shown, unseen = self._prompts(rows)
        asked: list[Progress] = []
        if not self._is_off:
            asked = [r.request for r in rows if r.num_sampled and r.request.can_draft]
        if unseen and not self._runner.is_divided:
            asked = [request for request in asked if id(request) not in unseen]
        self._choosing_seconds = 0.0
        if not asked:
            found = Wanted([0] * len(rows), without_drafter=not shown and self._may_rest(rows))
            if found.without_drafter and all(r.num_sampled for r in rows):
                self._repeat = Repeat([r.request for r in rows], found, RESTING_EVERY, is_asked=False)
            return found
        for request in asked:
            self.tell_rounds(request, at_once=True)
        num_others = len(rows) - len(asked)
        start = time.perf_counter()
        num_joining = max(0, self._scheduler.num_soon - len(rows))
        chosen = self.policy.choose(asked, num_others, num_joining)
        self._choosing_seconds = time.perf_counter() - start
        shadows = self.policy.shadows(chosen, num_others) if self.compares else ()
        if self.policy.parts is not None:
            return self._wanted_of_parts(rows, asked, self.policy.parts, shadows, shown, unseen)
        most = _of_rows(rows, asked, chosen)
        price = self._price([*most, *shadows])
        if any(most):
            found = Wanted(most, price=price)
        else:
            is_seen = bool(shown) or (self._has_kv and self.policy.is_probing)
            found = Wanted(most, without_drafter=not is_seen and self._may_rest(rows))
        self._repeat_from(rows, asked, found)
        if not any(shadows):
            return found
        shadows = _of_rows(rows, asked, shadows)
        num_drafts = [max(pair) for pair in zip(most, shadows, strict=True)]
        shadowing = Shadowing(most, [number > 0 for number in shadows])
        return Wanted(num_drafts, shadowing, price)

    def _repeat_from(self, rows: Sequence[PlannedRows], asked: Sequence[Progress], found: Wanted) -> None:
        """Use the policy's last answer again for as long as it says, if these rows are all of those `asked` for."""
        if (found.without_drafter or any(found.num_drafts)) and len(asked) == len(rows):
            self._repeat = Repeat(asked, found, self.policy.num_repeats())

    def _end_repeat(self) -> None:
        """Have the policy asked about the next step."""
        self._tell_repeats()
        self._repeat = None

    def _tell_repeats(self) -> None:
        """Tell the policy of the steps that it was not asked about."""
        repeat = self._repeat
        if repeat is not None and repeat.num_steps and repeat.is_asked:
            self.policy.repeated(repeat.num_steps)
            repeat.num_steps = 0

    def _wanted_of_parts(
        self,
        rows: Sequence[PlannedRows],
        asked: Sequence[Progress],
        parts: Parts,
        shadows: Sequence[int],
        shown: set[int],
        unseen: set[int],
    ) -> Wanted:
        """What a chain of lookups and others is asked for. Where no drafter with a model is to draft, none sees the
        step, unless it has a prompt that one must see. `shown`, `unseen`: see `_prompts`."""
        most = _of_rows(rows, asked, parts.of_lookups)
        of_models = [
            0 if id(r.request) in unseen else number
            for r, number in zip(rows, _of_rows(rows, asked, parts.of_models), strict=True)
        ]
        shadows = _of_rows(rows, asked, shadows)
        num_drafts = [max(three) for three in zip(most, of_models, shadows, strict=True)]
        shows = bool(shown) or any(of_models)
        if not any(num_drafts):
            may_rest = not shown and self._may_rest(rows)
            found = Wanted(
                num_drafts, without_drafter=may_rest, without_models=not shows, most_model_drafts=0
            )
        else:
            found = Wanted(
                num_drafts,
                Shadowing(most, [number > 0 for number in shadows], of_models),
                self._price(num_drafts),
                without_models=not shows,
                most_model_drafts=max(of_models),
            )
        if not (shows or any(shadows)):
            self._repeat_from(rows, asked, found)
        return found

    def _prompts(self, rows: Sequence[PlannedRows]) -> tuple[set[int], set[int]]:
        """Requests with prompt rows here that the drafter must see, and those with such that it need not, by `id`."""
        prompts = [r.request for r in rows if r.num_rows > r.num_sampled] if self._has_kv else []
        if not prompts:
            return set(), set()
        num_decoding = self._scheduler.num_decoding  # once for all prompts
        shown = {
            id(request)
            for request in prompts
            if request.can_draft and self._will_draft(request, 0, num_decoding - (request.num_outputs > 0))
        }
        return shown, {id(request) for request in prompts} - shown

    def _price(self, wanted: Sequence[int]) -> RowPrice:
        """The price for a drafter that reads it and is to make drafts."""
        return self.policy.price() if self._runner.drafter_estimates and any(wanted) else RowPrice()

    def _may_rest(self, rows: Sequence[PlannedRows]) -> bool:
        """Whether a step that makes no drafts, and has no prompt to be shown, may skip the drafter: if it verifies
        none either."""
        return self._runner.drafter_may_rest and all(r.num_sampled <= 1 for r in rows)

    def will_draft(self, request: Progress, num_lost: int = 0) -> bool:
        """Whether the drafter is to see the prompt of this request, which waits. Depends on how many requests will soon
        decode beside it; `num_lost`: cached tokens that the target would have to recompute for that."""
        return self._will_draft(request, num_lost, self._scheduler.num_decoding)

    def _will_draft(self, request: Progress, num_lost: int, num_decoding: int) -> bool:
        """See `will_draft`; `num_decoding` others decode already."""
        if not self._runner.num_drafts or self._is_off or request.spec.most_drafts == 0:
            return False
        return self.policy.will_draft(request, self._scheduler.num_soon - 1, num_lost, num_decoding)

    def tell_rounds(self, request: Progress, *, at_once: bool) -> None:
        """Report to the policy what a request's last rounds have shown: a few together, if not `at_once`."""
        waits = len(request.rounds) < ROUNDS_TOGETHER and not at_once and self.policy.report_every > 1
        if waits or not request.rounds:
            return
        rounds, request.rounds = request.rounds, []
        self.policy.learn(request, rounds)

    def compare(self, request: Progress, num_steps: int, *, is_last: bool) -> None:
        """Report to the policy what a request's new tokens tell of its shadow drafts, in some of `num_steps` so far and
        at its end: at the same times whether they are right or wrong, else what is wrong would be known earlier."""
        if num_steps % COMPARED_EVERY and not is_last:
            return
        found, request.shadows = compare_all(request.shadows, request.tokens)
        is_resting = self._repeat is not None and self._repeat.wanted.without_drafter
        if is_resting and any(comparison.num_accepted > comparison.num_before for comparison in found):
            self._end_repeat()  # more may soon be compared
        for comparison in found:
            self.policy.compared(request, comparison)

    def _keep_shadows(self, flight: InFlightStep, results: Sequence[RowResult], shadowing: Shadowing) -> None:
        """Keep those drafts of a finished step that are compared, and drop those that are not to be verified."""
        of_models = shadowing.of_models
        for number, is_compared in enumerate(shadowing.is_compared):
            request, most = flight.requests[number], shadowing.most[number]
            if not (is_compared or of_models) or request.finish_reason is not None or request.slot < 0:
                continue
            start, num_drafts = len(request.tokens), request.num_drafts
            num_asked = min(flight.scheduled[number].num_drafts, request.room)
            is_model = (
                of_models is not None and num_drafts > 0 and not self.is_lookups(results[number].drafter)
            )
            if is_compared and num_asked > 0:
                self.policy.proposed(request, num_asked, 0 if is_model else num_drafts, is_model=False)
            if is_model:
                assert of_models is not None
                most = of_models[number]
                num_asked = min(most, request.room)
                if num_asked > 0:  # else it was asked since others want its drafts
                    self.policy.proposed(request, num_asked, min(num_asked, num_drafts), is_model=True)
            elif num_drafts and is_compared:
                drafts = self._runner.known_drafts(request.slot, start, num_drafts)
                request.shadows.append(Shadow(start, drafts, num_asked))
            if num_drafts > most:
                request.num_drafts = most
                self._runner.keep_drafts(request.slot, most)

    def tell_asked(self, request: Progress) -> None:
        """Report how often lookups were asked for drafts of this request, and had some, since that was last told."""
        if request.num_asked:
            self.policy.looked_up(request, request.num_asked, request.num_given)
            request.num_asked = request.num_given = 0

    def _tell_lookups(self, flight: InFlightStep) -> None:
        """Report how often lookups had drafts, and their last proposals, where all of them are verified, of a few
        requests in turn."""
        for request in flight.requests:
            self.tell_asked(request)
        if flight.shadowing is not None:
            return
        num_requests = len(flight.requests)
        end = self._first_followed + num_followed(num_requests)
        for number in range(self._first_followed, end):
            request = flight.requests[number % num_requests]
            num_asked = min(flight.scheduled[number % num_requests].num_drafts, request.room)
            if num_asked > 0 and request.finish_reason is None:
                self.policy.proposed(request, num_asked, request.num_drafts, is_model=False)
                request.is_followed = request.num_drafts > 0
        self._first_followed = end % num_requests

    def is_lookups(self, drafter: int) -> bool:
        """Whether drafts of the drafter with this index are a lookup's."""
        return drafter in self._runner.lookups

    def finished(
        self, flight: InFlightStep, results: Sequence[RowResult], *, was_wanted: bool, num_steps: int
    ) -> None:
        """Report a finished step's time to the policy, if it is typical of decoding.

        Left out are steps that recorded something, and steps that held a request which had already ended (not
        `was_wanted`): if all had, the device may have idled since. Of steps with prompts only the drafter's time is
        reported; the next steps, if they come soon, are not typical. `num_steps`: steps so far.

        Where steps overlap, a step's time is the average of those like it in a row (`StepRun`), typical if they are
        `NUM_AVERAGED`; a step launched on an idle device is left out. Without overlap see `_alone`.
        """
        self._tell(flight, results, was_wanted=was_wanted, num_steps=num_steps)
        self._last_end = time.perf_counter()

    def _tell(
        self, flight: InFlightStep, results: Sequence[RowResult], *, was_wanted: bool, num_steps: int
    ) -> None:
        """See `finished`."""
        now, before = time.perf_counter(), self._last_result
        self._last_result = now
        if flight.shadowing is not None:
            self._keep_shadows(flight, results, flight.shadowing)
        is_settled = self._count(flight.has_prompts, flight.start, now)
        if not self._runner.num_drafts:
            return
        is_ahead = self._runner.async_depth > 0
        is_late = is_ahead and flight.start > before
        is_told = was_wanted and not is_late and not flight.pending.is_warming
        if is_ahead:
            self._run.count(flight.scheduled if is_told and not flight.has_prompts else None, before)
        policy, is_plain = self.policy, flight.is_plain
        if not (is_plain or flight.has_prompts):
            self._num_tokens += sum([len(result.token_ids) for result in results])
            self._num_requests += len(results)
        every = policy.plain_every if is_plain else policy.report_every
        is_due = num_steps % every == 0
        if not is_due and not flight.has_prompts:
            return
        # not after each prompt: the first drafts of a text are not like the later ones (a suffix's are fewer)
        is_followed = is_due and num_steps % FOLLOWED_EVERY == 0 and not is_plain
        if self.compares and (flight.shadowing is not None or is_followed):
            self._tell_lookups(flight)
        if not is_told:
            return
        if flight.has_prompts:
            self._prompted(flight)
            return
        taken = self._run.taken(now) if is_ahead else (self._alone(flight.start, now), is_settled)
        seconds, is_typical = taken
        pending = flight.pending
        passes = seconds if is_ahead else pending.target_seconds + pending.draft_seconds
        # not a chain's, which depends on which member drafts, nor where a lookup waits for the device
        draft_seconds = pending.draft_seconds if self.compares else 0.0
        host_seconds = max(0.0, seconds - passes)
        if policy.is_probing:
            seconds -= pending.draft_seconds
        self._tell_repeats()
        each_tokens = 0.0
        if self._num_requests and not is_plain:
            each_tokens = self._num_tokens / self._num_requests
            self._num_tokens = self._num_requests = 0
        policy.finished(
            flight.outcome(
                results,
                seconds,
                host_seconds,
                draft_seconds,
                each_tokens,
                is_typical=is_typical,
                lookups=self._runner.lookups,
            )
        )
        if self._repeat is not None:
            self._repeat.num_left = policy.num_repeats() if self._repeat.is_asked else RESTING_EVERY

    def _alone(self, start: float, now: float) -> float:
        """Seconds of a step that overlaps with none, planned from `start` on: with what the caller did since the step
        before, which with fewer steps is done less often, but at most as long as the step itself; without what the
        policy took to choose: it chooses once in a few steps, and may be told of just those."""
        own = now - start
        return own - self._choosing_seconds + min(max(0.0, start - self._last_end), own)

    def _count(self, has_prompts: bool, start: float, now: float) -> bool:
        """Count a step that began at `start` and has finished now. Returns whether its time says how long such steps
        take, where they do not overlap."""
        if has_prompts:
            self._num_since_prompts, self._last_prompts = 0, now
        else:
            self._num_since_prompts += 1
        seconds_before, seconds_after = start - self._last_prompts, now - self._last_prompts
        is_soon = seconds_before < SLOWED_SECONDS and seconds_after < LONG_AFTER
        is_slowed = self._num_since_prompts <= AFTER_PROMPTS and is_soon
        self._num_left_out = self._num_left_out + 1 if is_slowed else 0
        return _is_typical(self._num_left_out)

    def _prompted(self, flight: InFlightStep) -> None:
        """Report the drafter's time for a step most of whose rows are prompts', where the host's clock measures it."""
        if not self._has_kv or self._runner.async_depth or flight.without_models:
            return
        num_rows = sum(s.num_rows for s in flight.scheduled)
        num_of_prompts = sum(s.num_rows - s.num_sampled for s in flight.scheduled)
        if num_of_prompts > num_rows / 2:
            asked = [s.num_drafts for s in flight.scheduled if s.num_drafts]
            self.policy.prompted(num_rows, flight.pending.draft_seconds, len(asked), max(asked, default=0))


def _is_typical(num_left_out: int) -> bool:
    """Whether a step counts after so many, itself included, that were left out."""
    return num_left_out == 0 or num_left_out > MOST_LEFT_OUT


def _of_rows(rows: Sequence[PlannedRows], asked: Sequence[Progress], numbers: Sequence[int]) -> list[int]:
    """The numbers of drafts of `asked`, limited to what each allows, in the order of `rows`; 0 for other requests."""
    if not any(numbers):
        return [0] * len(rows)
    allowed = [request.at_most(number) for request, number in zip(asked, numbers, strict=True)]
    if len(asked) == len(rows):
        return allowed
    found = {id(request): number for request, number in zip(asked, allowed, strict=True)}
    return [found.get(id(r.request), 0) for r in rows]
