"""The Triton kernel that divides a pass of paged attention into tiles, and their chunks into runs."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.runtime.triton.pdl import begin

FAR = tl.constexpr(1 << 30)  # greater than every position


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["rows", "window"], do_not_specialize_on_alignment=["slots", "ends"])
def tiles_kernel(
    slots, ends, plan, rows, window,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, RUNS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Divide the pass into tiles of up to ROWS consecutive rows of one slot, and their chunks into runs; one program.

    plan: [tiles, runs of all tiles, chunks per run, first row of each tile and `rows`, number of runs before each tile,
    slots]. The length of runs is chosen to give about RUNS of them: 17 chunks in all and RUNS 4 give runs of 5 chunks.
    """
    begin(PDL)
    carried, tiles = 0, 0
    for base in range(0, rows, BLOCK):
        t = base + tl.arange(0, BLOCK)
        inside = t < rows
        follows = (t < rows) & (t > 0)
        slot = tl.load(slots + t, mask=inside, other=-1)
        end = tl.load(ends + t, mask=inside, other=0)
        slot_before = tl.load(slots + t - 1, mask=follows, other=-2)
        end_before = tl.load(ends + t - 1, mask=follows, other=0)
        breaks = (slot != slot_before) | (end == 0) | (end_before == 0)
        start = tl.maximum(tl.associative_scan(tl.where(breaks, t, 0), 0, _larger), carried)
        leads = inside & ((t - start) % ROWS == 0)
        index = tiles + tl.cumsum(leads.to(tl.int32), axis=0) - 1
        tl.store(plan + 3 + index, t, mask=leads)
        carried = tl.max(start, axis=0)
        tiles += tl.sum(leads.to(tl.int32), axis=0)
    tl.store(plan + 3 + tiles, rows)
    tl.store(plan, tiles)
    if SPLIT:
        tl.debug_barrier()  # other threads read below what was stored above
        i = tl.arange(0, BLOCK)
        first = tl.load(plan + 3 + i, mask=i < tiles, other=0)
        after = tl.load(plan + 4 + i, mask=i < tiles, other=0)
        r = first[:, None] + tl.arange(0, ROWS)[None, :]
        end = tl.load(ends + r, mask=r < after[:, None], other=0).to(tl.int32)
        low = tl.zeros((BLOCK,), tl.int32)
        if WINDOWED:
            starts = tl.where(end > 0, tl.maximum(end - window, 0), FAR)
            low = tl.min(starts, axis=1) // CHUNK
        last = tl.max(end, axis=1)
        chunks = tl.where(last > 0, (last + CHUNK - 1) // CHUNK - low, 0)
        each = tl.maximum((tl.sum(chunks, axis=0) + RUNS - 1) // RUNS, 1)
        runs = (chunks + each - 1) // each
        tl.store(plan + 4 + rows + i, tl.cumsum(runs, axis=0) - runs, mask=i < tiles)
        tl.store(plan + 4 + 2 * rows + i, tl.load(slots + first, mask=i < tiles, other=0), mask=i < tiles)
        tl.store(plan + 1, tl.sum(runs, axis=0))
        tl.store(plan + 2, each)
