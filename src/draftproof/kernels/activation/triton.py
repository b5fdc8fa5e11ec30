"""The gated activation of an MLP and the soft cap on logits in Triton. Each element is computed alone.

Shapes: T rows, I intermediate width, M rows of logits, V vocabulary.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.runtime.triton.launch import dense, on, pdl
from draftproof.runtime.triton.pdl import begin

BLOCK = 1024


@triton.jit
def _gate_mul_kernel(
    gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr  # noqa: E741
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < I
    gate = tl.load(gate_up + row * 2 * I + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + i, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * (gate * gate))
    y = tl.math.div_rn(gate, 1.0 + tl.exp(-slope)) * up
    tl.store(out + row * I + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["cap"])
def _soft_cap_kernel(logits, out, cap, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    u = tl.math.div_rn(
        tl.load(logits + row * V + v, mask=inside, other=0.0), tl.zeros_like(v).to(tl.float32) + cap
    )
    size = tl.abs(u)
    square = u * u
    terms = -5.70498872745e-3 * square + 2.06390887954e-2
    terms = terms * square - 5.37397155531e-2
    terms = terms * square + 1.33314422036e-1
    terms = terms * square - 3.33332819422e-1
    e = tl.exp(-2.0 * size)
    large = tl.math.div_rn(1.0 - e, 1.0 + e)
    y = tl.where(size < 0.625, u + u * square * terms, tl.where(u < 0.0, -large, large))
    tl.store(out + row * V + v, cap * y, mask=inside)


def silu_mul(gate_up_TI2: Tensor) -> Tensor:
    """See `GateMul`."""
    return _gate_mul(gate_up_TI2, gelu=False)


def gelu_mul(gate_up_TI2: Tensor) -> Tensor:
    """See `GateMul`."""
    return _gate_mul(gate_up_TI2, gelu=True)


def _gate_mul(gate_up_TI2: Tensor, *, gelu: bool) -> Tensor:
    gate_up_TI2 = dense(gate_up_TI2)
    rows, width = gate_up_TI2.shape
    out_TI = gate_up_TI2.new_empty(rows, width // 2)
    if rows:
        with on(out_TI):
            grid = (rows, triton.cdiv(width // 2, BLOCK))
            _gate_mul_kernel[grid](
                gate_up_TI2, out_TI, I=width // 2, BLOCK=BLOCK, GELU=gelu, **pdl(out_TI), num_warps=4
            )
    return out_TI


def soft_cap(logits_MV: Tensor, cap: float) -> Tensor:
    """See `SoftCap`. Raises ValueError for logits that are not fp32."""
    if logits_MV.dtype != torch.float32:
        raise ValueError(f"logits_MV: dtype {logits_MV.dtype}: must be float32")
    logits_MV = dense(logits_MV)
    out_MV = torch.empty_like(logits_MV)
    rows, width = logits_MV.shape
    if rows:
        with on(out_MV):
            grid = (rows, triton.cdiv(width, BLOCK))
            _soft_cap_kernel[grid](logits_MV, out_MV, cap, V=width, BLOCK=BLOCK, num_warps=4)
    return out_MV
