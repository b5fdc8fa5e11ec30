"""The gated activation and the soft cap in C++.

Shapes: T rows, I intermediate width, M rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.activation.reference import gelu_mul_torch, silu_mul_torch
from draftproof.runtime.native import DTYPE_CODES, Library


class GateMulCompiled:
    """`GateMul` in C++, with silu or gelu; unsupported dtypes use the torch reference."""

    def __init__(self, library: Library, *, gelu: bool) -> None:
        self._run, self._pack = library.packed("dp_gate_mul", "2P5q")
        self._gelu = gelu

    def __call__(self, gate_up_TI2: Tensor) -> Tensor:
        code = DTYPE_CODES.get(gate_up_TI2.dtype)
        if code is None:
            return (gelu_mul_torch if self._gelu else silu_mul_torch)(gate_up_TI2)
        gate_up_TI2 = gate_up_TI2.contiguous()
        rows, width = gate_up_TI2.shape
        out_TI = gate_up_TI2.new_empty(rows, width // 2)
        out_at = out_TI.data_ptr()
        threads = torch.get_num_threads()
        args = self._pack(gate_up_TI2.data_ptr(), out_at, rows, width // 2, code, self._gelu, threads)
        self._run(args)
        return out_TI


class SoftCapCompiled:
    """`SoftCap` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_soft_cap", "2P2qd")

    def __call__(self, logits_MV: Tensor, cap: float) -> Tensor:
        if logits_MV.dtype != torch.float32:
            raise ValueError(f"logits_MV: dtype {logits_MV.dtype}: must be float32")
        logits_MV = logits_MV.contiguous()
        out_MV = torch.empty_like(logits_MV)
        threads = torch.get_num_threads()
        args = self._pack(logits_MV.data_ptr(), out_MV.data_ptr(), logits_MV.numel(), threads, cap)
        self._run(args)
        return out_MV
