"""`AsyncLLM`: an engine in its own thread, for the tasks of an event loop. The server is built on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from draftproof.frontend.fetching import Remote
from draftproof.frontend.images import ImageReader
from draftproof.frontend.input_processor import NO_HINTS, PreparedRequest, Prompt
from draftproof.frontend.llm import LLM
from draftproof.frontend.output_processor import Request
from draftproof.types import Delta, RequestHints, RequestOutput, SamplingParams

log = logging.getLogger(__name__)
MOST_FETCHED = 16  # remote images per request; each may have 64 MiB
LOOK = 0.01  # seconds between two checks whether the engine's thread has ended
T = TypeVar("T")


class ClosedError(RuntimeError):
    """Raised by calls to an engine that takes no more requests."""


class AnswerStream:
    """The deltas of one request as they come, for one task. It closes itself when the request ends.

    `started`, `first` and `last`: when the request was made, and when its first and latest tokens came, in seconds of
    `time.perf_counter`.
    """

    def __init__(
        self, request: Request, loop: asyncio.AbstractEventLoop, leave: Callable[[AnswerStream], None]
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.given.prompt_token_ids
        self.params = request.given.params
        self.loop = loop
        self.over = asyncio.Event()  # set once no more deltas will come
        self.started = self.first = self.last = time.perf_counter()
        self.request = request
        self._leave = leave
        self._news = asyncio.Event()
        self._waiting: deque[Delta] = deque()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._waiting:
            if self.over.is_set():
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()

    async def with_pauses(self, interval: float) -> AsyncIterator[Delta | None]:
        """Deltas, and None whenever `interval` seconds have passed without one."""
        alarm = _Alarm(self, interval)
        try:
            while True:
                while self._waiting:
                    yield self._waiting.popleft()
                if self.over.is_set():
                    return
                self._news.clear()
                await self._news.wait()
                if not self._waiting and not self.over.is_set():
                    yield None
        finally:
            alarm.cancel()

    def wake(self) -> None:
        """Wake the waiting task, although there may be no delta."""
        self._news.set()

    def deliver(self, deltas: Sequence[Delta], *, is_over: bool) -> None:
        """Append deltas. Called in the loop's thread."""
        self.last = time.perf_counter()
        if self.first == self.started:
            self.first = self.last
        self._waiting += deltas
        if is_over:
            self.over.set()
        self._news.set()

    def abandon(self) -> None:
        """End the stream as if aborted, since no step will bring more. Called in the loop's thread."""
        if not self.over.is_set():
            left = [c.index for c in self.request.choices if c.finish_reason is None]
            self.deliver(
                [Delta(self.request_id, i, "", [], finish_reason="abort") for i in left], is_over=True
            )

    def close(self) -> None:
        """Abort the request if it still runs; its memory is freed after the current step. Idempotent."""
        if not self.over.is_set():
            self._waiting.clear()
            self.over.set()
            self._news.set()
            self._leave(self)


class _Alarm:
    """Wakes a stream whenever no delta has come for `interval` seconds, with one timer per stream, not per delta."""

    def __init__(self, stream: AnswerStream, interval: float) -> None:
        self._stream = stream
        self._interval = interval
        self._rung = time.perf_counter()
        self._timer = stream.loop.call_later(interval, self._look)

    def _look(self) -> None:
        if self._stream.over.is_set():  # although the iterator was not closed
            return
        now = time.perf_counter()
        rest = max(self._stream.last, self._rung) + self._interval - now
        if rest <= 0:
            self._rung, rest = now, self._interval
            self._stream.wake()
        self._timer = self._stream.loop.call_later(rest, self._look)

    def cancel(self) -> None:
        self._timer.cancel()


