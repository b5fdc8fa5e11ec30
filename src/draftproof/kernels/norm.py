"""RMS norm, alone and after a residual addition: torch twins and compiled versions.

Shapes: T rows, H width, P pieces of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
