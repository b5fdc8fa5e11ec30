"""The gated activation of an MLP, and the soft cap on logits.

Shapes: T rows, I intermediate width, M rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# gelu(x) = x (1 + tanh(c (x + a x^3))) / 2 = x / (1 + exp(-2 c x (1 + a x^2))), c = sqrt(2 / pi)
GELU_SLOPE = 1.5957691216057308  # 2 c
GELU_CUBE = 0.044715  # a
# tanh(u) = u + u^3 P(u^2) below TANH_SMALL, highest power first; beyond it (1 - e) / (1 + e), e = exp(-2 u)
TANH_SMALL = 0.625
TANH_TERMS = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def silu_mul_torch(gate_up_TI2: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:] in fp32, returned in x's dtype: [T, 2I] -> [T, I].

    Written out as x / (1 + exp(-x)): torch's own silu treats the end of each thread's slice differently.
    """
    gate_TI, up_TI = gate_up_TI2.float().chunk(2, dim=-1)
    return (gate_TI / (1.0 + torch.exp(-gate_TI)) * up_TI).to(gate_up_TI2.dtype)


def gelu_mul_torch(gate_up_TI2: Tensor) -> Tensor:
    """gelu(x[:, :I]) * x[:, I:] by the formula with tanh, in fp32, returned in x's dtype: [T, 2I] -> [T, I]."""
    gate_TI, up_TI = gate_up_TI2.float().chunk(2, dim=-1)
    slope_TI = GELU_SLOPE * gate_TI * (1.0 + GELU_CUBE * (gate_TI * gate_TI))
    return (gate_TI / (1.0 + torch.exp(-slope_TI)) * up_TI).to(gate_up_TI2.dtype)


def soft_cap_torch(logits_MV: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap): fp32 [M, V], new."""
    u_MV = logits_MV / cap
    square_MV = u_MV * u_MV
    terms_MV = torch.full_like(u_MV, TANH_TERMS[0])
    for term in TANH_TERMS[1:]:
        terms_MV = terms_MV * square_MV + term
    small_MV = u_MV + u_MV * square_MV * terms_MV
    e_MV = torch.exp(-2.0 * u_MV.abs())
    large_MV = torch.copysign((1.0 - e_MV) / (1.0 + e_MV), u_MV)
    return cap * torch.where(u_MV.abs() < TANH_SMALL, small_MV, large_MV)
