"""RMS norm in Triton, alone and after a residual addition: one program per row; the launch depends on the width only.

Shapes: T rows, H width, S partial sums.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.runtime.triton.launch import dense, on, pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

PER_WARP = 512  # elements of a row


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, residual, weight, out, total, eps, rows,
    H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The norm of one row, with ADD of its sum with the residual. PARTS: x is [PARTS, T, H], to be added first to last;
    0: x is [T, H].
    """
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BLOCK)
    inside = h < H
    weight_H = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)  # no pass writes it
    begin(PDL)
    if PARTS:
        x_H = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            below = tl.cast(part * rows, tl.int64) * H
            x_H += tl.load(x + below + row + h, mask=inside, other=0.0)
        x_H = x_H.to(total.dtype.element_ty).to(tl.float32)
    else:
        x_H = tl.load(x + row + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x_H += tl.load(residual + row + h, mask=inside, other=0.0).to(tl.float32)
        rounded_H = x_H.to(total.dtype.element_ty)
        tl.store(total + row + h, rounded_H, mask=inside)
        x_H = rounded_H.to(tl.float32)
    mean = tl.sum(x_H * x_H, axis=0) * (1.0 / H)
    y_H = x_H * (1.0 / tl.sqrt_rn(mean + eps)) * weight_H
    tl.store(out + row + h, y_H.to(out.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """See `RMSNorm`."""
    x_TH = dense(x_TH)
    out_TH = torch.empty_like(x_TH)
    _launch(x_TH, None, weight_H, out_TH, out_TH, eps)
    return out_TH


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `AddRMSNorm`."""
    x_TH = dense(x_TH)
    residual_TH = dense(residual_TH)
    out_TH = torch.empty_like(residual_TH)
    total_TH = torch.empty_like(residual_TH)
    _launch(x_TH, residual_TH, weight_H, out_TH, total_TH, eps)
    return out_TH, total_TH


def _launch(
    x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, out_TH: Tensor, total_TH: Tensor, eps: float
) -> None:
    rows, width = out_TH.shape
    if rows == 0:
        return
    block = power_of_two(width)
    weight_dense_H = dense(weight_H)
    # The preceding kernel would make a copy of the weight, so it must be waited for.
    soon = pdl(x_TH) if weight_dense_H is weight_H else {"PDL": False}
    with on(x_TH):
        _norm_kernel[(rows,)](
            x_TH,
            x_TH if residual_TH is None else residual_TH,
            weight_dense_H,
            out_TH,
            total_TH,
            eps,
            rows=rows,
            H=width,
            BLOCK=block,
            ADD=residual_TH is not None,
            PARTS=len(x_TH) if x_TH.dim() == 3 else 0,
            **soon,
            num_warps=min(max(block // PER_WARP, 1), 16),
        )
