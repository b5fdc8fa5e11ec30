"""The product with fp8 weights: read as they are, widened in registers to the rows' dtype, added up in fp32.

For drafters, which are exempt from exactness: no certificates, and a tile picked by the number of rows.
Shapes: T rows, K inputs, N outputs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftproof.kernels.gpu.launch import dense, early, on, shared_bytes
from draftproof.kernels.gpu.linear import Tile, early_lines, prefetch

# (up to so many rows, tile), the last for any number. `bench/gpu_kernels.py fp8` times candidates. Not measured yet.
MANY = 1 << 62
TILES_HALF = (
    (16, Tile(16, 32, 512, 4, 4)),
    (32, Tile(32, 32, 256, 5, 4)),
    (64, Tile(64, 64, 128, 5, 4, True)),
    (128, Tile(64, 128, 128, 4, 8)),
    (MANY, Tile(128, 128, 64, 4, 8)),
)
TILES_WIDE = ((16, Tile(16, 32, 128, 3, 4)), (MANY, Tile(64, 64, 32, 3, 4)))


def tiles(dtype: torch.dtype) -> tuple[tuple[int, Tile], ...]:
    return TILES_WIDE if dtype == torch.float32 else TILES_HALF


def tile_of(rows: int, dtype: torch.dtype) -> Tile:
    """The tile for so many rows of `dtype`."""
    return next(tile for most, tile in tiles(dtype) if rows <= most)


def _widening(shift: int, mask: str, factor: str, pair: str) -> tl.constexpr:
    """PTX for four bytes: the 7 bits below the sign, moved to the top of a wider format's mantissa and exponent, are
    the value but for a power of two, subnormals too. A processor's own conversion to bf16 is slower than its memory."""
    return tl.constexpr(f"""{{
        .reg .b32 two<2>, low<2>, factor, zero;
        mov.b32 factor, {factor}; mov.b32 zero, 0x80008000;
        prmt.b32 two0, 0, $2, 0x5040; prmt.b32 two1, 0, $2, 0x7060;
        shr.u32 low0, two0, {shift}; shr.u32 low1, two1, {shift};
        and.b32 low0, low0, {mask}; and.b32 low1, low1, {mask};
        lop3.b32 low0, two0, 0x80008000, low0, 0xea; lop3.b32 low1, two1, 0x80008000, low1, 0xea;
        fma.rn.{pair} $0, low0, factor, zero; fma.rn.{pair} $1, low1, factor, zero;
    }}""")


_TO_BF16 = _widening(4, "0x07f007f0", "0x7b807b80", "bf16x2")  # times 2^120
_TO_FP16 = _widening(1, "0x3f803f80", "0x5c005c00", "f16x2")  # times 2^8


@triton.jit
def _widen(w, dtype: tl.constexpr, ASM: tl.constexpr):
    """e4m3, given as bytes, in `dtype`. ASM: quickly, but not in the interpreter, nor to fp32."""
    if ASM:
        if dtype == tl.bfloat16:
            wide = tl.inline_asm_elementwise(_TO_BF16, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4)
        else:
            wide = tl.inline_asm_elementwise(_TO_FP16, "=r,=r,r", [w], tl.float16, is_pure=True, pack=4)
    else:
        bits = w.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        wide = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(dtype)
    return wide


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _scaled_product_kernel(
    x, weight, scale, bias, out, rows, outputs, inputs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A tile of rows and outputs; the weight is given as bytes. EVEN: K is a multiple of BK. SWAP: the weight takes the
    matrix unit's longer side."""
    tiles_m = tl.cdiv(rows, BM)  # neighbours share a visit to the weight
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    m, n, k = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    mask_m, mask_n = m < rows, n < outputs
    if EARLY:
        # Started before the kernel ahead has ended: what does not depend on it, the weight, is fetched meanwhile.
        gdc_launch_dependents()
        if tiles_m == 1:
            prefetch(weight, n, 0, outputs, inputs, LINES)
        gdc_wait()
    # Past the end, the last output's weight is read and the result not stored.
    at_x = x + m.to(tl.int64)[:, None] * inputs + k[None, :]
    at_w = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + k[None, :]
    if SWAP:  # noqa: SIM108  the two differ in shape
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inputs, BK):
        if EVEN:
            x_MK, w_NK = tl.load(at_x, mask=mask_m[:, None], other=0.0), tl.load(at_w)
        else:
            within = (start + k < inputs)[None, :]
            x_MK = tl.load(at_x, mask=mask_m[:, None] & within, other=0.0)
            w_NK = tl.load(at_w, mask=within, other=0)
        w_NK = _widen(w_NK, x_MK.dtype, ASM)
        if SWAP:
            sums = tl.dot(w_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
        at_x += BK
        at_w += BK
    if SWAP:
        sums = tl.trans(sums)
    sums *= tl.load(scale + n, mask=mask_n, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    at_out = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def product(
    x_TK: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """x @ weight.T * scale + bias, any T: [T, N]. `tile` None: `tile_of`'s. The weight is dense, in e4m3."""
    x_TK = dense(x_TK)
    rows, (outputs, inputs) = x_TK.shape[0], weight_NK.shape
    tile = tile or tile_of(rows, x_TK.dtype)
    out_TN = torch.empty((rows, outputs), dtype=out_dtype, device=x_TK.device)
    if rows == 0:
        return out_TN
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    bias = scale_N if bias_N is None else bias_N
    stage_bytes = (tile.rows * x_TK.element_size() + tile.outputs) * tile.inputs
    with on(x_TK):
        _scaled_product_kernel[(programs,)](
            *(x_TK, weight_NK.view(torch.uint8), scale_N, bias, out_TN, rows, outputs, inputs),
            BM=tile.rows,
            BN=tile.outputs,
            BK=tile.inputs,
            SWAP=tile.swap,
            BIAS=bias_N is not None,
            EVEN=inputs % tile.inputs == 0,
            ASM=x_TK.is_cuda and x_TK.dtype != torch.float32,
            LINES=early_lines(tile, weight_NK),
            **early(x_TK),
            num_stages=min(tile.stages, shared_bytes(x_TK.device) // stage_bytes),
            num_warps=tile.warps,
        )
    return out_TN
