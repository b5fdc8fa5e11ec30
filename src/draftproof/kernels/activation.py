"""The gated activation of an MLP: torch twin and compiled version.

Shapes: T rows, I intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul_torch(gate_up_TI2: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:] in fp32, returned in x's dtype: [T, 2I] -> [T, I].

    Written out as x / (1 + exp(-x)): torch's own silu treats the end of each thread's slice differently.
    """
    gate_TI, up_TI = gate_up_TI2.float().chunk(2, dim=-1)
    return (gate_TI / (1.0 + torch.exp(-gate_TI)) * up_TI).to(gate_up_TI2.dtype)
