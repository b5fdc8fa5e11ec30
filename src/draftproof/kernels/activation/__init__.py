"""The gated activation of an MLP and the soft cap on logits: their interfaces and versions.

Shapes: T rows, I intermediate width, M rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.activation.compiled import GateMulCompiled, SoftCapCompiled
from draftproof.kernels.activation.reference import gelu_mul_torch, silu_mul_torch, soft_cap_torch
from draftproof.kernels.versions import Versions


class GateMul(Protocol):
    def __call__(self, gate_up_TI2: Tensor) -> Tensor:
        """act(x[:, :I]) * x[:, I:] in fp32, returned in x's dtype: [T, I]. act: silu, or gelu by its tanh formula."""
        ...


class SoftCap(Protocol):
    def __call__(self, logits_MV: Tensor, cap: float) -> Tensor:
        """cap * tanh(logits / cap): fp32 [M, V], new."""
        ...


def _triton_silu_mul() -> GateMul:
    from draftproof.kernels.activation.triton import silu_mul

    return silu_mul


def _triton_gelu_mul() -> GateMul:
    from draftproof.kernels.activation.triton import gelu_mul

    return gelu_mul


def _triton_soft_cap() -> SoftCap:
    from draftproof.kernels.activation.triton import soft_cap

    return soft_cap


SILU_MUL: Versions[GateMul] = Versions(
    silu_mul_torch, compiled=lambda library: GateMulCompiled(library, gelu=False), triton=_triton_silu_mul
)
GELU_MUL: Versions[GateMul] = Versions(
    gelu_mul_torch, compiled=lambda library: GateMulCompiled(library, gelu=True), triton=_triton_gelu_mul
)
SOFT_CAP: Versions[SoftCap] = Versions(soft_cap_torch, compiled=SoftCapCompiled, triton=_triton_soft_cap)
