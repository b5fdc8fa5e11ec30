"""GLM 4.5 and later: `<tool_call>name`, then `<arg_key>..</arg_key><arg_value>..</arg_value>` for each argument, then
`</tool_call>`. Values are JSON except strings, known by the tool's schema; arguments are passed on one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftproof.server.parsers.forms import Form, Rules, members
from draftproof.server.parsers.reader import CallArguments, CallStart, Content, Reader, Steps

MARKERS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
CALL, END, KEY, KEY_END, VALUE, VALUE_END = MARKERS


def _spell(rules: Rules, schema: Any) -> str:
    """The rule of arguments: all required ones and any of the others, in the schema's order."""
    parts = []
    for key, own, is_required in members(schema):
        opened = rules.literal(f"{KEY}{key}{KEY_END}\n{VALUE}")
        if own.get("type") == "string":
            value = rules.text(own, VALUE_END)
        else:
            value = f"{rules.json(own)} {rules.literal(VALUE_END)}"
        parts.append(f'({opened} {value} "\\n"){"" if is_required else "?"}')
    return rules.add(" ".join(parts) or '""')


FORMS = (Form(CALL, "\n", END, between="\n", spell=_spell),)


def read(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """Pieces of an answer."""
    while (yield from reader.until(Content, CALL)):
        name, marker = yield from reader.text_until(KEY, END)
        yield CallStart(name.strip())
        between = "{"
        while marker == KEY:
            key, _ = yield from reader.text_until(KEY_END)
            yield from reader.until(None, VALUE)
            text, marker = yield from reader.text_until(VALUE_END)
            if not marker:  # the answer was cut off
                break
            value = _value(text, _kind(schemas.get(name.strip()), key.strip()))
            yield CallArguments(f"{between}{json.dumps(key.strip())}: {value}")
            between = ", "
            marker = yield from reader.until(None, KEY, END)
        yield CallArguments("{}" if between == "{" else "}")
        yield from reader.space()


def _kind(schema: Any, key: str) -> Any:
    """The type of an argument in a tool's schema; None if it names none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    own = properties.get(key) if isinstance(properties, Mapping) else None
    return own.get("type") if isinstance(own, Mapping) else None


def _value(text: str, kind: Any) -> str:
    """A value as JSON: a string if the schema says so or it is not valid JSON."""
    if kind != "string":
        try:
            return json.dumps(json.loads(text))
        except (ValueError, RecursionError):
            pass
    return json.dumps(text)
