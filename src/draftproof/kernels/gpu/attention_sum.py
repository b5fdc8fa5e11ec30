"""The Triton kernel that adds up a row's chunks of attention. `attention.py` tells how the kernels play together."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.kernels.gpu.early import begin

MANY_CHUNKS, FEW_CHUNKS = tl.constexpr(16), tl.constexpr(8)  # that are added up at once


@triton.jit
def power(x):
    """2 to the integer `x` <= 0, exactly; 0 below the normal numbers."""
    return ((tl.maximum(x, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


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
    ALIKE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """PART dimensions of a row and head: the sum of its chunks, first to last. A padding row (end 0) becomes zero, a
    finished row stays."""
    begin(EARLY)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(ends + row).to(tl.int32)
    d = tl.program_id(2) * PART + tl.arange(0, PART)
    last = (end + CHUNK - 1) // CHUNK
    first = last - num_chunks(end, window, CHUNK, WINDOWED)
    if ALIKE:  # noqa: SIM102  known when compiling
        if (end > 0) & (last - first <= tl.load(plan + 2)):
            return
    at = (row * HEADS + head) * chunks
    top_C = tl.full((BLOCK,), -float("inf"), tl.float32)
    for base in range(first, last, BLOCK):
        c = base + tl.arange(0, BLOCK)
        top_C = tl.maximum(top_C, tl.load(ml + (at + c) * 2, mask=c < last, other=-float("inf")))
    top = tl.max(top_C, axis=0)
    total_D, total = tl.zeros((PART,), tl.float32), 0.0
    # Many loads at once; then fewer and guarded: 38 chunks are twice 16, and 6 of 8.
    middle = first + (last - first) // MANY_CHUNKS * MANY_CHUNKS
    for base in range(first, middle, MANY_CHUNKS):
        for j in tl.static_range(MANY_CHUNKS):
            c = base + j
            weight = power(tl.load(ml + (at + c) * 2) - top)
            total += tl.load(ml + (at + c) * 2 + 1) * weight
            total_D += tl.load(acc + (at + c) * D + d, mask=d < D, other=0.0) * weight
    for base in range(middle, last, FEW_CHUNKS):
        for j in tl.static_range(FEW_CHUNKS):
            c = base + j
            here = c < last
            weight = power(tl.load(ml + (at + c) * 2, mask=here, other=-float("inf")) - top)
            part = tl.load(ml + (at + c) * 2 + 1, mask=here, other=0.0)
            part_D = tl.load(acc + (at + c) * D + d, mask=here & (d < D), other=0.0)
            total = tl.where(here, total + part * weight, total)
            total_D = tl.where(here, total_D + part_D * weight, total_D)
    y_D = tl.where(end > 0, tl.math.div_rn(total_D, tl.where(end > 0, total, 1.0)), 0.0)
    tl.store(out + (row * HEADS + head) * D + d, y_D.to(out.dtype.element_ty), mask=d < D)
