"""The requests of an engine: prompts in, deltas and outputs out, a step of the engine at a time."""

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
    """Who asked for what, over an engine. Only `prepare` and `new` may be called by a thread without a turn."""

    def __init__(self, engine: Engine, inputs: InputProcessor, publisher: Publisher | None = None) -> None:
        """publisher: tells others what happens in the engine's prefix cache."""
        self.engine = engine
        self._publisher = publisher
        if publisher is not None:
            engine.keep_cache_events()
            publisher.publish(
                [AllCleared()], engine.loads()[0].block_size
            )  # whatever was said before a restart
        self.inputs = inputs
        self.running: dict[str, Request] = {}
        self._outputs = OutputProcessor(inputs.tokenizer, [d.name for d in engine.stats.drafters])
        self._choices: dict[str, tuple[Request, Choice]] = {}
        self._arrivals = itertools.count()
        self._report = AcceptanceReport(lambda: engine.stats.speculation, time.perf_counter())

    def prepare(
        self, prompt: Prompt, params: SamplingParams, hints: RequestHints = NO_HINTS
    ) -> PreparedRequest:
        """Raises ValueError if it cannot be served. Nothing of the engine is touched."""
        return self.inputs.prepare(prompt, params, hints)

    def new(
        self, given: PreparedRequest, *, streamed: bool = False, request_id: str | None = None
    ) -> tuple[Request, int]:
        """A request with an id (None: one of ours), and its number, which its noise depends on where it has no seed."""
        arrival = next(self._arrivals)
        own_id = f"request-{arrival}" if request_id is None else request_id
        return self._outputs.request(own_id, given, streamed=streamed), arrival

    def start(self, request: Request, arrival: int) -> None:
        """Queue what `new` gave. Once the engine has ended the request ends at once, with the reason."""
        self.running[request.request_id] = request
        if self.engine.error is not None:
            self.fail(request, self.engine.error)
            return
        for choice in request.choices:
            self.engine.add_request(choice.id, self.inputs.spec(request.given, arrival, choice.index))
            self._choices[choice.id] = (request, choice)

    def fail(self, request: Request, error: str) -> None:
        """End what still runs of a request, with the finish_reason "error"."""
        for choice in request.choices:
            if choice.finish_reason is None:
                if self.engine.error is None:  # else it computes nothing any more
                    self.engine.abort(choice.id)
                self._choices.pop(choice.id, None)
                ended = TokenDelta(choice.id, finish_reason="error", error=error)
                self._outputs.process(request, choice, ended)

    def add(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request. Raises ValueError, leaving all other requests alone, if it cannot be served."""
        request, arrival = self.new(self.prepare(prompt, params))
        self.start(request, arrival)
        return request

    @property
    def is_generating(self) -> bool:
        """Whether requests run that nobody can leave standing."""
        return any(not r.finished and not r.streamed for r in self.running.values())

    def step(self) -> None:
        """One engine step; its deltas wait in their requests."""
        self.take(self.engine.step())
        if self._publisher is not None:
            self.publish(self.engine.take_cache_events())
        if (line := self._report.due(time.perf_counter())) is not None:
            log.info("%s", line)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Tell others of events of the prefix cache, where they are to be told."""
        if self._publisher is not None and events:
            self._publisher.publish(events, self.engine.loads()[0].block_size)

    def reset_prefix_cache(self) -> None:
        """Forget what prompts that start alike have in common; what runs is computed again, to the same bits."""
        self.engine.reset_prefix_cache()
        self.publish(self.engine.take_cache_events())

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        """What a step brought, to those who asked for it."""
        for delta in deltas:
            found = self._choices.get(delta.id)
            if found is None:
                continue
            if self._outputs.process(*found, delta):
                self.engine.abort(delta.id)
            if found[1].finish_reason is not None:
                self._choices.pop(delta.id, None)

    def abort(self, request_id: str) -> None:
        """Stop a request; what it has so far stays in its output. An id that is not running is ignored."""
        request = self.running.get(request_id)
        for choice in request.choices if request is not None else ():
            if choice.finish_reason is None:
                assert request is not None
                self.engine.abort(choice.id)
                self._choices.pop(choice.id, None)
                self._outputs.abort(request, choice)

    def shutdown(self) -> None:
        """Abort whatever runs, and end the engine."""
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
        """The request as far as it has come."""
        return self._outputs.output(request)
