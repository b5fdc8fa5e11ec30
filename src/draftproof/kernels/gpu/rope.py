"""Norm and rotation of q and k and the write of k and v to the paged cache, in Triton: a program a row and head.

Shapes: T rows, N heads (q, k and v together), D head size, P positions of the table, S slots, B blocks per slot.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.gpu.launch import dense, on, power_of_two


@triton.jit
def _rotated(x, norm, cos_sin, eps, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
             NORM: tl.constexpr):  # fmt: skip
    """The three parts of one head, normed and rotated: the pairs' first and second elements, and what is left."""
    i, j = tl.arange(0, PAIRS), tl.arange(0, REST)
    pair, rest = i < HALF, j < D - 2 * HALF
    low = tl.load(x + i, mask=pair, other=0.0).to(tl.float32)
    high = tl.load(x + HALF + i, mask=pair, other=0.0).to(tl.float32)
    tail = tl.load(x + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, axis=0) + tl.sum(tail * tail, axis=0)
        factor = 1.0 / tl.sqrt_rn(squares * (1.0 / D) + eps)
        low = low * factor * tl.load(norm + i, mask=pair, other=0.0).to(tl.float32)
        high = high * factor * tl.load(norm + HALF + i, mask=pair, other=0.0).to(tl.float32)
        tail = tail * factor * tl.load(norm + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + i, mask=pair, other=1.0)
    sin = tl.load(cos_sin + HALF + i, mask=pair, other=0.0)
    return low * cos - high * sin, high * cos + low * sin, tail


@triton.jit
def _store(
    out, low, high, tail, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr
):
    i, j = tl.arange(0, PAIRS), tl.arange(0, REST)
    dtype = out.dtype.element_ty
    tl.store(out + i, low.to(dtype), mask=i < HALF)
    tl.store(out + HALF + i, high.to(dtype), mask=i < HALF)
    tl.store(out + 2 * HALF + j, tail.to(dtype), mask=j < D - 2 * HALF)


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["positions", "slots", "table"],
)
def _rope_store_kernel(
    qkv, positions, slots, cos_sin, q_norm, k_norm, eps, q_out, k_cache, v_cache, table, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D
    position = tl.load(positions + row)
    angles = cos_sin + tl.maximum(position, 0) * 2 * HALF
    if head < HEADS:
        low, high, tail = _rotated(x, q_norm, angles, eps, D, HALF, PAIRS, REST, Q_NORM)
        live = position >= 0
        low, high, tail = tl.where(live, low, 0.0), tl.where(live, high, 0.0), tl.where(live, tail, 0.0)
        _store(q_out + (row * HEADS + head) * D, low, high, tail, D, HALF, PAIRS, REST)
    elif position >= 0:
        slot = tl.load(slots + row)
        block = tl.load(table + slot * width + position // BLOCK_SIZE).to(tl.int64)
        offset = position % BLOCK_SIZE
        if head < HEADS + KV_HEADS:
            low, high, tail = _rotated(x, k_norm, angles, eps, D, HALF, PAIRS, REST, K_NORM)
            at = ((block * KV_HEADS + head - HEADS) * BLOCK_SIZE + offset) * D
            _store(k_cache + at, low, high, tail, D, HALF, PAIRS, REST)
        else:
            i, j = tl.arange(0, PAIRS), tl.arange(0, REST)
            v_low, v_high = tl.load(x + i, mask=i < HALF), tl.load(x + HALF + i, mask=i < HALF)
            v_tail = tl.load(x + 2 * HALF + j, mask=j < D - 2 * HALF)
            at = ((block * KV_HEADS + head - HEADS - KV_HEADS) * BLOCK_SIZE + offset) * D
            _store(v_cache + at, v_low, v_high, v_tail, D, HALF, PAIRS, REST)


def rope_store(
    qkv_TX: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_PD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
) -> Tensor:
    """See `ops.RopeStore`."""
    _, kv_heads, block_size, dim = k_cache.shape
    rows, heads = qkv_TX.shape[0], qkv_TX.shape[1] // dim - 2 * kv_heads
    q_THD = qkv_TX.new_empty(rows, heads, dim)
    if rows == 0:
        return q_THD
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and block_table_SB.is_contiguous()
    qkv_TX = dense(qkv_TX)
    half = cos_sin_PD.shape[1] // 2
    with on(qkv_TX):
        _rope_store_kernel[(rows, heads + 2 * kv_heads)](
            *(qkv_TX, positions_T.contiguous(), slots_T.contiguous(), dense(cos_sin_PD)),
            *(
                qkv_TX if q_norm_D is None else dense(q_norm_D),
                qkv_TX if k_norm_D is None else dense(k_norm_D),
            ),
            *(eps, q_THD, k_cache, v_cache, block_table_SB, block_table_SB.shape[1]),
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=dim,
            HALF=half,
            BLOCK_SIZE=block_size,
            PAIRS=power_of_two(half),
            REST=power_of_two(max(dim - 2 * half, 1)),
            Q_NORM=q_norm_D is not None,
            K_NORM=k_norm_D is not None,
            num_warps=1,
        )
    return q_THD
