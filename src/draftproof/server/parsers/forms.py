"""Grammars for answers that must be tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.schema import shown

_COMBINED = {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties"}
# At most one space between tokens, as for structured JSON output.
SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls: the texts before a name, between it and its arguments, after them, between two calls,
    before the first, and after the last. `sign`: text in the chat templates of models that use this form. `spell`:
    makes the rule of arguments from their schema, in a family that does not write JSON."""

    before_name: str
    before_arguments: str
    end: str
    between: str = ""
    first: str = ""
    last: str = ""
    sign: str = ""
    spell: Callable[[Rules, Any], str] | None = None

    def written(self, name: str) -> tuple[str, str]:
        """A call's text before its arguments, and after them."""
        quoted = json.dumps(name)[1:-1] if self.before_name.endswith('"') else name
        return f"{self.before_name}{quoted}{self.before_arguments}", self.end


class Rules:
    """Builds the rules of a grammar in Lark's syntax."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        """`token_id`: the id of a marker that is a single token, None if it is text."""
        self.lines: list[str] = []
        self._token_id = token_id

    def add(self, body: str, options: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def json(self, schema: Any) -> str:
        """A JSON value by its schema; None: any object."""
        given = schema if isinstance(schema, Mapping) else {"type": "object"}
        return self.add(f"%json {json.dumps({**given, 'x-guidance': SPACED})}")

    def literal(self, text: str) -> str:
        """A fixed text, in which markers may be single tokens."""
        parts = re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text)
        found = ((part, self._token_id(part)) for part in parts if part)
        return " ".join(
            json.dumps(part, ensure_ascii=False) if number is None else f"<[{number}]>"
            for part, number in found
        )

    def text(self, schema: Mapping[str, Any], end: str) -> str:
        """An unquoted string by its schema, and the marker that ends it."""
        chosen = [schema["const"]] if "const" in schema else schema.get("enum")
        if chosen is not None:
            return self.add(
                " | ".join(self.literal(f"{text}{end}") for text in chosen if isinstance(text, str))
            )
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        terminal = f"T{len(self.lines)}"
        self.lines.append(f"{terminal}: /(?s:.{{{low},{high}}})/{_matching(schema.get('pattern'))}")
        number = self._token_id(end)
        if number is None:
            return self.add(terminal, f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        return self.add(f"{terminal} <[{number}]>")


def members(schema: Any) -> list[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it is required) of each argument; each schema includes the definitions that it may refer
    to. ValueError for a schema that does not list its arguments."""
    given = schema if isinstance(schema, Mapping) else {}
    named = given.get("properties") or {}
    if given.get("type", "object") != "object" or not isinstance(named, Mapping) or _COMBINED & set(given):
        raise ValueError(f"tools: parameters={shown(schema)}: must be an object that names its properties")
    shared = {name: given[name] for name in ("$defs", "definitions") if name in given}
    required = given.get("required") or ()
    return [(name, {**shared, **_object(own)}, name in required) for name, own in named.items()]


def _object(schema: Any) -> Mapping[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise ValueError(f"tools: parameters: {shown(schema)}: must be a schema")
    return schema


_ENDS = re.compile(r"(?<!\\)(?:\\\\)*\$$")  # a $ that no backslash makes a character


def _matching(pattern: str | None) -> str:
    """A term that intersects another terminal with a schema's pattern, which may match anywhere in the text."""
    if pattern is None:
        return ""
    starts, ends = pattern.startswith("^"), _ENDS.search(pattern) is not None
    before, behind = "" if starts else "(?s:.*)", "" if ends else "(?s:.*)"
    inner = pattern[starts : len(pattern) - ends].replace("\\/", "/").replace("/", "\\/")
    return f" & /{before}(?:{inner}){behind}/"


def call_grammar(
    form: Form, schemas: Mapping[str, Any], token_id: Callable[[str], int | None], *, is_single: bool
) -> str:
    """The grammar, in Lark's syntax, of an answer that calls one of these tools, or (unless `is_single`) several.

    `schemas`: tool name -> schema of its arguments; None: any object. `token_id`: as in `Rules`.
    """
    rules = Rules(token_id)
    first, between, last = map(rules.literal, (form.first, form.between, form.last))
    calls = []
    for name, schema in schemas.items():
        before, behind = map(rules.literal, form.written(name))
        arguments = rules.json(schema) if form.spell is None else form.spell(rules, schema)
        calls.append(rules.add(f"{before} {arguments} {behind}"))
    more = "" if is_single else f"({between} call)*"
    return "\n".join([f"start: {first} call {more} {last}", f"call: {' | '.join(calls)}", *rules.lines])
