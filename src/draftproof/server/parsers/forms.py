"""Answers that must be calls, as grammars: for families that write arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# One space at most, as in outputs that must be JSON.
SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls: the texts before a name, between it and its arguments, behind them, between two calls,
    before the first, and behind the last. `sign`: what the chat template of a model says that writes so."""

    before_name: str
    before_arguments: str
    end: str
    between: str = ""
    first: str = ""
    last: str = ""
    sign: str = ""

    def written(self, name: str) -> tuple[str, str]:
        """A call's text before its arguments, and behind them."""
        quoted = json.dumps(name)[1:-1] if self.before_name.endswith('"') else name
        return f"{self.before_name}{quoted}{self.before_arguments}", self.end


def call_grammar(
    form: Form, schemas: Mapping[str, Any], token_id: Callable[[str], int | None], *, is_single: bool
) -> str:
    """What an answer is that calls one of these tools, or (unless `is_single`) several; in Lark's form.

    `schemas`: of the tools' arguments; None: any object. `token_id`: of a marker that is a token and no text.
    """
    first, between, last = (_literal(text, token_id) for text in (form.first, form.between, form.last))
    more = "" if is_single else f"({between} call)*"
    lines = [
        f"start: {first} call {more} {last}",
        f"call: {' | '.join(f'c{i}' for i in range(len(schemas)))}",
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        before, behind = form.written(name)
        lines.append(f"c{i}: {_literal(before, token_id)} a{i} {_literal(behind, token_id)}")
        lines.append(f"a{i}: %json {_schema(schema)}")
    return "\n".join(lines)


def _schema(schema: Any) -> str:
    """A schema as a line; what GBNF is known by must not stand in it."""
    given = schema if isinstance(schema, Mapping) else {"type": "object"}
    return json.dumps({**given, "x-guidance": SPACED}).replace("::=", r":\u003a=")


def _literal(text: str, token_id: Callable[[str], int | None]) -> str:
    """A text of a form, whose markers may be tokens of their own."""
    parts = re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text)
    found = ((part, token_id(part)) for part in parts if part)
    return " ".join(
        json.dumps(part, ensure_ascii=False) if number is None else f"<[{number}]>" for part, number in found
    )
