"""Drives an engine's step loop with requests as they arrive, and records when tokens are delivered.

All times are seconds of wall clock from the start of the run.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftproof.bench.internals import Clock, Stepper
from draftproof.types import RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `index`: of the benchmark's prompt; `arrival` None: sent as soon as there is room."""

    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float | None = None


@dataclass(slots=True)
class Timing:
    """Times of a request. `came`: its arrival, or when it was sent; `times`, `counts`: of each delivery of tokens."""

    index: int
    came: float
    num_prompt: int
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def first_token(self) -> float:
        return self.times[0] - self.came

    @property
    def end_to_end(self) -> float:
        return self.times[-1] - self.came

    @property
    def per_token(self) -> float | None:
        """Mean time per token after the first; None if there is only one."""
        later = self.num_tokens - 1
        return (self.end_to_end - self.first_token) / later if later > 0 else None

    @property
    def between(self) -> list[float]:
        """Times between deliveries; with accepted drafts a delivery has several tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Step:
    """One decode-only engine step. `context`: total tokens of its requests."""

    num_requests: int
    context: int
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class ClientResult:
    """Result of one run. `outputs` and `timings` are in the order in which the requests came.

    `steps`: the decode-only steps; `decoding`: the engine's clock over these, `clock`: over all steps; `stepping`: time
    in steps of any kind.
    """

    seconds: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stepping: float = 0.0
    clock: Clock = field(default_factory=Clock)
    decoding: Clock = field(default_factory=Clock)

    @property
    def num_tokens(self) -> int:
        """Output tokens of requests that did not fail."""
        return sum(timing.num_tokens for timing in self.timings if not timing.failed)


@dataclass(slots=True)
class _Live:
    """A request in flight. `context`: number of its tokens, prompt and output."""

    timing: Timing
    context: int

    def take(self, count: int, now: float) -> None:
        """Record a delivery of `count` tokens."""
        self.timing.times.append(now)
        self.timing.counts.append(count)
        self.context += count


class Client:
    """Sends jobs to one engine, at most `most_at_once` in flight, and steps it until all are done."""

    def __init__(
        self,
        stepper: Stepper,
        most_at_once: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stepper = stepper
        self._most, self._clock, self._sleep = most_at_once, clock, sleep
        self._live: dict[str, _Live] = {}
        self._all: dict[str, Timing] = {}
        self._decoding_since: Clock | None = None

    def run(self, jobs: Sequence[Job]) -> ClientResult:
        """Run all jobs; those with arrivals must be in order of arrival. ValueError for a job that cannot be served."""
        before = self._stepper.clock()
        run, waiting, start = ClientResult(), deque(jobs), self._clock()
        self._live, self._all, self._decoding_since = {}, {}, None
        try:
            while waiting or self._live:
                self._send(waiting, self._clock() - start)
                if self._live:
                    self._step(run, start)
                else:
                    self._sleep(max(0.0, (waiting[0].arrival or 0.0) - (self._clock() - start)))
            run.seconds = self._clock() - start
            self._note_phase(run, decoding=False)
            run.timings = list(self._all.values())
            run.outputs = [self._stepper.output(request_id) for request_id in self._all]
        finally:
            for request_id in self._all:
                self._stepper.close(request_id)
        for timing, output in zip(run.timings, run.outputs, strict=True):
            timing.failed = output.error is not None or not timing.times
        run.clock = self._stepper.clock() - before
        return run

    def _send(self, waiting: deque[Job], now: float) -> None:
        while waiting and len(self._live) < self._most and (waiting[0].arrival or 0.0) <= now:
            job = waiting.popleft()
            assert job.params.n == 1, "a job is one output"
            request_id = self._stepper.add(job.prompt_token_ids, job.params)
            came, num_prompt = now if job.arrival is None else job.arrival, len(job.prompt_token_ids)
            self._all[request_id] = Timing(job.index, came, num_prompt)
            self._live[request_id] = _Live(self._all[request_id], num_prompt)

    def _step(self, run: ClientResult, start: float) -> None:
        live = self._live
        num_requests, context = len(live), sum(request.context for request in live.values())
        decoding = all(request.timing.times for request in live.values())
        self._note_phase(run, decoding)
        before = self._clock()
        deltas = self._stepper.step()
        after = self._clock()
        delivered = Counter[str]()
        for delta in deltas:
            delivered[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._live = {i: request for i, request in self._live.items() if i != delta.request_id}
        for request_id, count in delivered.items():
            if count:
                live[request_id].take(count, after - start)
        run.stepping += after - before
        if decoding:
            run.steps.append(Step(num_requests, context, delivered.total(), after - before))

    def _note_phase(self, run: ClientResult, decoding: bool) -> None:
        """Read the engine's clock only where decode-only phases begin or end; reading it every step would cost time."""
        if decoding and self._decoding_since is None:
            self._decoding_since = self._stepper.clock()
        elif not decoding and self._decoding_since is not None:
            run.decoding += self._stepper.clock() - self._decoding_since
            self._decoding_since = None


class Decoding:
    """Requests that are stepped together, none of which may end while measured; closed after `with`."""

    def __init__(self, stepper: Stepper, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self._stepper = stepper
        self._counts = {stepper.add(ids, params): 0 for ids in prompts}

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in self._counts:
            self._stepper.close(request_id)

    @property
    def num_tokens(self) -> int:
        """Output tokens that the host has seen."""
        return sum(self._counts.values())

    def prefill(self) -> None:
        """Step until every request has its first token."""
        while not all(self._counts.values()):
            self.steps(1)

    def steps(self, count: int) -> None:
        """Run `count` steps. No request may end in them, so that the batch size stays constant."""
        for _ in range(count):
            for delta in self._stepper.step():
                self._counts[delta.request_id] += len(delta.token_ids)
                assert delta.finish_reason is None, "a request ended too early"
