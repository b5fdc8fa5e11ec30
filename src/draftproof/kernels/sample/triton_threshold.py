"""The filters of `sample` as one number per row: the largest distance of a kept token below the row's maximum.

The distance |d|, d = (logit - max) / temperature, is compared by its bits, which have the same order as the numbers.
Masses are fixed-point integers, so sums do not depend on their order. A row's likeliest tokens are collected first. The
searches use these alone if they suffice, else the whole row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.row_params import NUM_COLUMNS, RowParams
from draftproof.runtime.triton.launch import pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

COLUMNS = tl.constexpr(NUM_COLUMNS)  # int64 columns of a row's parameters
FLOATS = tl.constexpr(2 * NUM_COLUMNS)  # fp32 columns
CANDIDATES = tl.constexpr(8192)  # also the number of columns per step
BINS = tl.constexpr(128)
BINS_PER_UNIT = tl.constexpr(8.0)
ONE = tl.constexpr(2.0**44)  # mass of the likeliest token
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity: keeps everything


@triton.jit
def _distances(row, start, top, temperature, V: tl.constexpr):
    """|d| of the columns from `start` on; infinite past the end, as for a logit of -inf."""
    v = start + tl.arange(0, CANDIDATES)
    x = tl.load(row + v, mask=v < V, other=-float("inf"))
    return tl.abs(tl.math.div_rn(x - top, temperature))


@triton.jit
def _weights(distance, limit, MASS: tl.constexpr):
    """The weight of each token within `limit`: its mass if MASS, else 1."""
    kept = distance.to(tl.int32, bitcast=True) <= limit
    if MASS:
        return tl.where(kept, (tl.exp(-distance) * ONE).to(tl.int64), 0)
    else:  # noqa: RET505  what is returned differs in type
        return kept.to(tl.int32)


@triton.jit
def _bin(distance):
    return tl.minimum(distance * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def _search_few(distance, limit, wanted, MASS: tl.constexpr):
    """The smallest U such that the tokens with bits <= U (and <= limit) have a total weight of at least `wanted`."""
    bits = distance.to(tl.int32, bitcast=True)
    weight = _weights(distance, limit, MASS)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), INFINITE, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(bits <= middle, weight, 0), axis=0).to(tl.float64) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _total(row, top, temperature, limit, V: tl.constexpr, MASS: tl.constexpr):
    """The total weight of a row's tokens within `limit`."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, V, CANDIDATES):
        weight = _weights(_distances(row, start, top, temperature, V), limit, MASS)
        total += tl.sum(weight, axis=0).to(tl.int64)
    return total


