"""Hermes, and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.server.parsers.forms import Form
from draftproof.server.parsers.reader import Content, Reader, Steps, json_call

MARKERS = ("<tool_call>", "</tool_call>")
FORMS = (Form('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),)


def read(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """Pieces of an answer."""
    while (yield from reader.until(Content, MARKERS[0])):
        yield from reader.space()
        yield from json_call(reader)
        yield from reader.until(None, MARKERS[1])
        yield from reader.space()