class AsyncLLM:
    """An `LLM` whose steps run in a thread of its own, so that requests of many tasks are batched.

    It takes the `LLM` over: other code may from then on read only its settings, statistics and tokenizer. Tasks never
    block the event loop; another thread tokenizes prompts. Answers are those that `LLM` gives to the same prompt,
    parameters and seed. Calls raise `ClosedError`, a RuntimeError, once no more requests are taken.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._requests = llm.requests
        self._streams: dict[str, AnswerStream] = {}
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # guards `_is_ended`: no action is queued after the last ones were run
        self._is_closing = self._is_stopped = self._is_ended = False
        self._deadline = math.inf  # when a shutdown aborts the running requests
        self._encoder = ThreadPoolExecutor(1, "draftproof-encoder")
        self._compiler = ThreadPoolExecutor(2, "draftproof-grammars")
        self._fetcher = ThreadPoolExecutor(8, "draftproof-fetcher")
        self._prepared: set[asyncio.Future[Any]] = set()  # work given to helper threads
        self._thread = threading.Thread(target=self._run, name="draftproof-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        hints: RequestHints = NO_HINTS,
    ) -> AsyncIterator[Delta]:
        """Deltas as they come, of all `params.n` choices; the last of each has a finish_reason. Leaving the loop, or
        cancelling the task, aborts the request. Errors as in `prepare` and `begin`."""
        stream = self.begin(await self.prepare(prompt, params, hints), request_id)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, hints: RequestHints = NO_HINTS
    ) -> PreparedRequest:
        """Tokenize the prompt and check it with the parameters (None: the model's own); nothing runs yet. ValueError if
        it cannot be served."""
        self._check_open()
        params = params or self.llm.default_sampling_params()
        return await self.encode(partial(self._requests.prepare, prompt, params, hints))

    def begin(self, given: PreparedRequest, request_id: str | None = None) -> AnswerStream:
        """Queue what `prepare` returned, for the calling task; a task that wants no more deltas closes the stream.

        Raises ValueError for a `request_id` that is running.
        """
        request, arrival = self._requests.new(given, streamed=True, request_id=request_id)
        stream = AnswerStream(request, asyncio.get_running_loop(), self._leave)
        if self._streams.setdefault(request.request_id, stream) is not stream:
            raise ValueError(f"request_id={request_id!r}: is running already; give another")
        try:
            self._check_open()
            self._soon(partial(self._begin, stream, arrival))
        except ClosedError:
            del self._streams[request.request_id]
            raise
        return stream

    async def compile(self, params: SamplingParams, seconds: float) -> None:
        """Compile the grammar of `params.structured_outputs` in another thread, so that `prepare` finds it compiled and
        other prompts need not wait. ValueError if it cannot be compiled or takes longer than `seconds`; ClosedError as
        in `encode`."""
        if params.structured_outputs is None:
            return
        work = partial(self._requests.inputs.grammar, params)
        try:
            await asyncio.wait_for(self._help(self._compiler, work), seconds)
        except TimeoutError:
            raise ValueError(
                f"structured_outputs: took longer than grammar_timeout={seconds:g} seconds to compile; ask for less"
            ) from None

    async def encode(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in the thread that tokenizes prompts. ClosedError once no more requests are taken,
        even if the work is queued or running then."""
        return await self._help(self._encoder, work)

    async def fetch(self, prompt: Prompt) -> Prompt:
        """The prompt with its remote images and frames fetched. As that may take long, it has its own threads.
        ValueError for what cannot be fetched, ClosedError as in `encode`."""
        reader = self._requests.inputs.images
        data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        if reader is None or not data:
            return prompt
        assert isinstance(prompt, dict), "it has images"
        if (number := _num_remote(list(data.values()))) > MOST_FETCHED:
            raise ValueError(
                f"multi_modal_data: {number} images are to be fetched, at most {MOST_FETCHED} of a request are; give "
                "the others as data URIs"
            )
        return {
            **prompt,
            "multi_modal_data": {kind: await self._fetched(x, reader) for kind, x in data.items()},
        }

    async def _fetched(self, given: Any, reader: ImageReader) -> Any:
        if isinstance(given, (list, tuple)):
            return type(given)(await asyncio.gather(*(self._fetched(each, reader) for each in given)))
        is_elsewhere = isinstance(given, Remote)
        return await self._help(self._fetcher, partial(reader.fetched, given)) if is_elsewhere else given

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of `work`, which makes part of an answer; runs in the tokenizing thread while that exists."""
        if self._is_closing:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def output(self, stream: AnswerStream) -> RequestOutput:
        """The output of a finished request, with its metrics."""
        return self._requests.output(stream.request)

    def abort(self, request_id: str) -> None:
        """Stop a request: its iterator ends with finish_reason "abort". Unknown ids are ignored."""
        self._soon_if_open(partial(self._requests.abort, request_id))

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache; running requests are recomputed, to the same bits."""

        await self._in_engine(self._requests.reset_prefix_cache)

    async def pause(self) -> None:
        """Make no steps until `resume`; requests are accepted and wait."""
        await self._in_engine(partial(self.llm.engine.set_paused, True))

    async def resume(self) -> None:
        await self._in_engine(partial(self.llm.engine.set_paused, False))

    async def shutdown(self, patience: float = 0.0, grace: float | None = None) -> None:
        """Take no more requests, let running ones go on for `patience` seconds, end the rest with finish_reason
        "abort", and free the memory.

        The current step then has `grace` seconds to end (None: as long as it takes). If it does not, the remaining
        requests are answered all the same, the memory is not freed, and `is_alive` stays True. Of several calls the
        earliest deadline counts.
        """
        self._is_closing = True
        for helpers in (self._encoder, self._compiler, self._fetcher):
            helpers.shutdown(wait=False)
        for future in list(self._prepared):
            future.get_loop().call_soon_threadsafe(future.cancel)
        self._deadline = min(self._deadline, time.monotonic() + patience)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                await self.drained()
        self._soon_if_open(self._stop)
        with contextlib.suppress(TimeoutError):
            left = None if grace is None else max(0.0, self._deadline + grace - time.monotonic())
            async with asyncio.timeout(left):
                while self.is_alive:
                    await asyncio.sleep(LOOK)
        if self.is_alive:
            log.error("a step has not ended %g s after the engine was told to; it is left alone", grace)
            for stream in list(self._streams.values()):
                stream.loop.call_soon_threadsafe(stream.abandon)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    async def drained(self) -> None:
        """Wait until no request is open. Call it in the event loop of the requesting tasks."""
        while self._streams and not self._is_ended:
            for stream in list(self._streams.values()):
                await stream.over.wait()
            with contextlib.suppress(RuntimeError):  # the engine has ended meanwhile
                await self._in_engine(lambda: None)  # runs after the queued `_forget` of closed streams

    @property
    def num_open(self) -> int:
        """Number of requests that are accepted and not yet answered."""
        return len(self._streams)

    @property
    def error(self) -> str | None:
        """Why no more requests are taken; None while they are."""
        if self.llm.engine.error is not None:
            return self.llm.engine.error
        return "the engine is shutting down" if self._is_closing or self._is_ended else None

    async def _help(self, helpers: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """The result of `work`, run by one of the `helpers`. ClosedError as in `encode`."""
        self._check_open()
        future = asyncio.get_running_loop().run_in_executor(helpers, work)
        self._prepared.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_closing or (task is not None and task.cancelling()):
                raise
            raise ClosedError(f"AsyncLLM: {self.error}") from None
        finally:
            self._prepared.discard(future)

    def _check_open(self) -> None:
        if self.error is not None:
            raise ClosedError(f"AsyncLLM: {self.error}")

    def _soon(self, action: Callable[[], None]) -> None:
        """Run `action` in the engine's thread before its next step. ClosedError if there will be none."""
        with self._gate:
            if self._is_ended:
                raise ClosedError(f"AsyncLLM: {self.error}")
            self._actions.put(action)
        self.llm.engine.wake()

    def _soon_if_open(self, action: Callable[[], None]) -> None:
        with self._gate:
            if not self._is_ended:
                self._actions.put(action)
        self.llm.engine.wake()

    async def _in_engine(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in the engine's thread between two steps."""
        future: Future[T] = Future()

        def act() -> None:
            if not future.set_running_or_notify_cancel():  # the caller was cancelled
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._soon(act)
        return await asyncio.wrap_future(future)

    def _leave(self, stream: AnswerStream) -> None:
        self._soon_if_open(partial(self._forget, stream))

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._act()
                if self.llm.engine.is_due:
                    self._requests.step()
                self._hand_out()
        except BaseException as error:
            log.exception("the engine has failed")
            self._end(f"the engine has failed: {type(error).__name__}: {error}")
        else:
            self._end(None)

    def _act(self) -> None:
        """Run the actions queued since the last step; if the engine has nothing to compute, wait for one."""
        if not self.llm.engine.is_due:
            self._actions.get()()
        while not self._actions.empty():
            self._actions.get()()

    def _begin(self, stream: AnswerStream, arrival: int) -> None:
        if stream.over.is_set():  # closed before it began
            self._forget(stream)
            return
        try:
            self._requests.start(stream.request, arrival)
        except Exception as error:  # concerns this request only, since no step was made
            log.exception("a request could not be started")
            self._requests.fail(stream.request, f"{type(error).__name__}: {error}")

    def _forget(self, stream: AnswerStream) -> None:
        """Close the stream's request, unless it is over and its id belongs to another one by now."""
        if self._streams.get(stream.request_id) is stream:
            self._requests.close(stream.request_id)
            del self._streams[stream.request_id]

    def _stop(self) -> None:
        self._is_stopped = True

    def _hand_out(self) -> None:
        """Pass each event loop the new deltas of its streams, in one call per step."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[AnswerStream, list[Delta], bool]]] = {}
        for request in list(self._requests.running.values()):
            if not request.pending:
                continue
            stream, is_over = self._streams[request.request_id], request.finished
            news.setdefault(stream.loop, []).append((stream, request.take_pending(), is_over))
            if is_over:
                self._forget(stream)
        for loop, batch in news.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: there are no readers any more
                for stream, _, _ in batch:
                    self._forget(stream)

    def _end(self, error: str | None) -> None:
        """End all requests, aborted or failed with `error`, and close the engine."""
        with self._gate:
            self._is_ended = True
            if error is not None:
                self.llm.engine.error = error
        while not self._actions.empty():  # `_gate` lets nothing be added any more
            _try(self._actions.get())
        for request in list(self._requests.running.values()):
            if error is None:
                _try(partial(self._requests.abort, request.request_id))
            else:
                _try(partial(self._requests.fail, request, error))
        _try(self._hand_out)
        for stream in list(self._streams.values()):  # those that have not ended yet
            _try(partial(stream.loop.call_soon_threadsafe, stream.abandon))
        _try(self.llm.close)


def _try(action: Callable[[], object]) -> None:
    """Run `action` and only log its exception: after a failure all requests must still be answered."""
    try:
        action()
    except BaseException:
        log.exception("after the engine's end")


def _deliver(batch: Sequence[tuple[AnswerStream, list[Delta], bool]]) -> None:
    for stream, deltas, is_over in batch:
        stream.deliver(deltas, is_over=is_over)


async def together(
    streams: Sequence[AnswerStream], interval: float
) -> AsyncIterator[tuple[int, Delta | None]]:
    """(stream's index, delta) of several streams as they come; delta None: that stream had none for `interval` s."""
    if len(streams) == 1:
        async for delta in streams[0].with_pauses(interval):
            yield 0, delta
        return
    news: asyncio.Queue[tuple[int, Delta | None] | None] = asyncio.Queue()

    async def read(number: int, stream: AnswerStream) -> None:
        async for delta in stream.with_pauses(interval):
            news.put_nowait((number, delta))
        news.put_nowait(None)

    readers = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_left = len(readers)
        while num_left:
            item = await news.get()
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()


def _num_remote(given: Any) -> int:
    """Number of images in nested lists that are yet to be fetched."""
    if isinstance(given, (list, tuple)):
        return sum(map(_num_remote, given))
    return int(isinstance(given, Remote))