@triton.jit
def _search_row(row, top, temperature, limit, wanted, V: tl.constexpr, MASS: tl.constexpr):
    """`_search_few` over all columns of a row."""
    low = tl.full((), 0, tl.int32)
    high = tl.full((), INFINITE, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        if _total(row, top, temperature, tl.minimum(middle, limit), V, MASS).to(tl.float64) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _settings(
    tops, temperatures, top_ks, top_ps, min_ps, m, V: tl.constexpr, PIECES: tl.constexpr, POW: tl.constexpr
):
    """(whether row m needs a search, its largest logit, its limit from min-p)."""
    temperature = tl.load(temperatures + m * FLOATS)
    top_k = tl.load(top_ks + m * COLUMNS)
    top_p = tl.load(top_ps + m * FLOATS)
    lowest = tl.log(tl.load(min_ps + m * FLOATS).to(tl.float64)).to(tl.float32)
    p = tl.arange(0, POW)
    top = tl.max(tl.load(tops + m * PIECES + p, mask=p < PIECES, other=-float("inf")), axis=0)
    filtered = ((top_k > 0) & (top_k < V)) | (top_p < 1.0)
    active = (temperature > 0) & filtered & (tl.abs(top) < float("inf"))
    return active, top, tl.abs(lowest).to(tl.int32, bitcast=True)


@triton.jit
def _piece(row, piece, top, temperature, V: tl.constexpr, PIECE: tl.constexpr):
    """|d| of one piece's columns, and which of them exist."""
    v = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(row + v, mask=v < V, other=-float("inf"))
    return tl.abs(tl.math.div_rn(x - top, temperature)), v < V


@triton.jit(do_not_specialize_on_alignment=["logits", "temperatures", "top_ks", "top_ps", "min_ps"])
def counts_kernel(
    logits, tops, temperatures, top_ks, top_ps, min_ps, counts, masses,
    V: tl.constexpr, PIECES: tl.constexpr, POW: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write, for one piece, the number of tokens in each bin of distance, and their mass within min-p."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    active, top, limit = _settings(tops, temperatures, top_ks, top_ps, min_ps, m, V, PIECES, POW)
    if active:
        distance, exists = _piece(logits + m * V, piece, top, tl.load(temperatures + m * FLOATS), V, PIECE)
        at = m * PIECES + piece
        counts_B = tl.histogram(_bin(distance), BINS, mask=exists)
        tl.store(counts + at * BINS + tl.arange(0, BINS), counts_B)
        tl.store(masses + at, tl.sum(_weights(distance, limit, True), axis=0))


@triton.jit
def _fitting(counts, m, before, PIECES: tl.constexpr, POW: tl.constexpr):
    """(number of leading bins whose tokens all fit among the candidates, number of their tokens in pieces below
    `before`).
    """
    p = tl.arange(0, POW)
    b = tl.arange(0, BINS)
    at = (m * PIECES + p)[:, None] * BINS + b[None, :]
    counts_PB = tl.load(counts + at, mask=(p < PIECES)[:, None], other=0)
    fits_B = (tl.cumsum(tl.sum(counts_PB, axis=0), axis=0) <= CANDIDATES) & (b < BINS - 1)
    number = tl.sum(tl.sum(tl.where((p < before)[:, None] & fits_B[None, :], counts_PB, 0), axis=1), axis=0)
    return tl.sum(fits_B.to(tl.int32), axis=0), number


@triton.jit(do_not_specialize_on_alignment=["logits", "temperatures", "top_ks", "top_ps", "min_ps"])
def aside_kernel(
    logits, tops, temperatures, top_ks, top_ps, min_ps, counts, spare,
    V: tl.constexpr, PIECES: tl.constexpr, POW: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the distances of one piece's likeliest tokens, after those of the pieces before it."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    active, top, _ = _settings(tops, temperatures, top_ks, top_ps, min_ps, m, V, PIECES, POW)
    if active:
        bins, first = _fitting(counts, m, piece, PIECES, POW)
        distance, exists = _piece(logits + m * V, piece, top, tl.load(temperatures + m * FLOATS), V, PIECE)
        aside = exists & (_bin(distance) < bins)
        at = first + tl.cumsum(aside.to(tl.int32), axis=0) - 1
        tl.store(spare + m * CANDIDATES + at, distance, mask=aside)


@triton.jit(do_not_specialize_on_alignment=["logits", "temperatures", "top_ks", "top_ps", "min_ps"])
def threshold_kernel(
    logits, tops, temperatures, top_ks, top_ps, min_ps, counts, masses, spare, limits,
    V: tl.constexpr, PIECES: tl.constexpr, POW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the bits of a row's largest kept |d|: min-p, then top-k, then top-p over the remaining tokens."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    active, top, limit = _settings(tops, temperatures, top_ks, top_ps, min_ps, m, V, PIECES, POW)
    if active:
        temperature = tl.load(temperatures + m * FLOATS)
        top_k = tl.load(top_ks + m * COLUMNS)
        share = tl.load(top_ps + m * FLOATS).to(tl.float64)
        use_k = (top_k > 0) & (top_k < V)
        use_p = share < 1.0
        wanted_k = top_k.to(tl.float64)
        row = logits + m * V
        c = tl.arange(0, CANDIDATES)
        p = tl.arange(0, POW)
        mass = tl.sum(tl.load(masses + m * PIECES + p, mask=p < PIECES, other=0), axis=0)
        _, number = _fitting(counts, m, PIECES, PIECES, POW)
        few = tl.load(spare + m * CANDIDATES + c, mask=c < number, other=float("inf"))
        mass_few = tl.sum(_weights(few, limit, True), axis=0)
        if tl.where(use_k, top_k <= number, mass_few.to(tl.float64) >= mass.to(tl.float64) * share):
            if use_k:
                limit = tl.minimum(limit, _search_few(few, INFINITE, wanted_k, False))
                mass = tl.sum(_weights(few, limit, True), axis=0)
            if use_p:
                limit = tl.minimum(limit, _search_few(few, limit, mass.to(tl.float64) * share, True))
        else:
            if use_k:
                limit = tl.minimum(limit, _search_row(row, top, temperature, INFINITE, wanted_k, V, False))
                mass = _total(row, top, temperature, limit, V, True)
            if use_p:
                wanted = mass.to(tl.float64) * share
                limit = tl.minimum(limit, _search_row(row, top, temperature, limit, wanted, V, True))
    tl.store(limits + m, limit)


def limits(logits_MV: Tensor, tops: Tensor, params: RowParams, pieces: int, piece: int) -> Tensor:
    """The bits of each row's largest kept |d|, int32 [M]. `tops` [M, pieces]: largest logits."""
    rows, width = logits_MV.shape
    counts = tops.new_empty(rows, pieces, BINS.value, dtype=torch.int32)
    masses = tops.new_empty(rows, pieces, dtype=torch.int64)
    spare = tops.new_empty(rows, CANDIDATES.value)
    out_M = tops.new_empty(rows, dtype=torch.int32)
    filters = (params.temperature_M, params.top_k_M, params.top_p_M, params.min_p_M)
    given = (logits_MV, tops, *filters)
    size = {"V": width, "PIECES": pieces, "POW": power_of_two(pieces), **pdl(logits_MV)}
    counts_kernel[(rows, pieces)](*given, counts, masses, **size, PIECE=piece, num_warps=8)
    aside_kernel[(rows, pieces)](*given, counts, spare, **size, PIECE=piece, num_warps=8)
    threshold_kernel[(rows,)](*given, counts, masses, spare, out_M, **size, num_warps=32)
    return out_M
