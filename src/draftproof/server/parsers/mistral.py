"""Mistral: `[TOOL_CALLS]name[ARGS]{...}` for each call, with an optional `[CALL_ID]` after the name; before 2025
`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.server.parsers.forms import Form
from draftproof.server.parsers.reader import CallArguments, CallStart, Content, Reader, Steps, json_call

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
FORMS = (
    Form("[TOOL_CALLS]", "[ARGS]", "", sign="[ARGS]"),
    Form('{"name": "', '", "arguments": ', "}", between=", ", first="[TOOL_CALLS][", last="]"),
)


def read(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """Pieces of an answer."""
    while (yield from reader.until(Content, MARKERS[0])):
        yield from reader.space()
        if (yield from reader.starts_with("[")):
            yield from _listed(reader)
        else:
            yield from _named(reader)
        yield from reader.space()


def _listed(reader: Reader) -> Steps[None]:
    is_call = True
    while is_call:
        yield from reader.space()
        is_call = (yield from reader.peek()) == "{" and (yield from json_call(reader))
        yield from reader.space()
        is_call = is_call and (yield from reader.starts_with(","))
    yield from reader.starts_with("]")


def _named(reader: Reader) -> Steps[None]:
    name, marker = yield from reader.text_until(*MARKERS[1:], "{")
    if marker == MARKERS[2]:
        _, marker = yield from reader.text_until(MARKERS[1], "{")
    if name.strip():
        yield CallStart(name.strip())
    if marker == "{":  # without [ARGS]
        reader.step_back(1)
    elif marker:
        yield from reader.space()
    if name.strip() and marker:
        yield from reader.json_value(CallArguments)
