"""Answers as server-sent events: a chunk for each step's output, the usage, and the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from draftproof.frontend.async_llm import together
from draftproof.frontend.painter import Painter
from draftproof.server import answers
from draftproof.server.errors import RefusalError
from draftproof.server.parsers import Parser
from draftproof.server.parsers.reader import CallStart
from draftproof.server.protocol import CompletionBody
from draftproof.server.service import Job, Service
from draftproof.types import Delta

WRITE = "write"  # key of a scope's state: function that writes a part of the body faster than `send`, if there is one
Write = Callable[[bytes], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class EventResponse(StreamingResponse):
    """Sends events as they come. `end` is called when all were sent or the client has disconnected."""

    def __init__(
        self, events: AsyncIterator[bytes], end: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers.update({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._end = end
        self._write: Write | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = scope.get("state", {}).get(WRITE)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def stream_response(self, send: Send) -> None:
        """Write events with the connection's own function if it offers one (`WRITE`), bypassing the layers between."""
        if self._write is None:
            await super().stream_response(send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.body_iterator:
            assert isinstance(chunk, bytes), "events are"
            await self._write(chunk)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(service: Service, job: Job) -> AsyncIterator[bytes]:
    """All events of an answer, also if it fails."""
    writer = Chunks(service, job)
    async for number, delta in together(job.streams, service.config.keep_alive_interval):
        if delta is None:
            yield KEEP_ALIVE
            continue
        service.meter.came(job.streams[number])
        make = partial(writer.of, number, delta)
        for chunk in await service.llm.aside(make) if writer.is_long(number) else make():
            yield event(chunk)
    outputs = service.outputs(job)
    asked = job.body.stream_options
    if asked is not None and asked.include_usage:
        usage = {"choices": [], "usage": service.usage(job, outputs)}
        yield event(writer.head | usage | service.metrics(job, outputs))
    yield DONE


def event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % answers.as_json(content)


class Chunks:
    """Makes the chunks of one answer. A choice's first chunk names the role (chats) or repeats the prompt (`echo`), its
    last one holds only why it ended; a step whose text is held back has none."""

    def __init__(self, service: Service, job: Job) -> None:
        self._service = service
        self._job = job
        # by choice
        self._num_chars: dict[int, int] = {}  # text so far, for each choice that has begun
        self._parsers: dict[int, Parser | None] = {}
        self._num_calls: dict[int, int] = {}  # index of the latest tool call
        self._painters: dict[int, Painter] = {}  # if drafts are shown
        # by prompt
        self._scores: dict[int, dict[str, Any] | None] = {}  # if the prompt is part of the answer
        self._held: dict[int, list[Delta]] = {}  # deltas that wait for the prompt's scores
        self.head = service.head(job, "chat.completion.chunk" if job.is_chat else "text_completion")

    def is_long(self, number: int) -> bool:
        """Whether the next chunk of prompt `number` takes too long to be made in the event loop."""
        return self._job.body.scores_prompt and number not in self._scores

    def of(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunks for a step's delta of prompt `number`. If the prompt's scores come first, the other choices wait
        for the first one, which brings them."""
        held = self._held.pop(number, [])
        if self.is_long(number):
            if delta.index:
                self._held[number] = [*held, delta]
                return []
            self._scores[number] = self._service.prompt_logprobs(self._job.streams[number])
        return [chunk for one in (delta, *held) for chunk in self._of(number, one)]

    def _of(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        index = number * self._job.params.n + delta.index
        parts: list[dict[str, Any]] = []
        if index not in self._num_chars:
            self._num_chars[index] = 0
            parts += self._first(number, index)
        parser = self._parser(index)
        if parser is not None:
            return [
                *self._headed(parts, index),
                *self._parsed(delta, index, parser),
                *self._last(delta, index),
            ]
        told = self._told(delta, index)
        if delta.text or (delta.token_ids and (told or delta.logprobs is not None)):
            parts.append(self._content(delta, index) | told)
        return [*self._headed(parts, index), *self._last(delta, index)]

    def _told(self, delta: Delta, index: int) -> dict[str, Any]:
        """Requested fields beside the text: the step's token ids, and which pieces of it were drafted."""
        told: dict[str, Any] = {}
        if self._job.body.return_token_ids:
            told |= {"token_ids": delta.token_ids, "accepted": delta.accepted}
        if self._job.body.shows_drafts:
            runs = self._painter(index).cut(delta)
            pieces = [{"text": text, "accepted": accepted} for text, accepted in runs]
            told["drafts"] = {
                "num_drafted": delta.num_drafted,
                "num_accepted": sum(delta.accepted),
                "pieces": pieces,
            }
        return told

    def _painter(self, index: int) -> Painter:
        if index not in self._painters:
            stream = self._job.streams[index // self._job.params.n]
            tokenizer, skips = self._service.llm.llm.tokenizer, self._job.params.skip_special_tokens
            self._painters[index] = Painter(tokenizer, stream.prompt_token_ids, skips)
        return self._painters[index]

    def _headed(self, parts: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
        return [{**self.head, "choices": [{**part, "index": index}]} for part in parts]

    def _parser(self, index: int) -> Parser | None:
        if index not in self._parsers:
            self._parsers[index] = self._service.parser(self._job)
        return self._parsers[index]

    def _parsed(self, delta: Delta, index: int, parser: Parser) -> list[dict[str, Any]]:
        """The chunks for a step's delta of a message that is parsed for calls and reasoning."""
        body, nothing = self._job.body, {"logprobs": None, "finish_reason": None}
        parts: list[dict[str, Any]] = []
        for piece in parser.push(delta.text, is_over=delta.finish_reason is not None):
            self._num_calls[index] = self._num_calls.get(index, -1) + isinstance(piece, CallStart)
            parts.append({"delta": answers.piece_delta(piece, self._num_calls[index]), **nothing})
        told = self._told(delta, index)
        if delta.token_ids and (told or delta.logprobs is not None):
            parts = parts or [{"delta": {}, **nothing}]
            parts[0]["logprobs"] = answers.chat_delta(delta, body.num_logprobs)["logprobs"]
            parts[0] |= told
        return self._headed(parts, index)

    def _last(self, delta: Delta, index: int) -> list[dict[str, Any]]:
        """The chunk that says why a choice ended; none if it goes on."""
        if delta.finish_reason is None:
            return []
        if delta.finish_reason == "error":
            return [RefusalError(500, delta.error or "unknown", code="engine_error").body()]
        last: dict[str, Any] = {
            "index": index,
            **({"delta": {}} if self._job.is_chat else {"text": ""}),
            "logprobs": None,
            "finish_reason": answers.finish_reason(delta.finish_reason, self._parsers[index]),
            "stop_reason": delta.stop_reason,
        }
        return [{**self.head, "choices": [last]}]

    def _first(self, number: int, index: int) -> list[dict[str, Any]]:
        """The first chunk of a choice: the role, or the repeated prompt."""
        job, stream = self._job, self._job.streams[number]
        ids = stream.prompt_token_ids
        told = {"prompt_token_ids": ids} if job.body.return_token_ids else {}
        nothing = {"logprobs": None, "finish_reason": None, **told}
        if job.is_chat:
            return [{"delta": {"role": "assistant", "content": ""}, **nothing}]
        echoed = self._service.echoed(job, ids)
        if echoed is None and not told:
            return []
        part: dict[str, Any] = {"text": echoed or "", **nothing}
        if isinstance(job.body, CompletionBody) and job.body.scores_prompt:
            part["logprobs"] = self._scores[number]
        self._num_chars[index] = len(echoed or "")
        return [part]

    def _content(self, delta: Delta, index: int) -> dict[str, Any]:
        job = self._job
        if job.is_chat:
            return answers.chat_delta(delta, job.body.num_logprobs)
        part = answers.text_delta(delta, self._num_chars[index])
        if part["logprobs"] is not None:
            self._num_chars[index] += sum(map(len, part["logprobs"]["tokens"]))
        return part
