"""DeepSeek: a call between `tool▁call▁begin` and `tool▁call▁end` is the name, `tool▁sep` and the arguments (V3.1), or
"function", `tool▁sep`, the name and the arguments as a block of code (V3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.server.parsers.forms import Form
from draftproof.server.parsers.reader import CallArguments, CallStart, Content, Reader, Steps

ALL, CALL, BETWEEN, END, ALL_END = MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)

FORMS = (
    Form(
        f"{CALL}function{BETWEEN}",
        "\n```json\n",
        f"\n```{END}",
        "\n",
        first=ALL,
        last=ALL_END,
        sign="```json",
    ),
    Form(CALL, BETWEEN, END, first=ALL, last=ALL_END),
)


def read(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """Pieces of an answer."""
    while (yield from reader.until(Content, ALL)):
        while (yield from reader.until(None, CALL, ALL_END)) == CALL:
            name, _ = yield from reader.text_until(BETWEEN)
            if name.strip() == "function":
                name, _ = yield from reader.text_until("\n")
                yield from reader.starts_with("```json")
            yield from reader.space()
            yield CallStart(name.strip())
            yield from reader.json_value(CallArguments)
            yield from reader.until(None, END)
