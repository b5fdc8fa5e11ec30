"""RMS norm, alone and after a residual addition: interfaces and versions.

Shapes: T rows, H width, S partial sums.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.norm.compiled import NormsCompiled
from draftproof.kernels.norm.reference import add_rms_norm_torch, rms_norm_torch
from draftproof.kernels.versions import Versions


class RMSNorm(Protocol):
    def __call__(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight, computed in fp32, returned in x's dtype."""
        ...


class AddRMSNorm(Protocol):
    def __call__(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """residual' = x + residual (rounded to x's dtype); returns (rms_norm(residual'), residual'), both new.

        x_TH may be the result of `PackedLinear.partial_sums`: fp32 partial sums [S, T, H], which are added first to
        last and rounded to the residual's dtype. weight_H belongs to a model: on a GPU it may be read before the
        preceding kernel has finished.
        """
        ...


def _triton_rms_norm() -> RMSNorm:
    from draftproof.kernels.norm.triton import rms_norm

    return rms_norm


def _triton_add_rms_norm() -> AddRMSNorm:
    from draftproof.kernels.norm.triton import add_rms_norm

    return add_rms_norm


RMS_NORM: Versions[RMSNorm] = Versions(
    rms_norm_torch, compiled=lambda library: NormsCompiled(library).rms_norm, triton=_triton_rms_norm
)
ADD_RMS_NORM: Versions[AddRMSNorm] = Versions(
    add_rms_norm_torch,
    compiled=lambda library: NormsCompiled(library).add_rms_norm,
    triton=_triton_add_rms_norm,
)
