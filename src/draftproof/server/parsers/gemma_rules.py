"""Grammar rules for call arguments in Gemma's format: JSON with unquoted keys and special quotes around strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from draftproof.schema import shown
from draftproof.server.parsers.forms import Rules, members

SIMPLE_KEY = re.compile(r"[\w$-]+")
SCALARS = ("integer", "number", "boolean", "null")
NOTES = {
    "title",
    "description",
    "default",
    "examples",
    "format",
    "$schema",
    "$comment",
    "strict",
    "deprecated",
}
ASIDE = {"$defs", "definitions", "additionalProperties", "nullable", "x-order", *NOTES}
OF_TYPES = {
    "string": {"type", "minLength", "maxLength", "pattern"},
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required"},
}


class Speller:
    """Writes the rules of one tool's arguments."""

    def __init__(self, rules: Rules, quote: str, root: Mapping[str, Any]) -> None:
        self._rules = rules
        self._quote = quote
        self._root = root
        self._named: dict[str, str] = {}  # rules of definitions that schemas refer to
        self._any = ""

    def members(self, schema: Any) -> str:
        """The rule of an object's members, without the braces."""
        found = [
            (f"{self._rules.literal(self._key(key))} {self.value(own)}", is_required)
            for key, own, is_required in members(schema)
        ]
        required = [member for member, is_required in found if is_required]
        others = [member for member, is_required in found if not is_required]
        more = " ".join(f'("," {member})?' for member in others)
        if required:
            return f"""({' "," '.join(required)} {more})"""
        starts = [
            " ".join([member, *(f'("," {other})?' for other in others[number + 1 :])])
            for number, member in enumerate(others)
        ]
        return f"({' | '.join(starts)})?" if starts else '""'

    def value(self, schema: Any) -> str:
        """The rule of a value. ValueError for a schema that cannot be enforced in this format."""
        if not isinstance(schema, Mapping) or not set(schema) - ASIDE:
            return self._anything()
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            chosen = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rules.add(" | ".join(self._rules.literal(self._spelled(value)) for value in chosen))
        several = schema.get("anyOf") or schema.get("oneOf")
        if several:
            return self._rules.add(" | ".join(map(self.value, several)))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._rules.add(" | ".join(self.value(_narrowed(schema, one)) for one in kind))
        if kind in SCALARS:
            return self._rules.json({name: value for name, value in schema.items() if name not in ASIDE})
        unknown = sorted(set(schema) - ASIDE - OF_TYPES.get(str(kind), set()))
        if kind not in OF_TYPES or unknown:
            raise ValueError(
                f"tools: parameters: {shown(schema)}: {unknown[0]}: cannot be followed in calls of Gemma's"
            )
        if kind == "string":
            return self._rules.add(
                f"{self._rules.literal(self._quote)} {self._rules.text(schema, self._quote)}"
            )
        if kind == "array":
            return self._list(schema)
        return (
            self._rules.add(f'"{{" {self.members(schema)} "}}"') if schema.get("properties") else self._free()
        )

    def _list(self, schema: Mapping[str, Any]) -> str:
        item, low, high = self.value(schema.get("items")), schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return self._rules.add('"[]"')
        if high is None:
            more = f'("," {item}){{{max(0, low - 1)},}}' if low > 1 else f'("," {item})*'
        else:
            more = f'("," {item}){{{max(0, low - 1)},{high - 1}}}' if high > 1 else ""
        return self._rules.add(f'"[" ({item} {more}){"" if low else "?"} "]"')

    def _referred(self, where: str) -> str:
        if where not in self._named:
            target: Any = self._root
            for part in where.removeprefix("#").strip("/").split("/"):
                target = target.get(part) if isinstance(target, Mapping) and part else None
            if not isinstance(target, Mapping):
                raise ValueError(
                    f"tools: parameters: $ref={shown(where)}: is not among the schema's own definitions"
                )
            self._named[where] = name = f"ref{len(self._rules.lines)}"
            self._rules.lines.append("")
            place = len(self._rules.lines) - 1
            self._rules.lines[place] = f"{name}: {self.value(target)}"
        return self._named[where]

    def _anything(self) -> str:
        """The rule of any value."""
        if not self._any:
            self._any = f"any{len(self._rules.lines)}"
            place = len(self._rules.lines)
            self._rules.lines.append("")
            text = f"{self._rules.literal(self._quote)} {self._rules.text({}, self._quote)}"
            scalar = self._rules.json({"type": list(SCALARS)})
            listed = f'"[" ({self._any} ("," {self._any})*)? "]"'
            self._rules.lines[place] = f"{self._any}: {scalar} | {text} | {listed} | {self._free()}"
        return self._any

    def _free(self) -> str:
        """The rule of any object."""
        key = f"KEY{len(self._rules.lines)}"
        self._rules.lines.append(f"{key}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}:/")
        value = self._anything()
        return self._rules.add(f'"{{" ({key} {value} ("," {key} {value})*)? "}}"')

    def _key(self, key: str) -> str:
        return f"{key}:" if SIMPLE_KEY.fullmatch(key) else f"{self._quote}{key}{self._quote}:"

    def _spelled(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._spelled, value))}]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{self._key(key)}{self._spelled(one)}" for key, one in value.items()) + "}"
        return json.dumps(value)


def _narrowed(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The part of a schema with several types that applies to one of them."""
    of_kind = OF_TYPES.get(kind)
    kept = {name: value for name, value in schema.items() if of_kind is None or name in of_kind | ASIDE}
    others = set().union(*OF_TYPES.values()) if of_kind is None else set()
    return {**{name: value for name, value in kept.items() if name not in others}, "type": kind}
