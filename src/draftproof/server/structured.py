"""The rule for structured output that a body asks for, under OpenAI's name, vLLM's, or vLLM's older ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from draftproof.server.settings import ServerConfig
from draftproof.types import RULES, StructuredOutputsParams

# vLLM's older body fields -> fields of `StructuredOutputsParams`.
GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
OUR_NAME = re.compile(rf"^structured_outputs: (?:(?:{'|'.join(RULES)}): )?")


def rule_asked(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
    limits: ServerConfig,
) -> StructuredOutputsParams | None:
    """The one rule that a body gives; `guided`: its fields in `GUIDED` with a value. ValueError names the field."""
    given = {"response_format": response_format, "structured_outputs": structured_outputs, **guided}
    named = [name for name, value in given.items() if value is not None and value != {"type": "text"}]
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"{named[0]}: {', '.join(named[1:])} is given too; give one of them")
    name, value = named[0], given[named[0]]
    if name == "response_format":
        fields = _of_format(value)
    else:
        fields = value if name == "structured_outputs" else {GUIDED[name]: value}
    try:
        rule = StructuredOutputsParams(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {OUR_NAME.sub('', str(error))}") from None
    size = sum(_size(getattr(rule, field)) for field in (*RULES, "whitespace_pattern"))
    if size > limits.max_grammar_chars:
        raise ValueError(
            f"{name}: has {size} characters, at most max_grammar_chars={limits.max_grammar_chars}"
        )
    return rule


def told_of(field: str, error: ValueError) -> ValueError:
    """`error` of a rule, with the name of the body's field in it."""
    if field == "structured_outputs":
        return error
    return ValueError(OUR_NAME.sub(f"{field}: ", str(error)))


def _of_format(value: Any) -> dict[str, Any]:
    """The rule that response_format asks for. A schema is enforced whether it is `strict` or not."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    if kind != "json_schema":
        raise ValueError(
            f"response_format: type={kind!r:.80}: must be text, json_object, json_schema or structural_tag"
        )
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError('response_format: json_schema must be {"name": "...", "schema": {...}}')
    return {"json": schema}


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(len, value))
    return len(value) if isinstance(value, str) else 0
