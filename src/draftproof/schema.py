"""Readers for values of configuration files: type and range are checked before a value is used.

Every reader takes the file's keys, a key, and where they come from. Every error is one line: where, key, value, what is
allowed. null means the same as a missing key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")

# Upper limits: well above published models, well below what would exhaust a machine in a loop. Positions are fp32 in a
# rotary embedding, which represents integers exactly up to 2^24.
LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "num_kv_shared_layers": 4096,
    "num_target_layers": 4096,
    "num_nextn_predict_layers": 64,
    "max_window_layers": 1 << 20,
    "first_k_dense_replace": 4096,
    "max_position_embeddings": 1 << 24,
    "original_max_position_embeddings": 1 << 24,
    "sliding_window": 1 << 30,
    "vocab_size": 1 << 24,
    "vocab_size_per_layer_input": 1 << 24,
    "hidden_size": 1 << 20,
    "backbone_hidden_size": 1 << 20,
    "target_hidden_size": 1 << 20,
    "hidden_size_per_layer_input": 1 << 20,
    "intermediate_size": 1 << 22,
    "moe_intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_global_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "global_head_dim": 1 << 16,
    "q_lora_rank": 1 << 20,
    "kv_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 16,
    "qk_rope_head_dim": 1 << 16,
    "v_head_dim": 1 << 16,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "n_shared_experts": 1 << 16,
    "num_centroids": 1 << 24,
    "centroid_intermediate_top_k": 1 << 24,
}
LARGEST_NUMBERS: Mapping[str, float] = {
    "rms_norm_eps": 1.0,
    "rope_theta": 1e15,
    "rope_local_base_freq": 1e15,
    "query_pre_attn_scalar": 1e9,
    "final_logit_softcapping": 1e9,
    "attn_logit_softcapping": 1e9,
    "routed_scaling_factor": 1e6,
}
MOST = (1 << 31) - 1  # the largest integer for a key not listed above
MOST_NUMBER = 1e9  # the largest other number
MOST_NESTING = 64
MOST_SHOWN = 120  # characters of a wrong value in an error message


def documented(default: T, text: str) -> T:
    """A dataclass field's default, with the help text of the command-line flag made from the field."""
    return dataclasses.field(default=default, metadata={"help": text})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file if it is missing or malformed."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; point `model` at a folder in Hugging Face format")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error}); download the model again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(raw).__name__}")
    if _is_nested_deeper(raw, MOST_NESTING):
        raise ValueError(
            f"{path}: objects and lists are nested deeper than {MOST_NESTING} levels; mend the file"
        )
    return raw


def words(text: str) -> frozenset[str]:
    """The keys in a space-separated list."""
    return frozenset(text.split())


def merged(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with keys replaced by those of `overrides`; objects are merged recursively."""
    result = dict(raw)
    for key, value in overrides.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def shown(value: object) -> str:
    """A value as one short line of text."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # an integer with more digits than Python converts
        return f"<{type(value).__name__}>"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 20]}...{text[-12:]}"


