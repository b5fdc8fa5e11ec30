"""RMS norm, alone and after a residual addition: torch twins and compiled versions.

Shapes: T rows, H width, S parts of a sum, P pieces of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.kernels.native import DTYPE_CODES, Library

# A row is summed in pieces of this many elements: torch sums such short rows in an order that depends on neither the
# number of rows nor the number of threads, which it does not promise for long ones.
PIECE = 64


def row_sum(x_TH: Tensor) -> Tensor:
    """Sum over the last dimension in two stages of a fixed order: [..., H] fp32 -> [..., 1] fp32."""
    width = x_TH.shape[-1]
    if width > PIECE:
        if width % PIECE:
            x_TH = F.pad(x_TH, (0, -width % PIECE))
        x_TH = x_TH.contiguous().unflatten(-1, (-1, PIECE)).sum(-1)
        return row_sum(x_TH)
    return x_TH.contiguous().sum(-1, keepdim=True)


def normalize(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; fp32 in, fp32 out."""
    mean_T1 = row_sum(x_TH * x_TH) / x_TH.shape[-1]
    # sqrt and division are correctly rounded everywhere; torch's vectorised rsqrt is not in every dtype.
    return x_TH * (1.0 / torch.sqrt(mean_T1 + eps)) * weight_H.float()


def rms_norm_torch(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, returned in x's dtype: [T, H] -> [T, H]."""
    return normalize(x_TH.float(), weight_H, eps).to(x_TH.dtype)


def add_parts_torch(parts_STH: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 parts [S, T, H], added first to last and rounded: [T, H]."""
    total_TH = torch.zeros_like(parts_STH[0])
    for part_TH in parts_STH:
        total_TH += part_TH
    return total_TH.to(dtype)


def add_rms_norm_torch(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H] in the residual's dtype and new; x [T, H] or parts of it."""
    if x_TH.dim() == 3:
        x_TH = add_parts_torch(x_TH, residual_TH.dtype)
    sum_TH = (x_TH.float() + residual_TH.float()).to(x_TH.dtype)
    return rms_norm_torch(sum_TH, weight_H, eps), sum_TH


class NormsCompiled:
    """`ops.RMSNorm` and `ops.AddRMSNorm` in C++; dtypes it does not know go to the twins."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_norm", "5P5qd")

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        codes = DTYPE_CODES.get(x_TH.dtype), DTYPE_CODES.get(weight_H.dtype)
        if None in codes:
            return rms_norm_torch(x_TH, weight_H, eps)
        x_TH = x_TH.contiguous()
        out_TH = torch.empty_like(x_TH)
        at = x_TH.data_ptr(), 0, weight_H.data_ptr(), out_TH.data_ptr(), 0
        self._run(self._pack(*at, *x_TH.shape, *codes, torch.get_num_threads(), eps), out_TH)
        return out_TH

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        codes = DTYPE_CODES.get(x_TH.dtype), DTYPE_CODES.get(weight_H.dtype)
        if None in codes or residual_TH.dtype != x_TH.dtype or x_TH.dim() == 3:
            return add_rms_norm_torch(x_TH, residual_TH, weight_H, eps)
        x_TH = x_TH.contiguous()
        residual_TH = residual_TH.contiguous()
        out_TH = torch.empty_like(x_TH)
        sum_TH = torch.empty_like(x_TH)
        at = (t.data_ptr() for t in (x_TH, residual_TH, weight_H, out_TH, sum_TH))
        self._run(self._pack(*at, *x_TH.shape, *codes, torch.get_num_threads(), eps), out_TH, sum_TH)
        return out_TH, sum_TH
