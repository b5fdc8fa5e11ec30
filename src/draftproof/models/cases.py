"""Operators of layers as cases to certify: the shapes they are called with, and the data they are checked with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from draftproof.attention.exactness import AttentionShape, scores_check, values_check
from draftproof.kernels import operator_checks as checks
from draftproof.kernels.exactness import Case
from draftproof.kernels.operator_checks import RopeShape

SPLIT_K_PARTS = 4  # on a GPU a sum over K may come as this many partial sums, which the following norm adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The device, dtype and block size that a target runs with."""

    device: torch.device
    dtype: torch.dtype
    block_size: int  # tokens of a cache block


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def norm_dtype(where: Where, offset: float) -> torch.dtype:
    """The dtype of norms' weights: fp32 if an offset is added to the stored ones."""
    return torch.float32 if offset else where.dtype


def norm_case(width: int, where: Where, weight: torch.dtype) -> Case:
    """A norm by itself; weight: its dtype."""
    key = f"{width} {name_of(where.dtype)}, weight {name_of(weight)}"
    return Case("rms_norm", key, partial(checks.rms_norm_check, width, where.dtype, where.device, weight))


def add_norm_cases(hidden: int, where: Where, weight: torch.dtype) -> Iterator[Case]:
    """A norm fused with the addition before it."""
    for parts in (0, SPLIT_K_PARTS) if where.device.type == "cuda" else (0,):
        key = (
            f"{hidden} {name_of(where.dtype)}, weight {name_of(weight)}{f', {parts} parts' if parts else ''}"
        )
        make = partial(checks.add_rms_norm_check, hidden, where.dtype, where.device, weight, parts)
        yield Case("add_rms_norm", key, make)


def attention_cases(
    rope: RopeShape, attention: AttentionShape, where: Where, weight: torch.dtype
) -> Iterator[Case]:
    """Rotation and storing of one layer's keys and values, and its attention; weight: dtype of the heads' norms."""
    block = where.block_size
    dtype = where.dtype
    device = where.device
    heads = f"{rope.num_heads}/{rope.num_kv_heads} of {rope.head_dim}"
    normed = "".join(n for n, on in zip("qkv", (rope.q_norm, rope.k_norm, rope.v_norm), strict=True) if on)
    key = f"{heads} {name_of(dtype)}, rotary {rope.rotary_dim}, norms {normed or '-'}, block {block}"
    key += f", weight {name_of(weight)}" if normed else ""
    make = partial(checks.rope_store_check, rope, block, dtype, device, weight)
    yield Case("rope_store", key + ", k is v" * rope.shared, make)
    heads = f"{attention.num_heads}/{attention.num_kv_heads} of {attention.head_dim}"
    key = f"{heads} {name_of(dtype)}, window {attention.window or '-'}, block {block}"
    key += ", k is v" * attention.shared
    yield Case("attention", f"{key}, scores", partial(scores_check, attention, block, dtype, device))
    yield Case("attention", f"{key}, values", partial(values_check, attention, block, dtype, device))


def gate_case(width: int, where: Where, *, gelu: bool) -> Case:
    """The product activation(gate) * up."""
    make = partial(checks.gate_mul_check, width, where.dtype, where.device, gelu=gelu)
    return Case("gelu_mul" if gelu else "silu_mul", f"{width} {name_of(where.dtype)}", make)
