"""The Triton kernel that adds up a row's chunks of attention. `attention.py` tells how the kernels play together."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.kernels.gpu.pdl import begin

MANY_CHUNKS, FEW_CHUNKS = tl.constexpr(16), tl.constexpr(8)  # that are added up at once


@triton.jit
def power(x):
    """2 to the integer `x` <= 0, exactly; 0 below the normal numbers."""
    return ((tl.maximum(x, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def shifted(m, m_C):
    """The maximum with one more chunk, what the sums so far are scaled by, and what the chunk's are.

    Maxima are integers, so that scaling rounds nothing but what falls below the normal numbers. That depends on the
    order of steps too: every kernel adds chunks one by one, by `added`.
    """
    m_new = tl.maximum(m, m_C)
    return m_new, power(m - m_new), power(m_C - m_new)


@triton.jit
def added(x, old, x_C, new):
    """x * old + x_C * new, where the second product is not rounded."""
    return tl.fma(x_C, new, x * old)


@triton.jit
def divided(acc, total, is_live):
    """The values' mean by weight; zero where nothing is seen. What is no number or infinite becomes NaN: which of them
    it was would tell how keys were grouped."""
    y = tl.math.div_rn(acc, tl.where(is_live, total, 1.0))
    y = tl.where(tl.abs(y) < float("inf"), y, float("nan"))
    return tl.where(is_live, y, 0.0)


@triton.jit
def num_chunks(end, window, CHUNK: tl.constexpr, WINDOWED: tl.constexpr):
    """That a row sees something of."""
    first = 0
    if WINDOWED:
        first = tl.maximum(end - window, 0) // CHUNK
    return (end + CHUNK - 1) // CHUNK - first


@triton.jit(do_not_specialize=["chunks", "window"], do_not_specialize_on_alignment=["ends", "plan"])
def combine_kernel(
    acc, ml, ends, plan, out, chunks, window,
    HEADS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr,
    ALIKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PART dimensions of a row and head: the sum of its chunks, first to last. A padding row (end 0) becomes zero, a
    finished row stays."""
    begin(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(ends + row).to(tl.int32)
    d = tl.program_id(2) * PART + tl.arange(0, PART)
    last = (end + CHUNK - 1) // CHUNK
    first = last - num_chunks(end, window, CHUNK, WINDOWED)
    if ALIKE:  # noqa: SIM102  known when compiling
        if (end > 0) & (last - first <= tl.load(plan + 2)):
            return
    at = (row * HEADS + head) * chunks
    m, total, total_D = -float("inf"), 0.0, tl.zeros((PART,), tl.float32)
    # Many loads at once; then fewer and guarded: 38 chunks are twice 16, and 6 of 8.
    middle = first + (last - first) // MANY_CHUNKS * MANY_CHUNKS
    for base in range(first, middle, MANY_CHUNKS):
        for j in tl.static_range(MANY_CHUNKS):
            c = at + base + j
            m_C, l_C = tl.load(ml + c * 2), tl.load(ml + c * 2 + 1)
            acc_D = tl.load(acc + c * D + d, mask=d < D, other=0.0)
            m, old, new = shifted(m, m_C)
            total, total_D = added(total, old, l_C, new), added(total_D, old, acc_D, new)
    for base in range(middle, last, FEW_CHUNKS):
        for j in tl.static_range(FEW_CHUNKS):
            c, here = at + base + j, base + j < last
            m_C = tl.load(ml + c * 2, mask=here, other=-float("inf"))
            l_C = tl.load(ml + c * 2 + 1, mask=here, other=0.0)
            acc_D = tl.load(acc + c * D + d, mask=here & (d < D), other=0.0)
            m_new, old, new = shifted(m, m_C)
            m, total = tl.where(here, m_new, m), tl.where(here, added(total, old, l_C, new), total)
            total_D = tl.where(here, added(total_D, old, acc_D, new), total_D)
    y_D = divided(total_D, total, end > 0)
    tl.store(out + (row * HEADS + head) * D + d, y_D.to(out.dtype.element_ty), mask=d < D)
