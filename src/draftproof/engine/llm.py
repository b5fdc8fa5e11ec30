"""`LLM`: vLLM's offline interface over the engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from draftproof.config import EngineConfig
from draftproof.engine.build import Progress, build
from draftproof.engine.frontend import Frontend, Prepared, Prompt, Request, one_each
from draftproof.engine.memory import must_fit
from draftproof.engine.probe import draft
from draftproof.engine.text import Tokenizer
from draftproof.engine.turns import Turns, claim_process
from draftproof.metrics import EngineStats, SpeculationStats
from draftproof.models.loading import read_generation_config, resolve_tokenizer
from draftproof.types import CompletionOutput, Delta, RequestMetrics, RequestOutput, SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, its drafter and a queue of requests.

    Keywords are the fields of `EngineConfig`; `speculative_config` is a dict such as
    `{"method": "ngram", "num_speculative_tokens": 4}` or `{"model": "path/to/head"}`. Without `model` the small
    embedded one is used. Raises ValueError, naming the field and the fix, for whatever cannot be served.

    Threads may share it: each step is one thread's, and computes the requests of all. A process that is forked off may
    not (RuntimeError); it is spawned, and makes an `LLM` of its own.
    """

    def __init__(
        self, model: str | None = None, *, progress: Progress | None = None, **settings: Any
    ) -> None:
        self.config = EngineConfig.from_kwargs(model=None if model is None else str(model), **settings)
        claim_process()
        self._turns = Turns()
        with must_fit(self.config):
            loaded = build(self.config, progress or show_progress)
        self._defaults = read_generation_config(loaded.directory)
        self._frontend = Frontend(loaded, self._load_tokenizer(loaded.directory), self._defaults, self.config)
        self.max_model_len = loaded.max_model_len
        self.memory = loaded.memory
        logging.getLogger(__name__).info("%s", self.memory)
        self.num_speculative_tokens = loaded.num_drafts

    def _load_tokenizer(self, directory: Any) -> Tokenizer | None:
        if self.config.tokenizer is not None:
            return Tokenizer(resolve_tokenizer(self.config.tokenizer))
        has_one = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        return Tokenizer(directory) if has_one else None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError where the model has none."""
        if self._frontend.tokenizer is None:
            raise ValueError(f"model={self.config.model!r}: has no tokenizer; give tokenizer=...")
        return self._frontend.tokenizer

    @property
    def stats(self) -> EngineStats:
        return self._frontend.loaded.engine.stats

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, changed by what the model's generation_config.json recommends."""
        d = self._defaults
        given = {
            "temperature": d.temperature,
            "top_p": d.top_p,
            "top_k": d.top_k,
            "min_p": d.min_p,
            "repetition_penalty": d.repetition_penalty,
        }
        return SamplingParams(**{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts: text, a list of token ids, `{"prompt_token_ids": [...]}`, or several.

        A single prompt that cannot be served raises ValueError. Among several it gets an output whose `error` says
        why, with the id "refused-" and its place among them, and the others go on.
        """
        self._turns.check_process()
        listed = _as_list(prompts)
        params = one_each(sampling_params or self.default_sampling_params(), len(listed))
        entries: list[Request | RequestOutput] = []
        bar = _bar(len(listed)) if use_tqdm else None
        try:
            prepared: list[Prepared | RequestOutput] = []
            for prompt, given in zip(listed, params, strict=True):
                prepared.append(self._prepare(prompt, given, None if len(listed) == 1 else len(prepared)))
            with self._turns.take():
                entries.extend(self._frontend.queue(p) if isinstance(p, Prepared) else p for p in prepared)
            self._run([e for e in entries if isinstance(e, Request)], bar)
            return [self._frontend.output(e) if isinstance(e, Request) else e for e in entries]
        finally:
            if bar is not None:
                bar.close()
            self._close(entries)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """`generate` on one conversation or several; `template` goes to the model's chat template."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts: list[Prompt] = [self.tokenizer.chat(m, **template) for m in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Deltas as they come, of one prompt or several; leaving the loop aborts what still runs.

        Raises ValueError for the first prompt that cannot be served, before anything runs.
        """
        self._turns.check_process()
        listed = _as_list(prompts)
        params = one_each(sampling_params or self.default_sampling_params(), len(listed))
        prepared = [self._frontend.prepare(p, given) for p, given in zip(listed, params, strict=True)]
        return self._deltas(prepared)

    def _deltas(self, prepared: list[Prepared]) -> Iterator[Delta]:
        requests: list[Request] = []
        try:
            with self._turns.take():
                requests.extend(self._frontend.queue(p, streamed=True) for p in prepared)
            going_on = True
            while going_on:
                with self._turns.take():
                    if not any(r.pending for r in requests) and any(not r.finished for r in requests):
                        self._frontend.step()
                    deltas = [d for r in requests for d in r.take_pending()]
                    going_on = any(not r.finished for r in requests)
                yield from deltas
        finally:
            self._close(requests)

    def abort(self, request_id: str) -> None:
        """Stop a running request: its stream ends with finish_reason "abort". Unknown ids are ignored. Called in the
        middle of a step, or while another thread is in one, it takes effect when that ends."""
        self._turns.check_process()
        self._turns.soon(partial(self._frontend.abort, request_id))

    def draft(
        self, prompt_token_ids: Sequence[int], k: int | None = None, next_token: int | None = None
    ) -> list[int]:
        """What the drafter would propose after the prompt and `next_token` (default: the target's greedy one).

        At most `k` ids, fewer where the drafter has no more. What other threads generate is brought to its end first.
        Raises ValueError without a drafter, for k beyond `num_speculative_tokens`, and while a stream is open.
        """
        self._turns.check_process()
        most = self.num_speculative_tokens
        if not most:
            raise ValueError("draft: no drafter; give speculative_config to LLM")
        k = most if k is None else k
        if not isinstance(k, int) or not 1 <= k <= most:
            raise ValueError(f"k={k!r}: must be an integer from 1 to num_speculative_tokens={most}")
        token_ids = list(prompt_token_ids)
        if next_token is None:
            greedy = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            next_token = self.generate([token_ids], greedy, use_tqdm=False)[0].outputs[0].token_ids[0]
        greedy = SamplingParams(temperature=0, max_tokens=k + 2, detokenize=False)
        sequence = self._frontend.detached([*token_ids, next_token], greedy)
        with self._turns.take():
            while self._frontend.is_generating:
                self._frontend.step()
            return draft(self._frontend.loaded.engine, sequence, k)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, number: int | None
    ) -> Prepared | RequestOutput:
        """`number` among several prompts, which go on without this one; None: it is the only one."""
        try:
            return self._frontend.prepare(prompt, params)
        except ValueError as error:
            if number is None:
                raise
            return _refused(prompt, number, str(error))

    def _run(self, requests: list[Request], bar: Any) -> None:
        left = requests
        if bar is not None:
            bar.update(bar.total - len(left))  # refused ones
        while left:
            with self._turns.take():
                if any(not r.finished for r in left):  # another thread's steps may have been enough
                    self._frontend.step()
                still = [r for r in left if not r.finished]
                for request in left:
                    request.pending.clear()
            if bar is not None:
                bar.update(len(left) - len(still))
            left = still

    def _close(self, entries: Sequence[Request | RequestOutput]) -> None:
        for entry in entries:
            self._turns.soon(partial(self._frontend.close, entry.request_id))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of ids is one prompt; a list of anything else is several."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts={prompts!r:.80}: must be text, a list of token ids, or a list of such prompts"
        )
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(p, int) for p in listed) else listed


def _refused(prompt: Prompt, number: int, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=f"refused-{number}",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")],
        finished=True,
        metrics=RequestMetrics(SpeculationStats()),
        error=error,
    )


def show_progress(what: str, done: int, total: int) -> None:
    """A line on standard error while something is done that takes its time."""
    if sys.stderr.isatty():
        print(f"\r{what}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == 0:
        print(f"{what}: {total} to do", file=sys.stderr, flush=True)


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="req", disable=None)
