"""RMS norm in C++, alone and after a residual addition.

Shapes: T rows, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.norm.reference import add_rms_norm_torch, rms_norm_torch
from draftproof.runtime.native import DTYPE_CODES, Library


class NormsCompiled:
    """`RMSNorm` and `AddRMSNorm` in C++; unsupported dtypes use the torch references."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_norm", "5P5qd")

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        codes = DTYPE_CODES.get(x_TH.dtype), DTYPE_CODES.get(weight_H.dtype)
        if None in codes:
            return rms_norm_torch(x_TH, weight_H, eps)
        x_TH = x_TH.contiguous()
        out_TH = torch.empty_like(x_TH)
        at = x_TH.data_ptr(), 0, weight_H.data_ptr(), out_TH.data_ptr(), 0
        self._run(self._pack(*at, *x_TH.shape, *codes, torch.get_num_threads(), eps))
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
        self._run(self._pack(*at, *x_TH.shape, *codes, torch.get_num_threads(), eps))
        return out_TH, sum_TH
