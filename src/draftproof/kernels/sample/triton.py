"""Law 1's `sample` in Triton: a maximum per row, a threshold if filters are set, then noise and argmax.

Maxima, counts and fixed-point masses do not depend on the order of their computation, so a row's token does not depend
on how its columns are split. The launch depends on V alone.
Shapes: M rows, V columns, P pieces of a row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.kernels.sample.triton_threshold import COLUMNS, FLOATS, limits
from draftproof.runtime.triton.launch import dense, on, pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

PIECE, BLOCK = 4096, 1024
WIDEST = 1 << 18  # columns; masses are summed in 64 bits

UNIT = tl.constexpr(2.0**-32)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
NOBODY = tl.constexpr((1 << 63) - 1)  # greater than every id


@triton.jit
def _mix(word):
    """`noise.mix` on unsigned 32-bit words."""
    word = word ^ (word >> 16)
    word = word * tl.full((), 0x7FEB352D, tl.uint32)
    word = word ^ (word >> 15)
    word = word * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def _key(seed, position, START: tl.constexpr):
    """One lane of a row's key: `noise.absorb` of (seed, seed >> 32, position)."""
    step = tl.full((), 0x9E3779B9, tl.uint32)
    state = _mix(seed.to(tl.uint32) ^ tl.full((), START, tl.uint32))
    state = _mix((state + step) ^ (seed >> 32).to(tl.uint32))
    return _mix((state + step) ^ position.to(tl.uint32))


@triton.jit
def _gumbel(id_V, key_a, key_b):
    """Gumbel noise of each id. log1p(-u) is log(w) * -u / (w - 1) with w = 1 - u rounded, which is accurate near 0
    too.
    """
    bits = _mix(_mix(id_V.to(tl.uint32) ^ key_a) ^ key_b)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * UNIT, BELOW_ONE)
    w = 1.0 - u
    small = w == 1.0
    e = tl.where(small, u, tl.log(w) * tl.math.div_rn(u, tl.where(small, 1.0, w - 1.0)))
    return -tl.log(e)


@triton.jit(do_not_specialize_on_alignment=["logits"])
def _top_kernel(
    logits, tops, V: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The largest logit of each piece; +inf if it contains NaN."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    v = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * V + v, mask=v < V, other=-float("inf"))
    broken = tl.max((x != x).to(tl.int32), axis=0)
    top = tl.max(tl.where(x == x, x, -float("inf")), axis=0)
    tl.store(tops + row * PIECES + piece, tl.where(broken > 0, float("inf"), top))


@triton.jit(do_not_specialize_on_alignment=["logits", "temperatures", "seeds", "positions", "ids"])
def _draw_kernel(
    logits, tops, temperatures, limits, seeds, positions, ids, best_scores, best_ids,
    V: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, POW: tl.constexpr,
    MAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score of each piece and the lowest id that has it."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    p = tl.arange(0, POW)
    top = tl.max(tl.load(tops + row * PIECES + p, mask=p < PIECES, other=-float("inf")), axis=0)
    temperature = tl.load(temperatures + row * FLOATS)
    limit = tl.load(limits + row)
    seed = tl.load(seeds + row * COLUMNS)
    position = tl.load(positions + row)
    key_a = _key(seed, position, 0x9E3779B9)
    key_b = _key(seed, position, 0x85EBCA77)
    best_V = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id_V = tl.full((BLOCK,), NOBODY, tl.int64)
    for start in range(0, PIECE, BLOCK):
        v = piece * PIECE + start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * V + v, mask=v < V, other=-float("inf"))
        id_V = v.to(tl.int64)
        if MAPPED:
            id_V = tl.load(ids + v, mask=v < V, other=NOBODY)
        score_V = x - top
        if temperature > 0:
            d_V = tl.math.div_rn(score_V, temperature)
            kept = tl.abs(d_V).to(tl.int32, bitcast=True) <= limit
            score_V = tl.where(kept, d_V + _gumbel(id_V, key_a, key_b), -float("inf"))
        wins = (score_V > best_V) | ((score_V == best_V) & (id_V < best_id_V) & (v < V))
        best_V = tl.where(wins, score_V, best_V)
        best_id_V = tl.where(wins, id_V, best_id_V)
    best = tl.max(best_V, axis=0)
    tl.store(best_scores + row * PIECES + piece, best)
    tl.store(best_ids + row * PIECES + piece, tl.min(tl.where(best_V == best, best_id_V, NOBODY), axis=0))


@triton.jit
def _winner_kernel(
    tops, best_scores, best_ids, failures, tokens,
    PIECES: tl.constexpr, POW: tl.constexpr, FAILS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The row's token; if its largest logit is not finite, its entry in `failures`, or -1."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, POW)
    inside = p < PIECES
    top = tl.max(tl.load(tops + row * PIECES + p, mask=inside, other=-float("inf")), axis=0)
    score_P = tl.load(best_scores + row * PIECES + p, mask=inside, other=-float("inf"))
    id_P = tl.load(best_ids + row * PIECES + p, mask=inside, other=NOBODY)
    token = tl.min(tl.where(score_P == tl.max(score_P, axis=0), id_P, NOBODY), axis=0)
    failure = tl.full((), -1, tl.int64)
    if FAILS:
        failure = tl.load(failures + row)
    tl.store(tokens + row, tl.where(tl.abs(top) < float("inf"), token, failure))


def sample(
    logits_MV: Tensor,
    params: RowParams,
    positions_M: Tensor,
    ids_V: Tensor | None,
    failures_M: Tensor | None = None,
) -> Tensor:
    """See `Sample`. Raises ValueError for more than WIDEST columns."""
    rows, width = logits_MV.shape
    if width > WIDEST:
        raise ValueError(f"logits_MV: {width} columns: at most {WIDEST} on a GPU")
    tokens_M = torch.empty(rows, dtype=torch.int64, device=logits_MV.device)
    if rows == 0:
        return tokens_M
    logits_MV = dense(logits_MV.float())
    pieces = triton.cdiv(width, PIECE)
    tops = logits_MV.new_empty(rows, pieces)
    scores = logits_MV.new_empty(rows, pieces)
    ids = tokens_M.new_empty(rows, pieces)
    params = RowParams(dense(params.packed_MC))
    size = {"V": width, "PIECES": pieces, "POW": power_of_two(pieces)}
    soon = pdl(logits_MV)
    with on(logits_MV):
        _top_kernel[(rows, pieces)](logits_MV, tops, V=width, PIECES=pieces, PIECE=PIECE, **soon, num_warps=8)
        limits_M = limits(logits_MV, tops, params, pieces, PIECE)
        _draw_kernel[(rows, pieces)](
            logits_MV,
            tops,
            params.temperature_M,
            limits_M,
            params.seeds_M,
            positions_M.long().contiguous(),
            tokens_M if ids_V is None else ids_V.long().contiguous(),
            scores,
            ids,
            **size,
            **soon,
            PIECE=PIECE,
            BLOCK=BLOCK,
            MAPPED=ids_V is not None,
            num_warps=4,
        )
        _winner_kernel[(rows,)](
            tops,
            scores,
            ids,
            tokens_M if failures_M is None else failures_M,
            tokens_M,
            PIECES=pieces,
            POW=size["POW"],
            FAILS=failures_M is not None,
            **soon,
            num_warps=1,
        )
    return tokens_M
