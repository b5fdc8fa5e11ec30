"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several of these separated by semicolons;
`<|python_tag|>` may come first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.server.parsers.forms import Form
from draftproof.server.parsers.reader import Content, Reader, Steps, json_call

MARKERS = ("<|python_tag|>",)
FORMS = (Form('{"name": "', '", "parameters": ', "}", between="; "),)


def read(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """Pieces of an answer."""
    reader.mark()
    yield from reader.space()
    yield from reader.starts_with(MARKERS[0])
    yield from reader.space()
    is_call = (yield from reader.peek()) == "{"
    if not is_call and reader.taken():
        yield Content(reader.taken())
    reader.forget()
    while is_call:
        is_call = yield from json_call(reader, argument_keys=("parameters", "arguments"))
        if is_call:
            yield from reader.space()
            yield from reader.starts_with(";")
            yield from reader.space()
            is_call = (yield from reader.peek()) == "{"
