"""`LLM`: vLLM's offline interface over the engine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof import __version__, assets
from draftproof.config import EngineConfig
from draftproof.engine.core import EngineCore
from draftproof.engine.loading.base import ProgressCallback
from draftproof.engine.loading.build import Loaded, build
from draftproof.engine.loading.memory import must_fit
from draftproof.frontend.fetching import Fetcher
from draftproof.frontend.images import IMAGE, MOST_BYTES, ImageReader, split_messages
from draftproof.frontend.input_processor import InputProcessor, PreparedRequest, Prompt, as_lists, one_each
from draftproof.frontend.output_processor import Request
from draftproof.frontend.replicas.build import build as build_replicas
from draftproof.frontend.requests import Requests
from draftproof.frontend.text import Tokenizer
from draftproof.frontend.turns import Turns, claim_process
from draftproof.metrics import EngineStats, SpeculationStats
from draftproof.models.loading import read_generation_config, resolve_tokenizer
from draftproof.runtime.collector import exempt_loaded
from draftproof.types import CompletionOutput, Delta, RequestMetrics, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from draftproof.frontend.kv_events import Publisher

log = logging.getLogger(__name__)
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, its drafter and a queue of requests.

    Keywords are the fields of `EngineConfig`; `speculative_config` is a dict such as
    `{"method": "ngram", "num_speculative_tokens": 4}` or `{"model": "path/to/head"}`. Without `model` a small one is
    used (`assets.default_model`). Raises ValueError, naming the field and the fix, for whatever cannot be served.

    Threads may share it: their requests form one batch. A forked process may not use it (RuntimeError); spawn processes
    instead, each with its own `LLM`. `close`, or leaving `with LLM(...) as llm`, frees its memory.

    `arithmetic` names what the bits of results depend on besides the model: two machines with "float32", or with the
    same kind of bf16, agree if both run the compiled operators and have fused multiply-adds. `operators` names the
    library of compiled operators with its fingerprint, or "torch". `engine` is the `EngineCore`, or with
    `data_parallel_size` above 1 several of them in their own processes; `requests` are the requests to it. Both are
    read-only while another thread may use this object.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: ProgressCallback | None = None,
        replica: int = 0,
        **settings: Any,
    ) -> None:
        """replica: the number of this engine among several, whose ports are consecutive."""
        self.config = EngineConfig.from_kwargs(model=None if model is None else str(model), **settings)
        claim_process()
        note = assets.default_model().note if model is None else ""
        if note:
            log.warning("%s", note)
        self._turns = Turns()
        self._closed = False
        publisher = self._publisher(replica)  # first: its ports may be taken
        with must_fit(self.config):
            loaded = self._build(progress or show_progress)
        self.directory, self.items, self.methods = loaded.directory, loaded.items, loaded.methods
        self._defaults = read_generation_config(loaded.directory)
        self.engine = loaded.engine
        self.model_config = loaded.model
        self._items = loaded.items
        self.max_model_len = loaded.max_model_len
        self.memory = loaded.memory
        self.arithmetic = loaded.arithmetic
        self.operators = loaded.operators
        self.device_name = loaded.device_name
        facts = (self.memory, self.arithmetic, self.operators)
        log.info("%s; arithmetic: %s; compiled operators: %s", *facts)
        self.num_speculative_tokens = loaded.num_drafts
        tokenizer = self._load_tokenizer(loaded.directory)
        inputs = InputProcessor(
            loaded.model,
            loaded.max_model_len,
            tokenizer,
            self._defaults,
            self.config.seed,
            loaded.methods,
            loaded.items,
            self._image_reader(loaded),
        )
        self.requests = Requests(self.engine, inputs, publisher)
        self._end_exemption = exempt_loaded(self)

    def _build(self, progress: ProgressCallback) -> Loaded:
        return (build_replicas if self.has_replicas else build)(self.config, progress)

    @property
    def has_replicas(self) -> bool:
        """Whether requests are computed in other processes."""
        return self.config.data_parallel_size > 1

    def _publisher(self, replica: int) -> Publisher | None:
        """The publisher of this engine's prefix cache events, or None; each replica publishes its own."""
        config = self.config.kv_events_config
        if config is None or not config.is_published or self.has_replicas:
            return None
        try:
            from draftproof.frontend.kv_events import Publisher
        except ImportError as error:
            raise ValueError(
                f"kv_events_config: {error.name} is missing; pip install 'draftproof[events]'"
            ) from None
        return Publisher(config, replica)

    def close(self) -> None:
        """Free the memory. New requests raise RuntimeError, and running ones are aborted: requests of other threads end
        after the current step, with the output so far and the finish_reason "abort". Closing again does nothing."""
        self._turns.check_caller()
        self._closed = True
        self._soon(self.requests.shutdown)
        with self._turns.take():
            pass  # the shutdown has run by now, in this thread or in the one that had the turn
        self._end_exemption()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _load_tokenizer(self, directory: Any) -> Tokenizer | None:
        if self.config.tokenizer is not None:
            return Tokenizer(resolve_tokenizer(self.config.tokenizer))
        has_one = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        return Tokenizer(directory) if has_one else None

    def _image_reader(self, loaded: Loaded) -> ImageReader | None:
        allowed, domains = self.config.allowed_local_media_path, self.config.allowed_media_domains
        if loaded.vision is None:
            return None
        folder = None if allowed is None else Path(allowed)
        fetcher = Fetcher(domains, MOST_BYTES) if domains else None
        return ImageReader(loaded.vision, loaded.items, loaded.max_model_len, folder, fetcher)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError if the model has none."""
        if self.requests.inputs.tokenizer is None:
            raise ValueError(f"model={self.config.model!r}: has no tokenizer; give tokenizer=...")
        return self.requests.inputs.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, by vLLM's name."""
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests are recomputed, to the same bits. Returns True, as in vLLM."""
        self._check_open()
        with self._turns.take():
            self.requests.reset_prefix_cache()
        return True

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything that output bits depend on, except the weights and the requests' settings: two engines
        with the same fingerprint and model give the same outputs."""
        exact = (self.config.exact, self.config.verification)
        versions = (__version__, importlib.metadata.version("torch"))
        facts = (*versions, platform.machine(), self.device_name, self.arithmetic, self.operators, *exact)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def core(self) -> EngineCore:
        """The engine, for access to its internals. ValueError if it is not in this process."""
        if not isinstance(self.engine, EngineCore):
            raise ValueError("data_parallel_size: must be 1 for this, which looks into the engine")
        return self.engine

    @property
    def has_tokenizer(self) -> bool:
        return self.requests.inputs.tokenizer is not None

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, overridden by the model's generation_config.json."""
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
        """Generate outputs, in the order of the prompts. A prompt is text, a list (array, tensor) of token ids,
        `{"prompt": text}`, `{"prompt_token_ids": [...]}` or `{"prompt_embeds": tensor [rows, hidden]}`.

        A single prompt that cannot be served raises ValueError. With several prompts, it is returned with `error` set
        and the id "refused-" plus its index; the others complete.
        """
        self._check_open()
        listed = _as_list(prompts)
        params = one_each(sampling_params or self.default_sampling_params(), len(listed))
        entries: list[Request | RequestOutput] = []
        bar = _bar(len(listed)) if use_tqdm else None
        try:
            prepared: list[PreparedRequest | RequestOutput] = []
            for prompt, given in zip(listed, params, strict=True):
                prepared.append(self._prepare(prompt, given, None if len(listed) == 1 else len(prepared)))
            entries.extend(p if isinstance(p, RequestOutput) else self._start(p) for p in prepared)
            with self._watched(prepared) if use_tqdm else contextlib.nullcontext():
                self._run([e for e in entries if isinstance(e, Request)], bar)
            return [self.requests.output(e) if isinstance(e, Request) else e for e in entries]
        finally:
            if bar is not None:
                bar.close()
            self._forget(entries)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """`generate` for one or several conversations. A message's content is text, or a list of parts: text, and, for
        models that read images, `{"type": "image_url", "image_url": {"url": ...}}` (a data URL, a file in
        `allowed_local_media_path`, or a URL of `allowed_media_domains`) or `{"type": "image", "image": an image
        object}`.

        `template`: add_generation_prompt, chat_template, continue_final_message, and variables of the model's chat
        template, such as tools or enable_thinking; ValueError for anything else.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self.chat_prompt(m, **template) for m in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Messages, **template: Any) -> Prompt:
        """A conversation as a prompt; see `chat`."""
        plain, found = split_messages(messages, self.requests.inputs.images)
        reader = self.requests.inputs.images
        if reader is None or not found:
            return self.tokenizer.chat(plain, **template)
        rewrite = partial(reader.marked, tokenizer=self.tokenizer)
        token_ids = self.tokenizer.chat(plain, rewrite=rewrite, **template)
        return {"prompt_token_ids": token_ids, "multi_modal_data": found}

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Yield the deltas of one or several prompts as they come; leaving the loop aborts what still runs.

        Raises ValueError for the first prompt that cannot be served, before anything runs.
        """
        self._check_open()
        listed = _as_list(prompts)
        params = one_each(sampling_params or self.default_sampling_params(), len(listed))
        prepared = [self.requests.prepare(p, given) for p, given in zip(listed, params, strict=True)]
        return self._deltas(prepared)

    def _deltas(self, prepared: list[PreparedRequest]) -> Iterator[Delta]:
        requests: list[Request] = []
        try:
            requests.extend(self._start(p, streamed=True) for p in prepared)
            while True:
                self._turns.until(partial(_has_news, requests), self.requests.step)
                is_over = all(r.finished for r in requests)  # read before the deltas, so that none is missed
                yield from [d for r in requests for d in r.take_pending()]
                if is_over:
                    return
        finally:
            self._forget(requests)

    def _start(self, prepared: PreparedRequest, *, streamed: bool = False) -> Request:
        """Queue a request for the next step, in whichever thread."""
        request, arrival = self.requests.new(prepared, streamed=streamed)
        self._soon(partial(self.requests.start, request, arrival))
        return request

    def _soon(self, action: Callable[[], None]) -> None:
        """Run the action when no step is running; see `Turns.soon`."""
        self._turns.soon(action)
        self.engine.wake()  # a running step may be waiting for such an event

    def _check_open(self) -> None:
        """Raise RuntimeError after `close`, after the engine has ended, and in a forked process."""
        self._turns.check_process()
        if self._closed:
            raise RuntimeError("LLM: is closed; make another")
        if self.engine.error is not None:
            raise RuntimeError(f"LLM: {self.engine.error}")

    def abort(self, request_id: str) -> None:
        """Stop a running request: its stream ends with finish_reason "abort". Unknown ids are ignored. If a step is
        running, in this thread or another, it takes effect after that."""
        self._turns.check_process()
        self._soon(partial(self.requests.abort, request_id))

    def draft(
        self, prompt_token_ids: Sequence[int], k: int | None = None, next_token: int | None = None
    ) -> list[int]:
        """The drafter's proposal after the prompt and `next_token` (default: the target's greedy one).

        At most `k` ids, fewer if the drafter has no more. Requests of other threads are finished first. Raises
        ValueError without a drafter, for k beyond `num_speculative_tokens`, and while a stream is open.
        """
        self._check_open()
        most = self.num_speculative_tokens
        if not most:
            raise ValueError("draft: no drafter; give speculative_config to LLM")
        k = most if k is None else k
        if not isinstance(k, int) or not 1 <= k <= most:
            raise ValueError(f"k={k!r}: must be an integer from 1 to num_speculative_tokens={most}")
        token_ids = list(as_lists(prompt_token_ids))
        if next_token is None:
            greedy = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            output = self.generate([token_ids], greedy, use_tqdm=False)[0]
            self._check_open()  # closed meanwhile: there may be no token
            next_token = output.outputs[0].token_ids[0]
        spec = self.requests.inputs.draft_spec([*token_ids, next_token])
        with self._turns.take():
            while self.requests.is_generating:
                self._check_open()
                self.requests.step()
            return self.engine.draft(spec, k)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, number: int | None
    ) -> PreparedRequest | RequestOutput:
        """The checked request, or a refused output. `number`: index among several prompts; None: the only prompt, for
        which ValueError is raised."""
        try:
            return self.requests.prepare(prompt, params)
        except ValueError as error:
            if number is None:
                raise
            return _refused(prompt, number, str(error))

    def _run(self, requests: list[Request], bar: Any) -> None:
        """Wait until all are finished, by steps of this thread or others."""
        if bar is not None:
            bar.update(bar.total - len(requests))  # refused ones
        left = requests
        while left:
            num_wanted = (
                0 if bar is None else len(left) - 1
            )  # return after each finished one, to move the bar
            self._turns.until(partial(_at_most, num_wanted, left), self.requests.step)
            still = [r for r in left if not r.finished]
            if bar is not None:
                bar.update(len(left) - len(still))
            left = still

    @contextlib.contextmanager
    def _watched(self, prepared: Sequence[PreparedRequest | RequestOutput]) -> Iterator[None]:
        """Context manager with a progress bar of these prompts' encoded images; without images no bar."""
        inputs = [one for p in prepared if isinstance(p, PreparedRequest) for one in p.inputs]
        left = {one.content for one in inputs if one.kind == IMAGE}
        if not left:
            yield
            return
        bar, watchers = _bar(len(left), "images", "img"), self._items.watchers

        def watch(content: bytes) -> None:
            if content in left:
                left.discard(content)
                bar.update(1)

        watchers.append(watch)
        try:
            yield
            bar.update(len(left))  # the rest was not needed, thanks to the prefix cache
        finally:
            watchers.remove(watch)
            bar.close()

    def _forget(self, entries: Sequence[Request | RequestOutput]) -> None:
        for entry in entries:
            self._soon(partial(self.requests.close, entry.request_id))


def _at_most(number: int, requests: Sequence[Request]) -> bool:
    """Whether at most `number` requests are still running."""
    return sum(not r.finished for r in requests) <= number


def _has_news(requests: Sequence[Request]) -> bool:
    return any(r.pending for r in requests) or all(r.finished for r in requests)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A list (array, tensor) of ids is one prompt; a list of anything else is several."""
    prompts = as_lists(prompts)
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts={prompts!r:.80}: must be text, a list of token ids, or a list of such prompts"
        )
    listed: list[Any] = [as_lists(prompt) for prompt in prompts]
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
    """Show progress of a slow operation on standard error."""
    if sys.stderr.isatty():
        print(f"\r{what}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == 0:
        print(f"{what}: {total} to do", file=sys.stderr, flush=True)


def _bar(total: int, what: str = "prompts", unit: str = "req") -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, disable=None)
