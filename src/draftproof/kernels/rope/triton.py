"""Norm and rotation of q and k, and the write of k and v to the paged cache, in Triton: a program handles a few heads
of a row.

Shapes: T rows, N heads (q, k and v together), D head size, P positions of the table, S slots, B blocks per slot.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftproof.runtime.triton.launch import dense, on, pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

HEADS_EACH = 8  # heads per program


@triton.jit
def _parts(
    x, count, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr
):
    """Offsets and masks of `count` heads from `x` on: of each pair's first element, and of the elements that do not
    rotate.
    """
    h = tl.arange(0, HB)[:, None]
    i = tl.arange(0, PAIRS)[None, :]
    j = tl.arange(0, REST)[None, :]
    return x + h * D + i, (h < count) & (i < HALF), x + h * D + 2 * HALF + j, (h < count) & (j < D - 2 * HALF)


@triton.jit
def _normed(x, norm, eps, count, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
            HB: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """The three parts of `count` heads, fp32, normed if NORM: the pairs' first and second elements, and the rest."""
    i = tl.arange(0, PAIRS)
    j = tl.arange(0, REST)
    pair = i < HALF
    rest = j < D - 2 * HALF
    at, mask, at_rest, mask_rest = _parts(x, count, D, HALF, PAIRS, REST, HB)
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tail = tl.load(at_rest, mask=mask_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, axis=1) + tl.sum(tail * tail, axis=1)
        factor = (1.0 / tl.sqrt_rn(squares * (1.0 / D) + eps))[:, None]
        low = low * factor * tl.load(norm + i, mask=pair, other=0.0).to(tl.float32)[None, :]
        high = high * factor * tl.load(norm + HALF + i, mask=pair, other=0.0).to(tl.float32)[None, :]
        tail = tail * factor * tl.load(norm + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)[None, :]
    return low, high, tail


@triton.jit
def _rotated(x, norm, cos_sin, eps, count, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
             REST: tl.constexpr, HB: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """The parts from `_normed`, rotated."""
    low, high, tail = _normed(x, norm, eps, count, D, HALF, PAIRS, REST, HB, NORM)
    i = tl.arange(0, PAIRS)
    pair = i < HALF
    cos = tl.load(cos_sin + i, mask=pair, other=1.0)[None, :]
    sin = tl.load(cos_sin + HALF + i, mask=pair, other=0.0)[None, :]
    return low * cos - high * sin, high * cos + low * sin, tail


@triton.jit
def _store(out, stride, low, high, tail, count, D: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
           REST: tl.constexpr, HB: tl.constexpr):  # fmt: skip
    """Store the three parts of `count` heads, `stride` elements apart."""
    h = tl.arange(0, HB)[:, None]
    i = tl.arange(0, PAIRS)[None, :]
    j = tl.arange(0, REST)[None, :]
    dtype = out.dtype.element_ty
    pair = (h < count) & (i < HALF)
    tl.store(out + h * stride + i, low.to(dtype), mask=pair)
    tl.store(out + h * stride + HALF + i, high.to(dtype), mask=pair)
    tl.store(out + h * stride + 2 * HALF + j, tail.to(dtype), mask=(h < count) & (j < D - 2 * HALF))


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["positions", "slots", "table", "shift"],
)
def _rope_store_kernel(
    qkv, positions, slots, cos_sin, q_norm, k_norm, v_norm, eps, q_out, k_cache, v_cache, table, shift, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, HB: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    V_NORM: tl.constexpr, HAS_V: tl.constexpr, HAS_SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store HB heads of one row; q's programs come first, then k's, then v's if any."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(HEADS, HB)
    kv_parts = tl.cdiv(KV_HEADS + (KV_HEADS == 0), HB)
    x = qkv + row * (HEADS + KV_HEADS + HAS_V * KV_HEADS) * D
    position = tl.load(positions + row)
    turn = tl.maximum(position, 0)
    if HAS_SHIFT:
        turn = tl.maximum(position + tl.load(shift + tl.load(slots + row)), 0)
    angles = cos_sin + turn * 2 * HALF
    if part < q_parts:
        head = part * HB
        low, high, tail = _rotated(
            x + head * D, q_norm, angles, eps, HEADS - head, D, HALF, PAIRS, REST, HB, Q_NORM
        )
        live = position >= 0
        low = tl.where(live, low, 0.0)
        high = tl.where(live, high, 0.0)
        tail = tl.where(live, tail, 0.0)
        _store(q_out + (row * HEADS + head) * D, D, low, high, tail, HEADS - head, D, HALF, PAIRS, REST, HB)
    elif position >= 0:
        slot = tl.load(slots + row)
        block = tl.load(table + slot * width + position // BLOCK_SIZE).to(tl.int64)
        head = (part - q_parts) % kv_parts * HB
        at = ((block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * D
        if part < q_parts + kv_parts:
            low, high, tail = _rotated(
                x + (HEADS + head) * D, k_norm, angles, eps, KV_HEADS - head, D, HALF, PAIRS, REST, HB, K_NORM
            )
            _store(k_cache + at, BLOCK_SIZE * D, low, high, tail, KV_HEADS - head, D, HALF, PAIRS, REST, HB)
        else:
            v = x + (HEADS + KV_HEADS + head) * D
            low, high, tail = _normed(v, v_norm, eps, KV_HEADS - head, D, HALF, PAIRS, REST, HB, V_NORM)
            _store(v_cache + at, BLOCK_SIZE * D, low, high, tail, KV_HEADS - head, D, HALF, PAIRS, REST, HB)


def rope_store(
    qkv_TX: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_sin_PD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor | None,
    block_table_SB: Tensor,
    v_norm_D: Tensor | None = None,
    shift_S: Tensor | None = None,
) -> Tensor:
    """See `RopeStore`."""
    _, kv_heads, block_size, dim = k_cache.shape
    each = 1 if v_cache is None else 2
    rows = qkv_TX.shape[0]
    heads = qkv_TX.shape[1] // dim - each * kv_heads
    q_THD = qkv_TX.new_empty(rows, heads, dim)
    if rows == 0:
        return q_THD
    v_cache = k_cache if v_cache is None else v_cache
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and block_table_SB.is_contiguous()
    qkv_TX = dense(qkv_TX)
    half = cos_sin_PD.shape[1] // 2
    with on(qkv_TX):
        parts = triton.cdiv(heads, HEADS_EACH) + each * triton.cdiv(kv_heads, HEADS_EACH)
        _rope_store_kernel[(rows, parts)](
            qkv_TX,
            positions_T.contiguous(),
            slots_T.contiguous(),
            dense(cos_sin_PD),
            *(qkv_TX if norm_D is None else dense(norm_D) for norm_D in (q_norm_D, k_norm_D, v_norm_D)),
            eps,
            q_THD,
            k_cache,
            v_cache,
            block_table_SB,
            slots_T if shift_S is None else shift_S,
            block_table_SB.shape[1],
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=dim,
            HALF=half,
            BLOCK_SIZE=block_size,
            PAIRS=power_of_two(half),
            REST=power_of_two(max(dim - 2 * half, 1)),
            HB=HEADS_EACH,
            Q_NORM=q_norm_D is not None,
            K_NORM=k_norm_D is not None,
            V_NORM=v_norm_D is not None,
            HAS_V=each == 2,
            HAS_SHIFT=shift_S is not None,
            **pdl(qkv_TX),
            num_warps=4,
        )
    return q_THD
