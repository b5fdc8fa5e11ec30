"""Moving rows on a GPU. torch's operators are just as exact, but do not use PDL.

Shapes: T rows, V rows of a table, H width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.rows.reference import concat_torch
from draftproof.runtime.triton.launch import on, pdl
from draftproof.runtime.triton.pdl import begin

BLOCK = 1024


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["table", "index", "out"])
def _gather_kernel(table, index, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy BLOCK columns of one row."""
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.maximum(tl.load(index + t), 0).to(tl.int64)
    tl.store(out + t * width + h, tl.load(table + v * width + h, mask=h < width), mask=h < width)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["a", "b", "c", "out"])
def _concat_kernel(a, b, c, out, width, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy BLOCK columns of one row of each part."""
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = out + t * PARTS * width + h
    here = h < width
    tl.store(at, tl.load(a + t * width + h, mask=here), mask=here)
    tl.store(at + width, tl.load(b + t * width + h, mask=here), mask=here)
    if PARTS == 3:
        tl.store(at + 2 * width, tl.load(c + t * width + h, mask=here), mask=here)


def gather(table_VH: Tensor, index_T: Tensor) -> Tensor:
    """`rows.gather_torch`."""
    table_VH = table_VH.contiguous()
    index_T = index_T.contiguous()
    rows = len(index_T)
    width = table_VH.shape[1]
    out_TH = table_VH.new_empty(rows, width)
    if out_TH.numel():
        with on(table_VH):
            _gather_kernel[(rows, triton.cdiv(width, BLOCK))](
                table_VH, index_T, out_TH, width, BLOCK=BLOCK, **pdl(table_VH)
            )
    return out_TH


def concat(parts: Sequence[Tensor]) -> Tensor:
    """`rows.concat_torch`; two or three matrices of one shape are the usual case."""
    alike = len(parts) in (2, 3) and len({(part.shape, part.dtype) for part in parts}) == 1
    if not alike or not parts[0].numel() or parts[0].dim() != 2:
        return concat_torch(parts)
    a, b, *rest = [part.contiguous() for part in parts]
    rows, width = a.shape
    out_TX = torch.empty((rows, width * len(parts)), dtype=a.dtype, device=a.device)
    with on(a):
        _concat_kernel[(rows, triton.cdiv(width, BLOCK))](
            a, b, rest[0] if rest else b, out_TX, width, PARTS=len(parts), BLOCK=BLOCK, **pdl(a)
        )
    return out_TX
