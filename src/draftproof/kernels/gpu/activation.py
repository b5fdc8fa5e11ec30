"""The gated activation of an MLP in Triton. Each element is computed alone.

Shapes: T rows, I intermediate width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.gpu.early import begin
from draftproof.kernels.gpu.launch import dense, early, on

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # noqa: E741
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    gate = tl.load(gate_up + row * 2 * I + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + i, mask=inside, other=0.0).to(tl.float32)
    y = tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(out + row * I + i, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """See `ops.SiluMul`."""
    gate_up_TI2 = dense(gate_up_TI2)
    rows, width = gate_up_TI2.shape
    out_TI = gate_up_TI2.new_empty(rows, width // 2)
    if rows:
        with on(out_TI):
            grid = (rows, triton.cdiv(width // 2, BLOCK))
            _silu_mul_kernel[grid](
                gate_up_TI2, out_TI, I=width // 2, BLOCK=BLOCK, **early(out_TI), num_warps=4
            )
    return out_TI
