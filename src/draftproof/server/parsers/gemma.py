"""Gemma 4 and FunctionGemma: `call:name{key:value,...}` between markers. Keys are unquoted and strings have special
quotes, so arguments are converted to JSON and passed on one value at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftproof.server.parsers.forms import Form, Rules
from draftproof.server.parsers.gemma_rules import Speller
from draftproof.server.parsers.reader import OPEN, CallArguments, CallStart, Content, Reader, Steps

OPENS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
QUOTES = ('<|"|>', "<escape>")
MARKERS = (*OPENS, *OPENS.values(), *QUOTES)
MOST_DEPTH = 64


def _form(opened: str, quote: str) -> Form:
    def spell(rules: Rules, schema: Any) -> str:
        root = schema if isinstance(schema, Mapping) else {}
        return rules.add(Speller(rules, quote, root).members(root))

    return Form(f"{opened}call:", "{", f"}}{OPENS[opened]}", sign=opened, spell=spell)


FORMS = tuple(_form(opened, quote) for opened, quote in zip(OPENS, QUOTES, strict=True))


def read(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """Pieces of an answer."""
    while opened := (yield from reader.until(Content, *OPENS)):
        yield from reader.starts_with("call:")
        name, _ = yield from reader.text_until("{", OPENS[opened])
        yield CallStart(name.strip())
        yield CallArguments("{")
        yield from _members(reader)
        yield CallArguments("}")
        yield from reader.until(None, OPENS[opened])


def _members(reader: Reader) -> Steps[None]:
    """Members of the arguments, after the opening brace."""
    is_first = True
    while True:
        yield from reader.space()
        if (yield from reader.peek()) in ("}", ""):
            return
        key, marker = yield from _key(reader)
        if marker != ":":
            return
        value = yield from _value(reader, 0)
        yield CallArguments(f"{'' if is_first else ', '}{json.dumps(key)}: {json.dumps(value)}")
        is_first = False
        yield from reader.space()
        yield from reader.starts_with(",")


def _key(reader: Reader) -> Steps[tuple[str, str]]:
    for quote in QUOTES:
        if (yield from reader.starts_with(quote)):
            key, _ = yield from reader.text_until(quote)
            _, marker = yield from reader.text_until(":", "}")
            return key, marker
    key, marker = yield from reader.text_until(":", "}")
    return key.strip(), marker


def _value(reader: Reader, depth: int) -> Steps[Any]:
    """One value; beyond a nesting limit it is read as a string."""
    yield from reader.space()
    for quote in QUOTES:
        if (yield from reader.starts_with(quote)):
            text, _ = yield from reader.text_until(quote)
            return text
    if depth < MOST_DEPTH and (yield from reader.starts_with("{")):
        return (yield from _object(reader, depth + 1))
    if depth < MOST_DEPTH and (yield from reader.starts_with("[")):
        return (yield from _list(reader, depth + 1))
    text = yield from reader.json_value()
    if text[:1] in OPEN:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _object(reader: Reader, depth: int) -> Steps[dict[str, Any]]:
    found: dict[str, Any] = {}
    while True:
        yield from reader.space()
        if (yield from reader.starts_with("}")) or not (yield from reader.peek()):
            return found
        key, marker = yield from _key(reader)
        if marker != ":":
            return found
        found[key] = yield from _value(reader, depth)
        yield from reader.space()
        yield from reader.starts_with(",")


def _list(reader: Reader, depth: int) -> Steps[list[Any]]:
    found: list[Any] = []
    while True:
        yield from reader.space()
        if (yield from reader.starts_with("]")) or (yield from reader.peek()) in ("}", ""):
            return found
        found.append((yield from _value(reader, depth)))
        yield from reader.space()
        if not (yield from reader.starts_with(",")) and (yield from reader.peek()) != "]":
            return found
