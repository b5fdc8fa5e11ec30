"""JSON schemas to answer by: made by a seeded generator, and those of the types that a client library ships."""

from __future__ import annotations

import json
import random
from typing import Any

NAMES = ("name", "age", "tags", "kind", "x", "is_open", "address", "créé", "a b", 'q"t')


def generated(number: int, seed: int) -> list[dict[str, Any]]:
    """So many schemas, each another, all of whose answers have an end."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < number:
        schema = _one(rng, depth=0, kinds=("object", "object", "array", "choice"))
        found.setdefault(json.dumps(schema), schema)
    return list(found.values())


LEAVES = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format")


def _one(rng: random.Random, depth: int, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
    inner = ("object", "array", "choice", "ref") if depth < 3 else ()
    kind = rng.choice(kinds or (*LEAVES, *inner))
    match kind:
        case "object":
            return _object(rng, depth)
        case "array":
            low = rng.randrange(3)
            items = _one(rng, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(1, 3)}
        case "choice":
            return {"anyOf": [_one(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}
        case "ref":
            return {"$defs": {}, "type": "object", "properties": {"leaf": _leaf(rng)}, "required": ["leaf"],
                    "additionalProperties": False}  # fmt: skip
    return _leaf(rng, kind)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 5))
    properties = {name: _one(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if depth == 0 and rng.random() < 0.4:
        schema["$defs"] = {"part": _leaf(rng)}
        properties["part"] = {"$ref": "#/$defs/part"}
        required.append("part")
    return schema


def _leaf(rng: random.Random, kind: str | None = None) -> dict[str, Any]:
    match kind or rng.choice(LEAVES):
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(500)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randrange(1, 100), "multipleOf": 0.5}
        case "boolean" | "null" as simple:
            return {"type": simple}
        case "enum":
            return {"enum": rng.sample(["red", "green", 3, None, True, "blå", "a, b"], 3)}
        case "const":
            return {"const": rng.choice(["fixed text", 17, ["x", 1], {"k": "v"}])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{1,5}$", "^#[0-9a-f]{6}$", "^(ab|cd)+e$"]),
            }
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
    low = rng.randrange(3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 8)}


def shipped() -> list[dict[str, Any]]:
    """Schemas of the types in the `openai` package, each once, by their names; none where it is missing."""
    try:
        import openai.types
        import openai.types.chat
        import openai.types.responses
        from pydantic import BaseModel
    except ImportError:
        return []
    found: dict[str, dict[str, Any]] = {}
    for module in (openai.types, openai.types.chat, openai.types.responses):
        for name in sorted(dir(module)):
            kind = getattr(module, name)
            if not isinstance(kind, type) or not issubclass(kind, BaseModel):
                continue
            try:
                schema = kind.model_json_schema()
            except Exception:  # has parts that no schema describes
                continue
            if len(text := json.dumps(schema)) < 4000:
                found.setdefault(text, schema)
    return list(found.values())
