"""Converts the engine's ids to users' outputs: text, stop strings, log-probabilities with their tokens, metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import LogprobRow
from draftproof.frontend.input_processor import PreparedRequest
from draftproof.frontend.text import Detokenizer, StopStrings, Tokenizer
from draftproof.metrics import DrafterStats, SpeculationStats
from draftproof.types import (
    CompletionOutput,
    Delta,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)


@dataclass(slots=True)
class Choice:
    """One of a request's n outputs so far; `id` is the engine's."""

    id: str
    index: int
    text: StopStrings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    drafters: list[DrafterStats] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class Request:
    """One prompt and its n choices. `pending`: deltas that were not taken yet. `streamed`: its caller may pause
    indefinitely."""

    request_id: str
    given: PreparedRequest
    choices: list[Choice]
    started: float
    streamed: bool = False
    first_token_latency: float = 0.0
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_logprobs: list[LogprobRow] = field(
        default_factory=list
    )  # one row per prompt token except the first
    pending: deque[Delta] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the outputs so far."""
        return len(self.given.prompt_token_ids) + sum(len(choice.token_ids) for choice in self.choices)

    def take_pending(self) -> list[Delta]:
        taken = list(self.pending)
        self.pending.clear()
        return taken


class OutputProcessor:
    """Converts the engine's deltas to users' deltas. Knows the tokenizer and the drafters' names, not the engine."""

    def __init__(self, tokenizer: Tokenizer | None, drafter_names: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._drafter_names = drafter_names

    def request(self, request_id: str, given: PreparedRequest, *, streamed: bool = False) -> Request:
        """A new request without output."""
        choices = [
            Choice(f"{request_id}.{index}", index, self._text(given), drafters=self._no_counts())
            for index in range(given.params.n)
        ]
        return Request(request_id, given, choices, time.perf_counter(), streamed=streamed)

    def process(self, request: Request, choice: Choice, new: TokenDelta) -> bool:
        """Add a step's result to a choice; returns whether a stop string ended it, so that the engine must abort it."""
        request.prompt_logprobs += new.prompt_logprobs
        request.num_cached_tokens = max(request.num_cached_tokens, new.num_cached_tokens)
        request.queue_seconds = max(request.queue_seconds, new.queue_seconds)
        choice.num_preemptions = new.num_preemptions
        for number in new.drafter_faults:
            choice.drafters[number].num_faults += 1
        if not new.token_ids and new.finish_reason is None:
            return False
        if not request.first_token_latency:
            request.first_token_latency = time.perf_counter() - request.started
        result = choice.text.push(new.token_ids, new.finish_reason)
        num_kept, num_accepted = result.num_kept, min(new.num_accepted, result.num_kept)
        choice.token_ids += new.token_ids[:num_kept]
        choice.logprobs += new.logprobs[:num_kept]
        if new.is_round:
            choice.speculation.record(new.num_drafted, num_accepted)
        if new.is_round and new.num_drafted:
            choice.drafters[new.drafter].speculation.record(new.num_drafted, num_accepted)
        choice.finish_reason, choice.stop_reason, choice.error = new.finish_reason, new.stop_reason, new.error
        if result.stop is not None:
            choice.finish_reason, choice.stop_reason, choice.error = "stop", result.stop, None
        num_drafted = new.num_drafted if new.is_round else None
        self._deliver(request, choice, result.text, num_kept, num_accepted, num_drafted)
        return result.stop is not None and new.finish_reason is None

    def abort(self, request: Request, choice: Choice) -> None:
        """End a choice with its output so far."""
        choice.finish_reason = "abort"
        self._deliver(request, choice, choice.text.flush(), 0, 0)

    def output(self, request: Request) -> RequestOutput:
        """The request's output so far."""
        speculation, params = SpeculationStats(), request.given.params
        drafters = self._no_counts()
        for choice in request.choices:
            speculation.add(choice.speculation)
            for total, own in zip(drafters, choice.drafters, strict=True):
                total.add(own)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.given.prompt,
            prompt_token_ids=list(request.given.prompt_token_ids),
            outputs=[self._completion(choice, params.logprobs is not None) for choice in request.choices],
            finished=request.finished,
            metrics=RequestMetrics(
                speculation=speculation,
                first_token_latency=request.first_token_latency,
                num_preemptions=sum(choice.num_preemptions for choice in request.choices),
                num_cached_tokens=request.num_cached_tokens,
                drafters=drafters,
                queue_seconds=request.queue_seconds,
            ),
            prompt_logprobs=(
                None
                if params.prompt_logprobs is None
                else [None, *(self._logprobs(row) for row in request.prompt_logprobs)]
            ),
            error=next((choice.error for choice in request.choices if choice.error is not None), None),
        )

    def _deliver(
        self,
        request: Request,
        choice: Choice,
        text: str,
        num_tokens: int,
        num_accepted: int,
        num_drafted: int | None = None,
    ) -> None:
        first = len(choice.token_ids) - num_tokens
        delta = Delta(
            request_id=request.request_id,
            index=choice.index,
            text=text,
            token_ids=choice.token_ids[first:],
            accepted=[i < num_accepted for i in range(num_tokens)],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            error=choice.error,
            num_drafted=num_drafted,
        )
        if request.given.params.logprobs is not None:
            delta.logprobs = [self._logprobs(row) for row in choice.logprobs[first:]]
        request.pending.append(delta)

    def _no_counts(self) -> list[DrafterStats]:
        return [DrafterStats(name) for name in self._drafter_names]

    def _text(self, given: PreparedRequest) -> StopStrings:
        params, detokenizer = given.params, None
        if params.detokenize and self._tokenizer is not None:
            ids = given.prompt_token_ids
            detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens, ids)
        return StopStrings(params, detokenizer)

    def _completion(self, choice: Choice, wants_logprobs: bool) -> CompletionOutput:
        return CompletionOutput(
            index=choice.index,
            text=choice.text.text,
            token_ids=list(choice.token_ids),
            cumulative_logprob=sum(row.logprob for row in choice.logprobs) if wants_logprobs else None,
            logprobs=[self._logprobs(row) for row in choice.logprobs] if wants_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(self, row: LogprobRow) -> dict[int, Logprob]:
        found = {
            token: Logprob(logprob, rank, self._piece(token))
            for rank, (token, logprob) in enumerate(row.top, start=1)
        }
        found.setdefault(row.token_id, Logprob(row.logprob, row.rank, self._piece(row.token_id)))
        return found

    def _piece(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.piece(token)
