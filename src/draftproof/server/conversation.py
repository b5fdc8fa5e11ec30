"""Code shared by chats, Responses and Messages: a conversation as chat messages, and an answer piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from draftproof.frontend.async_llm import together
from draftproof.schema import shown
from draftproof.server import answers
from draftproof.server.errors import RefusalError
from draftproof.server.parsers import Parser, Syntax
from draftproof.server.parsers.reader import Piece
from draftproof.server.service import Job, Service
from draftproof.types import CompletionOutput

TEXT_TYPES = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ended:
    """Why an answer ended; `finish_reason`: as in the chat API."""

    finish_reason: str | None
    stop_reason: int | str | None = None
    error: str | None = None


class Writer(Protocol):
    """Writes one answer from its pieces, as events and as a whole."""

    keep_alive: bytes

    def begin(self, num_prompt_tokens: int) -> list[Event]:
        """Events before the first piece."""
        ...

    def take(self, piece: Piece) -> list[Event]:
        """Events for a piece."""
        ...

    def end(self, ended: Ended, usage: dict[str, Any]) -> list[Event]:
        """Events after the last piece; `usage`: as in the chat API."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole answer, after `end`."""
        ...


def text_of(content: Any, where: str) -> str:
    """The text of a message's content in any of the three APIs. ValueError for anything but text."""
    found = content_of(content, where)
    if not isinstance(found, str):
        raise ValueError(f"{where}={shown(content)}: must be text, without an image")
    return found


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A message's content in the chat format: its text, or a list of parts if it has images. ValueError for anything
    else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}={shown(content)}: must be text, or a list of parts of text and images")
    return as_content([part_of(part, f"{where}[{i}]") for i, part in enumerate(content)])


def as_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as a message's content: joined to one text if none is an image."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def part_of(part: Any, where: str) -> dict[str, Any]:
    """A part of a message in the chat format."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_image", "image"):
        url = _image_url(part, where) if kind == "input_image" else _image_source(part, where)
        return {"type": "image_url", "image_url": {"url": url}}
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
    if not isinstance(text, str) or (isinstance(part, dict) and kind not in TEXT_TYPES):
        raise ValueError(f"{where}={shown(part)}: must be text or an image; other parts are not served")
    return {"type": "text", "text": text}


def _image_url(part: dict[str, Any], where: str) -> str:
    """The URL of a Responses image."""
    if part.get("file_id") is not None:
        raise ValueError(f"{where}.file_id: files are not kept here; give a data URI in image_url")
    return _unfetched(part.get("image_url"), f"{where}.image_url")


def _image_source(part: dict[str, Any], where: str) -> str:
    """A Messages image as a URL: a data URI unless it is given by URL."""
    given = part.get("source")
    source = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if kind == "url":
        return _unfetched(source.get("url"), f"{where}.source.url")
    if kind != "base64":
        raise ValueError(
            f'{where}.source={shown(given)}: must be {{"type": "base64", "media_type": ..., "data": ...}}'
        )
    media, data = (text_in(source, name, f"{where}.source") for name in ("media_type", "data"))
    return f"data:{media};base64,{data}"


def _unfetched(url: Any, where: str) -> str:
    """A URL that needs no fetching. ValueError for others."""
    if not isinstance(url, str):
        raise ValueError(f"{where}={shown(url)}: must be a data URI, as text")
    if url.startswith(("http:", "https:")):
        raise ValueError(f"{where}={shown(url)}: nothing is fetched; give a data URI, or base64")
    return url


def text_in(given: dict[str, Any], name: str, where: str) -> str:
    """The string field `name`. ValueError if it is not a string."""
    value = given.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where}.{name}={shown(value)}: must be text")
    return value


def assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that ends a conversation; appended if another role's message ends it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: Any) -> None:
    """Add a tool call; consecutive calls share one assistant message."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    assistant(messages).setdefault("tool_calls", []).append(call)


async def events(service: Service, job: Job, writer: Writer) -> AsyncIterator[bytes]:
    """All events of an answer, also if it fails; each is preceded by its name."""
    parser = _parser(service, job)
    ended = Ended(None)
    for event in writer.begin(len(job.streams[0].prompt_token_ids)):
        yield _written(event)
    async for _, delta in together(job.streams, service.config.keep_alive_interval):
        if delta is None:
            yield writer.keep_alive
            continue
        service.meter.came(job.streams[0])
        for piece in parser.push(delta.text, is_over=delta.finish_reason is not None):
            for event in writer.take(piece):
                yield _written(event)
        if delta.finish_reason is not None:
            ended = Ended(answers.finish_reason(delta.finish_reason, parser), delta.stop_reason, delta.error)
    (output,) = service.outputs(job)
    for event in writer.end(ended, service.usage(job, [output])):
        yield _written(event)


async def whole(service: Service, job: Job, writer: Writer) -> dict[str, Any]:
    """The complete answer; ends the job."""
    parser = _parser(service, job)
    (output,) = await service.complete(job)
    choice: CompletionOutput = output.outputs[0]
    writer.begin(len(output.prompt_token_ids))
    for piece in parser.push(choice.text, is_over=True):
        writer.take(piece)
    ended = Ended(answers.finish_reason(choice.finish_reason, parser), choice.stop_reason)
    writer.end(ended, service.usage(job, [output]))
    return writer.whole()


def _parser(service: Service, job: Job) -> Parser:
    return service.parser(job) or Parser(Syntax("", None, None), None)


def _written(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event[0].encode(), answers.as_json(event[1]))


def failure(ended: Ended) -> RefusalError | None:
    """The error with which an incomplete stream ends; None if it ended normally."""
    if ended.finish_reason == "error":
        return RefusalError(500, ended.error or "unknown", code="engine_error")
    if ended.finish_reason in ("abort", None):
        return RefusalError(503, "the server is shutting down; ask another", code="unavailable")
    return None
