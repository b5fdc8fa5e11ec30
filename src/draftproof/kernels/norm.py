"""RMS norm, alone and after a residual addition: torch twins and compiled versions.

Shapes: T rows, H width, P pieces of a row.
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


def add_rms_norm_torch(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H] in x's dtype and new."""
    sum_TH = (x_TH.float() + residual_TH.float()).to(x_TH.dtype)
    return rms_norm_torch(sum_TH, weight_H, eps), sum_TH


class RMSNormCompiled:
    """`ops.RMSNorm` in C++; dtypes it does not know go to the twin."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_norm", "5P5qd")

    def __call__(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        code, weight_code = DTYPE_CODES.get(x_TH.dtype), DTYPE_CODES.get(weight_H.dtype)
        if code is None or weight_code is None:
            return rms_norm_torch(x_TH, weight_H, eps)
        x_TH = x_TH.contiguous()
        out_TH = torch.empty_like(x_TH)
        rows, width = x_TH.shape
        args = self._pack(
            x_TH.data_ptr(),
            0,
            weight_H.data_ptr(),
            out_TH.data_ptr(),
            0,
            rows,
            width,
            code,
            weight_code,
            torch.get_num_threads(),
            eps,
        )
        self._run(args, out_TH)
        return out_TH


class AddRMSNormCompiled:
    """`ops.AddRMSNorm` in C++; dtypes it does not know go to the twin."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_norm", "5P5qd")

    def __call__(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        code, weight_code = DTYPE_CODES.get(x_TH.dtype), DTYPE_CODES.get(weight_H.dtype)
        if code is None or weight_code is None or residual_TH.dtype != x_TH.dtype:
            return add_rms_norm_torch(x_TH, residual_TH, weight_H, eps)
        x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
        out_TH, sum_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
        rows, width = x_TH.shape
        args = self._pack(
            x_TH.data_ptr(),
            residual_TH.data_ptr(),
            weight_H.data_ptr(),
            out_TH.data_ptr(),
            sum_TH.data_ptr(),
            rows,
            width,
            code,
            weight_code,
            torch.get_num_threads(),
            eps,
        )
        self._run(args, out_TH, sum_TH)
        return out_TH, sum_TH