def is_whole(value: object, low: float = -math.inf, high: float = math.inf) -> TypeGuard[int]:
    """Whether `value` is an integer (not a bool) from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float = -math.inf, high: float = math.inf) -> TypeGuard[float]:
    """Whether `value` is an integer or a float, neither a bool nor NaN, from `low` to `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def check_whole(name: str, value: object, low: int = 1, high: int | None = None) -> int:
    """`value` if it is an integer from `low` to `high` (None: `MOST`); `name` begins the error."""
    most = MOST if high is None else high
    if not is_whole(value, low, most):
        within = isinstance(value, int) and value > most
        bounds = f"of at least {low}" if high is None and not within else f"from {low} to {most}"
        raise ValueError(f"{name}={shown(value)}: must be an integer {bounds}")
    return value


def check_number(
    name: str, value: object, low: float = 0.0, high: float = MOST_NUMBER, above: float | None = None
) -> float:
    """`value` if it is a number from `low`, or greater than `above`, up to `high`; `name` begins the error."""
    if not is_number(value, low, high) or (above is not None and not value > above):
        raise ValueError(f"{name}={shown(value)}: must be {_range_of(low, high, above)}")
    return float(value)


def check_flag(name: str, value: object) -> bool:
    """`value` if it is true or false; `name` begins the error."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: must be true or false")
    return value


def check_choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError if `value` is not in `allowed`; `name` begins the error."""
    if value not in allowed:
        raise no_such_choice(name, value, allowed)


def no_such_choice(name: str, value: object, allowed: Iterable[object]) -> ValueError:
    """The error for a value that is not in `allowed`, with the nearest allowed value."""
    each = list(allowed)
    names = [str(one) for one in each if one is not None]
    all_names = f"must be one of {', '.join(names)}{', or left out' if None in each else ''}"
    return ValueError(f"{name}={shown(value)}: {did_you_mean(value, names) or all_names}")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """A hint naming the nearest of `known`; empty if none is near."""
    names, text = list(known), str(value)
    near = difflib.get_close_matches(text, names, n=1) or difflib.get_close_matches(text.lower(), names, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def reject_unknown_keys(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    """Raise ValueError for the first key of `given` that is not in `known`, with a suggestion."""
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known) or f"known: {', '.join(sorted(known))}"
            raise ValueError(f"{where}: unknown key {key!r}: {hint}")


def whole(
    raw: Mapping[str, Any],
    key: str,
    where: str,
    low: int = 1,
    high: int | None = None,
    default: int | None = None,
) -> int:
    """An integer from `low` to `high` (None: `LARGEST`); `default` if the key is missing; ValueError if that is None
    too.
    """
    high = LARGEST.get(key) if high is None else high
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{where}: {key} is missing: add it, an integer {bounds}")
    return check_whole(f"{where}: {key}", value, low, high)


def number(
    raw: Mapping[str, Any],
    key: str,
    where: str,
    *,
    low: float = 0.0,
    above: float | None = None,
    default: float | None = None,
) -> float:
    """A finite number from `low`, or greater than `above`, up to `LARGEST_NUMBERS`."""
    value = raw.get(key)
    value = default if value is None else value
    most = LARGEST_NUMBERS.get(key, MOST_NUMBER)
    if value is None:
        raise ValueError(f"{where}: {key} is missing: add it, {_range_of(low, most, above)}")
    return check_number(f"{where}: {key}", value, low, most, above)


def flag(raw: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    """A boolean; `default` if the key is missing or null."""
    value = raw.get(key)
    value = default if value is None else value
    return check_flag(f"{where}: {key}", value)


def ids(raw: Mapping[str, Any], key: str, where: str, low: int = 0) -> tuple[int, ...]:
    """A non-empty list of layer numbers."""
    value = raw.get(key)
    if not isinstance(value, list) or not value or not all(is_whole(i, low, MOST) for i in value):
        raise ValueError(f"{where}: {key}={shown(value)}: must be a list of layer numbers of at least {low}")
    return tuple(value)


def section(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """A nested object; empty if the key is missing or null."""
    value = raw.get(key)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {key}={shown(value)}: must be an object, such as {{...}}")
    return value


def texts(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of strings; empty if the key is missing or null."""
    value = raw.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: {key}={shown(value)}: must be a list of names")
    return tuple(value)


def text(raw: Mapping[str, Any], key: str, where: str) -> str | None:
    """A string; None if the key is missing or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {key}={shown(value)}: must be text")
    return value


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """Token ids from an int, a list of ints or null."""
    given: list[Any] = []
    if value is not None:
        given = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(is_whole(i, 0, MOST) for i in given):
        raise ValueError(f"{name}={shown(value)}: must be a token id, a list of token ids, or null")
    return tuple(given)


def check_known(raw: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """Raise ValueError for the first non-null key that is not in `known`, with the nearest known one."""
    for key, value in raw.items():
        if key not in known and value is not None:
            raise unknown_key(key, value, where, known)


def unknown_key(key: str, value: object, where: str, known: Iterable[str]) -> ValueError:
    """The error for a key that no reader knows."""
    hint = did_you_mean(key, known)
    reason = f"{hint} It may" if hint else "It may"
    return ValueError(
        f"{where}: unknown key {shown(key)}={shown(value)}: {reason} change the model's arithmetic, which would "
        f"make every result wrong; {without(key)} if it does not"
    )


def without(key: str) -> str:
    """Advice on removing a key from a config without editing the file."""
    return f"leave it out with hf_overrides={{{key!r}: None}}"


def _range_of(low: float, high: float, above: float | None) -> str:
    least = f"from {low:g}" if above is None else f"greater than {above:g}"
    return f"a number {least}, at most {high:g}"


def _is_nested_deeper(raw: object, most: int) -> bool:
    level: list[Any] = [raw]
    for _ in range(most + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, (dict, list)):
                inner += value.values() if isinstance(value, dict) else value
        if not inner:
            return False
        level = inner
    return True
