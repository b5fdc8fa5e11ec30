"""The requests of an engine: takes prompts, runs steps, and passes deltas and outputs to their requests."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftproof.cache.events import AllCleared, CacheEvent
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.engine import Engine
from draftproof.engine.reporting import AcceptanceReport
from draftproof.frontend.input_processor import NO_HINTS, InputProcessor, PreparedRequest, Prompt
from draftproof.frontend.output_processor import Choice, OutputProcessor, Request
from draftproof.types import RequestHints, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from draftproof.frontend.kv_events import Publisher

log = logging.getLogger(__name__)


class Requests:
    """An engine's requests by id. A thread without a turn may only call `prepare` and `new`."""

    def __init__(self, engine: Engine, inputs: InputProcessor, publisher: Publisher | None = None) -> None:
        """publisher: of events of the engine's prefix cache."""
        self.engine = engine
        self._publisher = publisher
        if publisher is not None:
            engine.keep_cache_events()
            # subscribers may still have the state from before a restart
            publisher.publish([AllCleared()], engine.loads()[0].block_size)
        self.inputs = inputs
        self.running: dict[str, Request] = {}
        self._outputs = OutputProcessor(inputs.tokenizer, [d.name for d in engine.stats.drafters])
        self._choices: dict[str, tuple[Request, Choice]] = {}
        self._arrivals = itertools.count()
        self._report = AcceptanceReport(lambda: engine.stats.speculation, time.perf_counter())

    def prepare(
        self, prompt: Prompt, params: SamplingParams, hints: RequestHints = NO_HINTS
    ) -> PreparedRequest:
        """The checked request; ValueError if it cannot be served. Does not use the engine."""
        return self.inputs.prepare(prompt, params, hints)

    def new(
        self, given: PreparedRequest, *, streamed: bool = False, request_id: str | None = None
    ) -> tuple[Request, int]:
        """(a new request, its arrival number, which replaces a missing seed). `request_id` None: one is generated."""
        arrival = next(self._arrivals)
        own_id = f"request-{arrival}" if request_id is None else request_id
        return self._outputs.request(own_id, given, streamed=streamed), arrival

    def start(self, request: Request, arrival: int) -> None:
        """Queue the result of `new`. If the engine has ended, the request fails at once, with the reason."""
        self.running[request.request_id] = request
        if self.engine.error is not None:
            self.fail(request, self.engine.error)
            return
        for choice in request.choices:
            self.engine.add_request(choice.id, self.inputs.spec(request.given, arrival, choice.index))
            self._choices[choice.id] = (request, choice)

    def fail(self, request: Request, error: str) -> None:
        """End a request's unfinished choices with the finish_reason "error"."""
        for choice in request.choices:
            if choice.finish_reason is None:
                if self.engine.error is None:  # else it computes nothing any more
                    self.engine.abort(choice.id)
                self._choices.pop(choice.id, None)
                ended = TokenDelta(choice.id, finish_reason="error", error=error)
                self._outputs.process(request, choice, ended)

    def add(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request. Raises ValueError, without effect on other requests, if it cannot be served."""
        request, arrival = self.new(self.prepare(prompt, params))
        self.start(request, arrival)
        return request

    @property
    def is_generating(self) -> bool:
        """Whether unfinished requests exist other than streams, whose callers may pause."""
        return any(not r.finished and not r.streamed for r in self.running.values())

    def step(self) -> None:
        """Run one engine step; its deltas are kept in their requests."""
        self.take(self.engine.step())
        if self._publisher is not None:
            self.publish(self.engine.take_cache_events())
        if (line := self._report.due(time.perf_counter())) is not None:
            log.info("%s", line)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Publish events of the prefix cache, if there is a publisher."""
        if self._publisher is not None and events:
            self._publisher.publish(events, self.engine.loads()[0].block_size)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests are recomputed, to the same bits."""
        self.engine.reset_prefix_cache()
        self.publish(self.engine.take_cache_events())

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        """Pass a step's deltas to their requests."""
        for delta in deltas:
            found = self._choices.get(delta.id)
            if found is None:
                continue
            if self._outputs.process(*found, delta):
                self.engine.abort(delta.id)
            if found[1].finish_reason is not None:
                self._choices.pop(delta.id, None)

    def abort(self, request_id: str) -> None:
        """Stop a request; it keeps its output so far. Ids that are not running are ignored."""
        request = self.running.get(request_id)
        for choice in request.choices if request is not None else ():
            if choice.finish_reason is None:
                assert request is not None
                self.engine.abort(choice.id)
                self._choices.pop(choice.id, None)
                self._outputs.abort(request, choice)

    def shutdown(self) -> None:
        """Abort all requests, and shut the engine down."""
        for request_id in list(self.running):
            self.abort(request_id)
        self.engine.shutdown()
        if self._publisher is not None:
            self._publisher.close()

    def close(self, request_id: str) -> None:
        """Forget a request, aborting it if it still runs."""
        self.abort(request_id)
        self.running.pop(request_id, None)

    def output(self, request: Request) -> RequestOutput:
        """The request's output so far."""
        return self._outputs.output(request)
