"""Drives an engine's step loop with requests as they arrive, and keeps the times of what comes back.

All times are seconds of wall clock, counted from the start of the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftproof.engine.frontend import Frontend, Request
from draftproof.frontend.llm import LLM
from draftproof.types import RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `index` says which of the benchmark's prompts it is; `arrival` None: as soon as there is room."""

    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float | None = None


@dataclass(slots=True)
class Timing:
    """When a request came (its arrival, or when it was sent) and when how many of its tokens were delivered."""

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
        """Of the tokens after the first; None where there is only one."""
        later = self.num_tokens - 1
        return (self.end_to_end - self.first_token) / later if later > 0 else None

    @property
    def between(self) -> list[float]:
        """From each delivery to the next: with accepted drafts a delivery is several tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step in which everybody was past the prompt. `context`: tokens of all its requests together."""

    num_requests: int
    context: int
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class Run:
    """What one run gave. `outputs` are in the order of `timings`, which is the order in which the requests came.

    `steps` are the decoding ones; `stepping` is the time in steps of any kind, `verifying` and `drafting` the parts of
    it that the engine's clock saw (on a GPU that runs ahead: nothing).
    """

    seconds: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stepping: float = 0.0
    verifying: float = 0.0
    drafting: float = 0.0
    num_faults: int = 0


class Client:
    """Sends jobs to one engine, at most `most_at_once` in flight, and runs it until all are done."""

    def __init__(
        self,
        llm: LLM,
        most_at_once: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._frontend: Frontend = llm._frontend  # requests come while others run: `generate` cannot do that
        self._most, self._clock, self._sleep = most_at_once, clock, sleep
        self._live: list[tuple[Request, Timing]] = []
        self._all: list[tuple[Request, Timing]] = []

    def run(self, jobs: Sequence[Job]) -> Run:
        """Raises ValueError for a job that the engine cannot serve. Jobs with arrivals come in their order."""
        stats = self._frontend.loaded.engine.stats
        before = (stats.target_seconds, stats.draft_seconds, stats.num_drafter_faults)
        run, waiting, start = Run(), deque(jobs), self._clock()
        self._live, self._all = [], []
        try:
            while waiting or self._live:
                self._send(waiting, self._clock() - start)
                if self._live:
                    self._step(run, start)
                else:
                    self._sleep(max(0.0, (waiting[0].arrival or 0.0) - (self._clock() - start)))
            run.seconds = self._clock() - start
            run.timings = [timing for _, timing in self._all]
            run.outputs = [self._frontend.output(request) for request, _ in self._all]
        finally:
            for request, _ in self._all:
                self._frontend.close(request.request_id)
        for timing, output in zip(run.timings, run.outputs, strict=True):
            timing.failed = output.error is not None or not timing.times
        run.verifying = stats.target_seconds - before[0]
        run.drafting = stats.draft_seconds - before[1]
        run.num_faults = stats.num_drafter_faults - before[2]
        return run

    def _send(self, waiting: deque[Job], now: float) -> None:
        while waiting and len(self._live) < self._most and (waiting[0].arrival or 0.0) <= now:
            job = waiting.popleft()
            request = self._frontend.add({"prompt_token_ids": job.prompt_token_ids}, job.params)
            came = now if job.arrival is None else job.arrival
            self._live.append((request, Timing(job.index, came, len(job.prompt_token_ids))))
            self._all.append(self._live[-1])

    def _step(self, run: Run, start: float) -> None:
        sequences = [request.sequences[0] for request, _ in self._live]
        context = sum(len(s.tokens) for s in sequences)
        decoding = all(s.num_outputs for s in sequences)
        before = self._clock()
        self._frontend.step()
        after = self._clock()
        delivered = 0
        for request, timing in self._live:
            count = sum(len(delta.token_ids) for delta in request.pending)
            request.pending.clear()
            if count:
                timing.times.append(after - start)
                timing.counts.append(count)
                delivered += count
        run.stepping += after - before
        if decoding:
            run.steps.append(Step(len(sequences), context, delivered, after - before))
        self._live = [(request, timing) for request, timing in self._live if not request.finished]
