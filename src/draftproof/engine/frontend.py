"""Between users' prompts and the engine's sequences: checks what comes in, collects what goes out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from draftproof.config import EngineConfig
from draftproof.engine.build import Loaded
from draftproof.engine.outbox import Emission
from draftproof.engine.reporting import AcceptanceReport
from draftproof.engine.sequence import LogprobRow, Sequence
from draftproof.engine.text import Detokenizer, StopChecker, Tokenizer
from draftproof.metrics import SpeculationStats
from draftproof.models.loading import GenerationDefaults
from draftproof.sampling.noise import row_seed
from draftproof.sampling.params import check_possible, check_token_ids
from draftproof.types import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)

log = logging.getLogger(__name__)
TokenPrompt = dict[str, list[int]]
Prompt = str | list[int] | TokenPrompt


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt and its parameters, checked, in copies of ours: what a caller changes later changes nothing."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Request:
    """One prompt and its n choices. `pending` are deltas that nobody has taken yet. `streamed`: its caller may leave it
    standing for as long as it likes."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    started: float
    streamed: bool = False
    first_token_latency: float = 0.0
    stop_reasons: dict[int, int | str | None] = field(default_factory=dict)
    pending: deque[Delta] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)

    def take_pending(self) -> list[Delta]:
        taken = list(self.pending)
        self.pending.clear()
        return taken


