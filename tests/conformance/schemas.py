"""JSON schemas for structured answers: from a seeded generator, from client libraries' types, from a test suite."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("name", "age", "tags", "kind", "x", "is_open", "address", "créé", "a b", 'q"t')


def generated(number: int, seed: int) -> list[dict[str, Any]]:
    """Distinct random schemas whose answers have bounded length: every text, list and number is bounded."""
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
                "pattern": rng.choice(["^[a-z]{1,5}$", "^#[0-9a-f]{6}$", "^(ab|cd){1,9}e$"]),
            }
        case "format":
            return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
    low = rng.randrange(3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 8)}


def shipped() -> list[dict[str, Any]]:
    """Distinct schemas of the types in the `openai` and `anthropic` packages, alternating; packages that are not
    installed are skipped."""
    modules = ("openai.types", "openai.types.chat", "openai.types.responses"), ("anthropic.types",)
    both = itertools.zip_longest(*(_of_types(names) for names in modules))
    found = {json.dumps(schema): schema for pair in both for schema in pair if schema is not None}
    return [schema for text, schema in found.items() if len(text) < 4000]


def _of_types(modules: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Schemas of the types in modules, in order of their names."""
    for module in modules:
        try:
            types = importlib.import_module(module)
            from pydantic import BaseModel
        except ImportError:
            continue
        for name in sorted(dir(types)):
            kind = getattr(types, name)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                with contextlib.suppress(Exception):  # some types cannot be described by a schema
                    yield kind.model_json_schema()


def suite(folder: str) -> list[dict[str, Any]]:
    """Distinct schemas of JSON-Schema-Test-Suite, without `true` and `false`; [] if `folder` is empty. `folder`: such
    as `json/tests/draft2020-12` in the sources of `jsonschema`
    (`pip download --no-deps --no-binary jsonschema jsonschema`)."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(Path(folder).glob("*.json")) if folder else ():
        for group in json.loads(file.read_text()):
            if isinstance(group["schema"], dict):
                found.setdefault(json.dumps(group["schema"]), group["schema"])
    return list(found.values())
