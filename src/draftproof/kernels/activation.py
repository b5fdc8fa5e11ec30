"""The gated activation of an MLP: torch twin and compiled version.

Shapes: T rows, I intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.native import DTYPE_CODES, Library


def silu_mul_torch(gate_up_TI2: Tensor) -> Tensor:
    """silu(x[:, :I]) * x[:, I:] in fp32, returned in x's dtype: [T, 2I] -> [T, I].

    Written out as x / (1 + exp(-x)): torch's own silu treats the end of each thread's slice differently.
    """
    gate_TI, up_TI = gate_up_TI2.float().chunk(2, dim=-1)
    return (gate_TI / (1.0 + torch.exp(-gate_TI)) * up_TI).to(gate_up_TI2.dtype)


class SiluMulCompiled:
    """`ops.SiluMul` in C++; dtypes it does not know go to the twin."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_silu_mul", "2P4q")

    def __call__(self, gate_up_TI2: Tensor) -> Tensor:
        code = DTYPE_CODES.get(gate_up_TI2.dtype)
        if code is None:
            return silu_mul_torch(gate_up_TI2)
        gate_up_TI2 = gate_up_TI2.contiguous()
        rows, width = gate_up_TI2.shape
        out_TI = gate_up_TI2.new_empty(rows, width // 2)
        out_at, threads = out_TI.data_ptr(), torch.get_num_threads()
        self._run(self._pack(gate_up_TI2.data_ptr(), out_at, rows, width // 2, code, threads), out_TI)
        return out_TI
