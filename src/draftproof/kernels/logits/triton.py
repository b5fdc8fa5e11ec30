"""The normalizer of a row of logits in Triton: pieces of a fixed size, added in a fixed order.

Shapes: M rows, V vocabulary, P pieces of a row.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.runtime.triton.launch import dense, on, power_of_two

PIECE = 4096


@triton.jit
def _finite(x):
    """`x`, or 0 where it is infinite: used as a shift, it leaves infinities unchanged."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def _pieces_kernel(logits, tops, sums, V: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    v = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row * V + v, mask=v < V, other=-float("inf"))
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - _finite(top)), axis=0)
    tl.store(tops + row * PIECES + piece, top)
    tl.store(sums + row * PIECES + piece, total)


@triton.jit
def _combine_kernel(tops, sums, out, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    top_P = tl.load(tops + row * PIECES + p, mask=p < PIECES, other=-float("inf"))
    sum_P = tl.load(sums + row * PIECES + p, mask=p < PIECES, other=0.0)
    shift = _finite(tl.max(top_P, axis=0))
    total = tl.sum(sum_P * tl.exp(_finite(top_P) - shift), axis=0)
    tl.store(out + row, tl.log(total) + shift)


def log_normalizer(logits_MV: Tensor) -> Tensor:
    """See `LogNormalizer`. Raises ValueError for logits that are not fp32."""
    if logits_MV.dtype != torch.float32:
        raise ValueError(f"logits_MV: dtype {logits_MV.dtype}: must be float32")
    logits_MV = dense(logits_MV)
    rows, width = logits_MV.shape
    out_M = logits_MV.new_empty(rows)
    if rows == 0:
        return out_M
    pieces = triton.cdiv(width, PIECE)
    tops = logits_MV.new_empty(rows, pieces)
    sums = logits_MV.new_empty(rows, pieces)
    with on(logits_MV):
        _pieces_kernel[(rows, pieces)](
            logits_MV, tops, sums, V=width, PIECES=pieces, PIECE=PIECE, num_warps=8
        )
        _combine_kernel[(rows,)](tops, sums, out_M, PIECES=pieces, BLOCK=power_of_two(pieces), num_warps=1)
    return out_M
