"""The filters of `sample` as one number a row: how far below the row's maximum a token may lie.

The distance |d|, d = (logit - max) / temperature, is compared by its bits, which order it as the numbers do. Masses are
fixed-point integers, so no sum depends on its order. A row's likeliest tokens are set aside first; the searches then
go over them alone, or over the whole row where they do not decide.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

CANDIDATES = tl.constexpr(8192)  # also the columns of one step
BINS = tl.constexpr(1024)
BINS_PER_UNIT = tl.constexpr(32.0)  # so the bins reach 32 below the maximum, past which no mass is
ONE = tl.constexpr(2.0**44)  # mass of the likeliest token
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity: everything is kept


@triton.jit
def _distance(x, top, temperature):
    """|d| of logits; -inf gives infinity."""
    return tl.abs(tl.math.div_rn(x - top, temperature))


@triton.jit
def _mass(distance):
    return (tl.exp(-distance) * ONE).to(tl.int64)


@triton.jit
def _smallest(source, count, top, temperature, limit, wanted, MASS: tl.constexpr):
    """The least bits U such that tokens with bits <= U (and <= limit) number `wanted`, or have that mass."""
    v = tl.arange(0, CANDIDATES)
    low, high = tl.full((), 0, tl.int32), tl.full((), INFINITE, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        bound = tl.minimum(middle, limit)
        total = tl.full((), 0, tl.int64)
        for start in range(0, count, CANDIDATES):
            x = tl.load(source + start + v, mask=start + v < count, other=-float("inf"))
            distance = _distance(x, top, temperature)
            kept = (distance.to(tl.int32, bitcast=True) <= bound) & (start + v < count)
            if MASS:
                total += tl.sum(tl.where(kept, _mass(distance), 0), axis=0)
            else:
                total += tl.sum(kept.to(tl.int32), axis=0).to(tl.int64)
        if total.to(tl.float64) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _set_aside(row, spare, top, temperature, limit, V: tl.constexpr):
    """Copy the likeliest tokens' logits to `spare`: (their number, their mass, the whole row's), within `limit`."""
    v, b = tl.arange(0, CANDIDATES), tl.arange(0, BINS)
    counts_B, mass = tl.zeros((BINS,), tl.int32), tl.full((), 0, tl.int64)
    for start in range(0, V, CANDIDATES):
        x = tl.load(row + start + v, mask=start + v < V, other=-float("inf"))
        distance = _distance(x, top, temperature)
        bin_V = tl.minimum(distance * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)
        counts_B += tl.histogram(bin_V, BINS, mask=start + v < V)
        kept = distance.to(tl.int32, bitcast=True) <= limit
        mass += tl.sum(tl.where(kept, _mass(distance), 0), axis=0)
    fits = (tl.cumsum(counts_B, axis=0) <= CANDIDATES) & (b < BINS - 1)
    bins = tl.sum(fits.to(tl.int32), axis=0)  # those below this one are set aside
    number, mass_aside = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    for start in range(0, V, CANDIDATES):
        x = tl.load(row + start + v, mask=start + v < V, other=-float("inf"))
        distance = _distance(x, top, temperature)
        aside = (tl.minimum(distance * BINS_PER_UNIT, BINS - 1.0).to(tl.int32) < bins) & (start + v < V)
        at = number + tl.cumsum(aside.to(tl.int32), axis=0) - 1
        tl.store(spare + at, x, mask=aside)
        kept = aside & (distance.to(tl.int32, bitcast=True) <= limit)
        number += tl.sum(aside.to(tl.int32), axis=0)
        mass_aside += tl.sum(tl.where(kept, _mass(distance), 0), axis=0)
    tl.debug_barrier()  # other threads read what was stored
    return number, mass_aside, mass


@triton.jit(
    do_not_specialize_on_alignment=["logits", "temperatures", "top_ks", "top_ps", "min_ps"],
)
def threshold_kernel(
    logits, tops, temperatures, top_ks, top_ps, min_ps, limits, spare,
    V: tl.constexpr, PIECES: tl.constexpr, POW: tl.constexpr,
):  # fmt: skip
    """The bits of the largest |d| that stays, for each row: min-p, then top-k, then top-p over what is left."""
    m = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperatures + m), tl.load(top_ks + m), tl.load(top_ps + m)
    lowest = tl.log(tl.load(min_ps + m).to(tl.float64)).to(tl.float32)
    limit = tl.abs(lowest).to(tl.int32, bitcast=True)
    p = tl.arange(0, POW)
    top = tl.max(tl.load(tops + m * PIECES + p, mask=p < PIECES, other=-float("inf")), axis=0)
    use_k, use_p = (top_k > 0) & (top_k < V), top_p < 1.0
    if (temperature > 0) & (use_k | use_p) & (tl.abs(top) < float("inf")):
        row, aside = logits + m * V, spare + m * CANDIDATES
        number, mass_aside, mass = _set_aside(row, aside, top, temperature, limit, V)
        decides = tl.where(use_k, top_k <= number, mass_aside.to(tl.float64) >= mass.to(tl.float64) * top_p)
        source, count = row, tl.full((), V, tl.int32)
        if decides:
            source, count = aside, number
        if use_k:
            of_k = _smallest(source, count, top, temperature, INFINITE, top_k.to(tl.float64), False)
            limit = tl.minimum(limit, of_k)
        if use_p:
            if use_k:
                mass = _total(source, count, top, temperature, limit)
            wanted = mass.to(tl.float64) * top_p.to(tl.float64)
            of_p = _smallest(source, count, top, temperature, limit, wanted, True)
            limit = tl.minimum(limit, of_p)
    tl.store(limits + m, limit)


@triton.jit
def _total(source, count, top, temperature, limit):
    """The mass within `limit`."""
    v, mass = tl.arange(0, CANDIDATES), tl.full((), 0, tl.int64)
    for start in range(0, count, CANDIDATES):
        x = tl.load(source + start + v, mask=start + v < count, other=-float("inf"))
        distance = _distance(x, top, temperature)
        kept = (distance.to(tl.int32, bitcast=True) <= limit) & (start + v < count)
        mass += tl.sum(tl.where(kept, _mass(distance), 0), axis=0)
    return mass