class Frontend:
    """Requests in, deltas and outputs out. `step` runs the engine once for everybody."""

    def __init__(
        self, loaded: Loaded, tokenizer: Tokenizer | None, defaults: GenerationDefaults, config: EngineConfig
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.requests: dict[str, Request] = {}
        self._defaults = defaults
        self._seed = config.seed
        self._num_arrived = 0
        self._report = AcceptanceReport(loaded.engine.stats.speculation, time.perf_counter())

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Raises ValueError if it cannot be served. Nothing of the engine is touched: any thread may call this."""
        text, token_ids = self._encode(prompt)
        params = replace(params)  # which copies its lists and checks them again
        self._check(token_ids, params)
        check_possible(params, self.loaded.model.vocab_size, self._stop_ids(params), self._bad_words(params))
        return Prepared(text, token_ids, params)

    def queue(self, given: Prepared, *, streamed: bool = False) -> Request:
        """Queue a request."""
        token_ids, params = given.prompt_token_ids, given.params
        arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        request_id = f"request-{arrival}"
        sequences = [
            self._sequence(request_id, token_ids, params, arrival, index) for index in range(params.n)
        ]
        request = Request(
            request_id, given.prompt, token_ids, params, sequences, time.perf_counter(), streamed=streamed
        )
        self.requests[request_id] = request
        for sequence in sequences:
            self.loaded.engine.add(sequence)
        self.loaded.engine.stats.num_prompt_tokens += len(token_ids)
        return request

    def add(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request. Raises ValueError, leaving all other requests alone, if it cannot be served."""
        return self.queue(self.prepare(prompt, params))

    @property
    def is_generating(self) -> bool:
        """Whether requests run that nobody can leave standing."""
        return any(not r.finished and not r.streamed for r in self.requests.values())

    def detached(self, token_ids: list[int], params: SamplingParams) -> Sequence:
        """A checked sequence that belongs to no request and is not queued."""
        self._check(token_ids, params)
        sequence = self._sequence("detached", token_ids, params, -1, 0)
        sequence.reads_prefix_cache = False
        return sequence

    def step(self) -> None:
        """One engine step; its deltas wait in their requests."""
        for emission in self.loaded.engine.step():
            request = self.requests.get(emission.sequence.request_id)
            if request is not None:
                self._deliver(request, emission)
        if (line := self._report.due(time.perf_counter())) is not None:
            log.info("%s", line)

    def abort(self, request_id: str) -> None:
        """Stop a request; what it has so far stays in its output. An id that is not running is ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        for s in request.sequences:
            if s.finish_reason is None:
                s.finish_reason = "abort"
                self.loaded.engine.finish(s)
                request.pending.append(Delta(request_id, s.index, s.checker.flush(), [], [], "abort"))

    def close(self, request_id: str) -> None:
        """Forget a request, aborting it if it still runs."""
        self.abort(request_id)
        self.requests.pop(request_id, None)

    def output(self, request: Request) -> RequestOutput:
        """The request as far as it has come."""
        speculation = SpeculationStats()
        for s in request.sequences:
            speculation.add(s.speculation)
        prompt_rows = request.sequences[0].prompt_logprobs
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self._completion(request, s) for s in request.sequences],
            finished=request.finished,
            metrics=RequestMetrics(
                speculation=speculation,
                first_token_latency=request.first_token_latency,
                num_preemptions=sum(s.num_preemptions for s in request.sequences),
                num_cached_tokens=request.sequences[0].num_cached,
            ),
            prompt_logprobs=(
                None
                if request.params.prompt_logprobs is None
                else [None, *(self._logprobs(row) for row in prompt_rows)]
            ),
            error=next((_error(s) for s in request.sequences if s.finish_reason == "error"), None),
        )

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if set(prompt) != {"prompt_token_ids"} or not isinstance(
                prompt["prompt_token_ids"], (list, tuple)
            ):
                raise ValueError(
                    f"prompt={prompt!r:.80}: a dict must hold 'prompt_token_ids', a list of ids, and nothing else"
                )
            return None, list(prompt["prompt_token_ids"])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "prompt: is text, but the model has no tokenizer; give token ids, or tokenizer=..."
                )
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, (list, tuple)):
            return None, list(prompt)
        raise ValueError(
            f"prompt={prompt!r:.80}: must be text, a list of token ids or {{'prompt_token_ids': [...]}}"
        )

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        vocab_size, longest = self.loaded.model.vocab_size, self.loaded.max_model_len
        if not token_ids:
            raise ValueError("prompt: is empty; give at least one token")
        for position, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt: token id {token!r} at position {position}: ids go from 0 to {vocab_size - 1}"
                )
        if len(token_ids) >= longest:
            raise ValueError(
                f"prompt: {len(token_ids)} tokens leave no room for an answer in max_model_len={longest}; shorten the "
                "prompt or raise max_model_len"
            )
        check_token_ids(params, vocab_size)
        if self.tokenizer is None and (params.bad_words or params.stop_strings):
            raise ValueError("stop, bad_words: need a tokenizer; this model has none, give tokenizer=...")

    def _sequence(
        self, request_id: str, token_ids: list[int], params: SamplingParams, arrival: int, index: int
    ) -> Sequence:
        room = self.loaded.max_model_len - len(token_ids)
        max_tokens = min(room, params.max_tokens or room)
        detokenizer = None
        if params.detokenize and self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens, token_ids)
        return Sequence(
            request_id=request_id,
            index=index,
            arrival=arrival,
            tokens=list(token_ids),
            num_prompt=len(token_ids),
            params=params,
            row_seed=row_seed(params.seed, self._seed, arrival, index),
            limit=len(token_ids) + max_tokens,
            stop_ids=self._stop_ids(params),
            checker=StopChecker(params, eos_ids=self.eos_ids, max_tokens=max_tokens, detokenizer=detokenizer),
            bad_words_ids=self._bad_words(params),
            reads_prefix_cache=params.prompt_logprobs is None,
        )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Those that end an output, and that min_tokens holds back."""
        return frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else self.eos_ids)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Of the generation config, else of the model's, else the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        fallback = () if own is None else (own,)
        return self._defaults.eos_token_ids or self.loaded.model.eos_token_ids or fallback

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is encoded at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            assert self.tokenizer is not None
            for text in (word, f" {word.lstrip()}"):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _deliver(self, request: Request, e: Emission) -> None:
        if not request.first_token_latency:
            request.first_token_latency = time.perf_counter() - request.started
        accepted = [i < e.num_accepted for i in range(len(e.token_ids))]
        if e.finish_reason is not None:
            request.stop_reasons[e.sequence.index] = e.stop_reason
        request.pending.append(
            Delta(request.request_id, e.sequence.index, e.text, e.token_ids, accepted, e.finish_reason)
        )

    def _completion(self, request: Request, s: Sequence) -> CompletionOutput:
        wants = request.params.logprobs is not None
        return CompletionOutput(
            index=s.index,
            text=s.checker.text,
            token_ids=s.tokens[s.num_prompt :],
            cumulative_logprob=sum(row.logprob for row in s.logprobs) if wants else None,
            logprobs=[self._logprobs(row) for row in s.logprobs] if wants else None,
            finish_reason=s.finish_reason,
            stop_reason=request.stop_reasons.get(s.index),
        )

    def _logprobs(self, row: LogprobRow) -> dict[int, Logprob]:
        found = {
            token: Logprob(logprob, rank, self._piece(token))
            for rank, (token, logprob) in enumerate(row.top, start=1)
        }
        found.setdefault(row.token_id, Logprob(row.logprob, row.rank, self._piece(row.token_id)))
        return found

    def _piece(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)


def _error(s: Sequence) -> str:
    """Why a sequence ended with finish_reason "error"."""
    if not s.none_left:
        return "the target's logits held no number"
    names = [name for name in ("allowed_token_ids", "bad_words", "stop_token_ids") if getattr(s.params, name)]
    if s.params.min_tokens:
        names.append(f"min_tokens={s.params.min_tokens}")
    return (
        f"no token is possible after {s.num_outputs}: {', '.join(names)} rule out all of them; ask for less"
    )


def one_each(params: SamplingParams | Seq[SamplingParams], count: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one for each."""
    if isinstance(params, SamplingParams):
        return [params] * count
    listed: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params]
    if not all(isinstance(p, SamplingParams) for p in listed):
        raise ValueError(
            f"sampling_params={params!r:.80}: must be one SamplingParams, or a list with one each"
        )
    if len(listed) != count:
        raise ValueError(f"sampling_params: {len(listed)} given for {count} prompts; give one, or one each")
    return listed
