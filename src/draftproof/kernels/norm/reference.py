"""RMS norm, alone and after a residual addition.

Shapes: T rows, H width, S partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.sums import row_sum


def normalize(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; fp32 in, fp32 out."""
    mean_T1 = row_sum(x_TH * x_TH) / x_TH.shape[-1]
    # sqrt and division are correctly rounded everywhere; torch's vectorised rsqrt is not for every dtype.
    return x_TH * (1.0 / torch.sqrt(mean_T1 + eps)) * weight_H.float()


def rms_norm_torch(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, returned in x's dtype: [T, H] -> [T, H]."""
    return normalize(x_TH.float(), weight_H, eps).to(x_TH.dtype)


def add_parts_torch(parts_STH: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 partial sums [S, T, H], added first to last and rounded: [T, H]."""
    total_TH = torch.zeros_like(parts_STH[0])
    for part_TH in parts_STH:
        total_TH += part_TH
    return total_TH.to(dtype)


def add_rms_norm_torch(
    x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new [T, H] in the residual's dtype; x is [T, H] or its partial
    sums.
    """
    if x_TH.dim() == 3:
        x_TH = add_parts_torch(x_TH, residual_TH.dtype)
    sum_TH = (x_TH.float() + residual_TH.float()).to(x_TH.dtype)
    return rms_norm_torch(sum_TH, weight_H, eps), sum_TH
