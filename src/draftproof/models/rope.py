"""Rotary position embedding: the frequencies that a config asks for, and the table computed from them at start.

Shapes: P positions, F = rotary_dim / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.runtime.room import free_bytes
from draftproof.schema import check_choice, flag, number, section, shown, text, unknown_key, whole

_EVERY_TYPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_KEYS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
TABLE_PIECE = 1 << 14  # positions computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Settings of a rotary embedding. `factor` stretches positions; only types other than "default" use the rest.

    `rotary_dim`: leading elements of each head that rotate; `attention_factor` multiplies cos and sin (yarn).
    """

    theta: float
    rotary_dim: int
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    num_turning: int = 0  # "proportional": number of pairs that rotate, the others do not
    # M-RoPE: the axis (time, height, width) whose position rotates each pair; empty: one axis
    axes: tuple[int, ...] = ()


def parse_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    where: str,
    default_theta: float = 10000.0,
    default_rotary: float | None = None,
    *,
    interleaved_axes: bool = False,
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4.x) of a model's config.

    default_rotary: the share of a head that rotates if the config does not say; None: always whole heads.
    interleaved_axes: whether M-RoPE axes are interleaved if the config does not say.
    Raises ValueError for types whose frequencies depend on the length of the text, unknown types and unknown keys.
    """
    given = dict(_flat(raw, where))
    here = f"{where}: rotary embedding"
    if given.get("mrope_section") is not None:
        sections, interleaved = given.pop("mrope_section"), given.pop("mrope_interleaved", None)
        interleaved = interleaved_axes if interleaved is None else interleaved
        for key in ("type", "rope_type"):
            if given.get(key) == "mrope":
                given[key] = "default"
        plain = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_parameters")}
        plain["rope_parameters"] = given
        rope = parse_rope(plain, head_dim, max_positions, where, default_theta, default_rotary)
        return replace(rope, axes=_axes(sections, interleaved, rope.rotary_dim // 2, here))
    kind = _type(given, here)
    _check_type(kind, where)
    known = _EVERY_TYPE | _KEYS_OF_TYPE[kind]
    for key, value in given.items():
        if key not in known and value is not None:
            raise unknown_key(key, value, f"{here} of type {kind!r}", known)
    share = number(raw, "partial_rotary_factor", where, default=default_rotary or 1.0)
    share = number(given, "partial_rotary_factor", where, default=share)
    rotary_dim = _rotary_dim(share, head_dim, where, whole_heads=default_rotary is None)
    theta = number(raw, "rope_theta", where, low=1, default=default_theta)
    theta = number(given, "rope_theta", where, low=1, default=theta)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind == "linear":
        factor = number(given, "factor", here, above=0)
        return RopeConfig(theta=theta, rotary_dim=rotary_dim, type=kind, factor=factor)
    original = whole(given, "original_max_position_embeddings", here, default=max_positions)
    if kind == "llama3":
        low = number(given, "low_freq_factor", here, above=0)
        return RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            type=kind,
            factor=number(given, "factor", here, above=0),
            low_freq_factor=low,
            high_freq_factor=number(given, "high_freq_factor", here, above=low),
            original_max_positions=original,
        )
    return _parse_yarn(given, theta, rotary_dim, original, max_positions, here)


def _axes(sections: Any, interleaved: Any, num_pairs: int, here: str) -> tuple[int, ...]:
    """The axis of each pair: sections give the numbers of pairs for time, height and width, in order or interleaved."""
    fits = isinstance(sections, list) and all(isinstance(n, int) and n >= 0 for n in sections)
    if not fits or len(sections) != 3 or sum(sections) != num_pairs:
        raise ValueError(
            f"{here}: mrope_section={shown(sections)}: must be three numbers of pairs, {num_pairs} together"
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def _rotary_dim(share: float, head_dim: int, where: str, *, whole_heads: bool) -> int:
    if whole_heads and share != 1:
        raise ValueError(
            f"{where}: partial_rotary_factor={share:g}: this family rotates whole heads; remove the key or set 1.0"
        )
    size = int(head_dim * share)
    if share > 1 or size == 0 or size % 2:
        raise ValueError(
            f"{where}: partial_rotary_factor={share:g}: must be a number up to 1 that leaves an even part of "
            f"head_dim={head_dim}"
        )
    return size


def _parse_yarn(
    given: Mapping[str, Any], theta: float, rotary_dim: int, original: int, max_positions: int, here: str
) -> RopeConfig:
    if theta == 1:
        raise ValueError(f"{here}: rope_theta={theta:g}: must be greater than 1 with rope_type='yarn'")
    # a missing factor follows from the two lengths, if they differ
    stretch = max_positions / original if max_positions > original else None
    factor = number(given, "factor", here, above=0, default=stretch)
    mscale = number(given, "mscale", here, default=0)
    mscale_all = number(given, "mscale_all_dim", here, default=0)
    attention = _yarn_scale(factor, 1.0)
    if mscale and mscale_all:
        attention = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        type="yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=number(given, "attention_factor", here, above=0, default=attention),
        beta_fast=number(given, "beta_fast", here, above=0, default=32),
        beta_slow=number(given, "beta_slow", here, above=0, default=1),
        truncate=flag(given, "truncate", here, True),
    )


def score_factor(raw: Mapping[str, Any], where: str) -> float:
    """The factor on attention scores for a stretched rotary embedding (`mscale_all_dim`) in DeepSeek's models."""
    given = _flat(raw, where)
    here = f"{where}: rotary embedding"
    stretched = _type(given, here) != "default"
    mscale_all = number(given, "mscale_all_dim", here, default=0)
    if not stretched or not mscale_all:
        return 1.0
    return _yarn_scale(number(given, "factor", here, above=0), mscale_all) ** 2


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _flat(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The rotary settings as one dict; a dict per layer type is accepted if all its entries agree."""
    given = section(raw, "rope_scaling", where) or section(raw, "rope_parameters", where)
    if not any(isinstance(value, Mapping) for value in given.values()):
        return given
    layers = [value for value in given.values() if value is not None]
    if not all(isinstance(value, Mapping) and value == layers[0] for value in layers):
        raise ValueError(
            f"{where}: rope_parameters={shown(dict(given))}: rotary settings that differ between layers are not "
            "supported"
        )
    return layers[0]


def _type(given: Mapping[str, Any], here: str) -> str:
    kind = text(given, "type" if given.get("rope_type") is None else "rope_type", here)
    return "default" if kind is None else kind


def _check_type(kind: str, where: str) -> None:
    if kind in _LENGTH_DEPENDENT:
        raise ValueError(
            f"{where}: rope_type={kind!r}: its frequencies depend on the length of the text, so a row's result would "
            "depend on more than its own context; set the type to 'yarn' or 'linear' with a fixed factor, or remove "
            "the scaling and keep to the original context length"
        )
    check_choice(f"{where}: rope_type", kind, _KEYS_OF_TYPE)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair, fp32 [F].

    In fp32 and in this order of operations, because models are trained and published with that arithmetic.
    """
    exponent_F = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    base_F = rope.theta**exponent_F
    inverse_F = 1.0 / base_F
    if rope.type == "linear":
        return inverse_F / rope.factor
    if rope.type == "proportional":
        turns_F = torch.arange(len(inverse_F)) < rope.num_turning
        return torch.where(turns_F, inverse_F / rope.factor, 0.0)
    if rope.type == "llama3":
        return _llama3(rope, inverse_F)
    if rope.type == "yarn":
        keep_F = 1 - _yarn_ramp(rope)
        return 1.0 / (rope.factor * base_F) * (1 - keep_F) + inverse_F * keep_F
    return inverse_F


def _llama3(rope: RopeConfig, inverse_F: Tensor) -> Tensor:
    """Frequencies of type "llama3": short wavelengths unchanged, long ones stretched by `factor`, others blended."""
    wavelength_F = 2 * math.pi / inverse_F
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    blend_F = (rope.original_max_positions / wavelength_F - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_F = (1 - blend_F) * inverse_F / rope.factor + blend_F * inverse_F
    stretched_F = torch.where(wavelength_F > longest, inverse_F / rope.factor, inverse_F)
    between_F = (wavelength_F >= shortest) & (wavelength_F <= longest)
    return torch.where(between_F, blended_F, stretched_F)


def _yarn_ramp(rope: RopeConfig) -> Tensor:
    """Share of stretching per pair: 0 for high frequencies, 1 for low ones, a linear ramp between; fp32 [F]."""

    def index_of(turns: float) -> float:
        length = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low = index_of(rope.beta_fast)
    high = index_of(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def cos_sin_table(rope: RopeConfig, length: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every pair at positions 0..length-1: fp32 [length, rotary_dim].

    A row does not depend on `length`: a longer table extends a shorter one bit for bit. The angle is rounded to fp32
    as in training; its cosine is taken by numpy in fp64, because torch's depends on where a thread's slice ends.
    """
    needed = 4 * length * rope.rotary_dim
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"rotary embedding: a table of {length} positions and {rope.rotary_dim} sizes of a head would take "
            f"{needed / 2**30:.0f} GiB, but {free / 2**30:.2f} GiB are free; lower max_model_len, or mend "
            "max_position_embeddings or head_dim in config.json"
        )
    frequencies_F = inverse_frequencies(rope)[None, :]
    table = np.empty((length, rope.rotary_dim), dtype=np.float32)
    for start in range(0, length, TABLE_PIECE):
        piece = table[start : start + TABLE_PIECE]
        positions_P = torch.arange(start, start + len(piece), dtype=torch.float32)
        angles_PF = (positions_P[:, None] * frequencies_F).double().numpy()
        np.concatenate((np.cos(angles_PF), np.sin(angles_PF)), axis=1, out=piece, casting="same_kind")
    return torch.from_numpy(table).mul_(rope.attention_factor).to(device)
