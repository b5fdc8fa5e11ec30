"""Conversion of structured-output rules into grammars that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftproof.types import RULES, StructuredOutputsParams

# At most one space, as json.dumps writes it: with free whitespace a model could emit spaces for ever.
SPACED: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
UNSPACED: Mapping[str, Any] = {"whitespace_flexible": False}


def rule_of(rule: StructuredOutputsParams) -> str:
    """The name of the field that holds the rule."""
    return next(name for name in RULES if getattr(rule, name) not in (None, False))


def grammar_text(rule: StructuredOutputsParams, special_tokens: frozenset[str]) -> str:
    """The rule in llguidance's format. ValueError, without the field's name, if it cannot be converted.

    special_tokens: texts of the tokenizer's special tokens, which are not text in an output.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match rule_of(rule):
        case "json":
            return _schema_grammar(rule, str(rule.json))
        case "json_object":
            return _schema_grammar(rule, '{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(str(rule.regex))
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in rule.choice or ())
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case "grammar":
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(str(rule.grammar)))
            except Exception as error:  # the GBNF converter raises an exception type of its own
                raise ValueError(f"is neither Lark nor GBNF: {error}") from None
        case _:
            return _tag_grammar(str(rule.structural_tag), special_tokens)


def _schema_grammar(rule: StructuredOutputsParams, text: str) -> str:
    from llguidance import LLMatcher

    if rule.disable_any_whitespace:
        options = dict(UNSPACED)
    elif rule.whitespace_pattern is not None:
        options = {"whitespace_pattern": rule.whitespace_pattern}
    else:
        options = dict(SPACED)
    schema = _read(text)
    if rule.disable_additional_properties:
        schema = _closed(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _read(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _closed(schema: Any) -> Any:
    """The schema with additional properties forbidden, unless it says otherwise."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if isinstance(closed.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _tag_grammar(text: str, special_tokens: frozenset[str]) -> str:
    """The grammar of vLLM's form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    from llguidance import StructTag

    value = _read(text)
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise ValueError('must have lists "structures", of {"begin", "schema", "end"}, and "triggers"')
    tags = []
    for part in structures:
        begin, end = (part.get(name) if isinstance(part, dict) else None for name in ("begin", "end"))
        trigger = next((t for t in triggers if t and str(begin).startswith(str(t))), None)
        if not isinstance(begin, str) or not isinstance(end, str) or trigger is None:
            raise ValueError(
                f"structure {part!r:.80}: must have texts begin, with one of the triggers, and end"
            )
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=part.get("schema") or {}, end=end))
    is_special = any(tag.trigger in special_tokens for tag in tags)
    return StructTag.to_grammar(tags, assume_special=is_special)
