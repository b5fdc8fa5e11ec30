"""The product with fp8 weights: rows rounded to fp8 as well, so that the matrix unit takes the bytes as they lie in
shared memory; or, on older processors, bytes widened in registers to the rows' dtype.

For drafters, which are exempt from exactness: no certificates, and a cut picked by the number of rows.
Shapes: T rows, K inputs, N outputs, S parts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftproof.kernels.gpu import linear
from draftproof.kernels.gpu.launch import dense, early, num_processors, on, shared_bytes
from draftproof.kernels.gpu.linear import Tile, early_lines, prefetch

LEAST_STEPS = 4  # of a part


@dataclass(frozen=True, slots=True)
class Cut:
    """One compiled form of the kernel. `narrow`: the rows are rounded to e4m3, with a scale for each of them and of the
    tile's `inputs`. `programs`: K is cut for about so many a multiprocessor, and a second kernel adds; 0: never."""

    tile: Tile
    narrow: bool = False
    programs: int = 0

    @property
    def name(self) -> str:
        kind, parts = "a8" if self.narrow else "a16", f" p{self.programs}" if self.programs else ""
        return f"{kind} {self.tile.name.removeprefix('triton ')}{parts}"

    def parts(self, rows: int, outputs: int, inputs: int, processors: int) -> tuple[int, int]:
        """(how many, the inputs of each but perhaps the last, a multiple of the tile's)."""
        steps, tile = triton.cdiv(inputs, self.tile.inputs), self.tile
        tiles = triton.cdiv(outputs, tile.outputs) * triton.cdiv(rows, tile.rows)
        wanted = min(round(self.programs * processors / tiles), steps // LEAST_STEPS)
        each = triton.cdiv(steps, max(wanted, 1))
        return triton.cdiv(steps, each), each * self.tile.inputs


# (up to so many rows, cut). The best on an H200 of those that `bench/gpu_kernels.py fp8` times. Rows are rounded in
# steps of `quantized.STEP` inputs.
MANY = 1 << 62
CUTS_HALF = (
    (16, Cut(Tile(16, 128, 128, 4, 8, True), True, 2)),
    (32, Cut(Tile(32, 128, 128, 3, 4, True), True, 2)),
    (MANY, Cut(Tile(64, 128, 128, 3, 8, True), True, 2)),
)
CUTS_WIDE = ((MANY, Cut(Tile(16, 64, 128, 2, 4, True), True, 2)),)


def cuts(dtype: torch.dtype) -> tuple[tuple[int, Cut], ...]:
    return CUTS_WIDE if dtype == torch.float32 else CUTS_HALF


def cut_of(rows: int, dtype: torch.dtype) -> Cut:
    """For so many rows of `dtype`."""
    return next(cut for most, cut in cuts(dtype) if rows <= most)


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


@triton.jit
def _to_e4m3(x, ASM: tl.constexpr):
    """fp32 below 256, rounded. ASM: by the processor. The interpreter's conversion only cuts off, so it gets numbers
    that e4m3 has."""
    if not ASM:
        bits = x.to(tl.int32, bitcast=True)
        kept = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (x + 1.5 * 2.0**14) - 1.5 * 2.0**14  # a multiple of 2^-9, as the subnormal numbers are
        x = tl.where(tl.abs(x) < 2.0**-6, small, kept)
    return x.to(tl.float8e4nv)


@triton.jit
def _add_dot(x_MK, w_NK, sums, SWAP: tl.constexpr, NARROW: tl.constexpr, ASM: tl.constexpr):
    """sums + x @ w.T; [BN, BM] if SWAP. NARROW: x rounded as `quantized.round_rows` does."""
    if NARROW:
        wide_MK = x_MK.to(tl.float32)
        size_M = tl.maximum(tl.max(tl.abs(wide_MK), axis=1), 1e-30)
        power_M = size_M.to(tl.int32, bitcast=True) & 0x7F800000
        inverse_M = (0x7F000000 - power_M).to(tl.float32, bitcast=True) * 128.0
        x_MK = _to_e4m3(wide_MK * inverse_M[:, None], ASM)
        size_M = power_M.to(tl.float32, bitcast=True) * 0.0078125
        if SWAP:
            sums += tl.dot(w_NK, tl.trans(x_MK)) * size_M[None, :]
        else:
            sums += tl.dot(x_MK, tl.trans(w_NK)) * size_M[:, None]
    else:
        w_NK = _widen(w_NK, x_MK.dtype, ASM)
        if SWAP:
            sums = tl.dot(w_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _scaled_product_kernel(
    x, weight, scale, bias, out, rows, outputs, inputs, segment,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, NARROW: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A tile of rows and outputs over `segment` inputs, of the second axis' programs each its own: out [S, T, N].

    The weight is given as bytes, or in e4m3 if NARROW. EVEN: K is a multiple of BK, as `segment` always is. SWAP: the
    weight takes the matrix unit's longer side.
    """
    tiles_m = tl.cdiv(rows, BM)  # neighbours share a visit to the weight
    tile_m, tile_n = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    m, n, k = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    mask_m, mask_n = m < rows, n < outputs
    first = tl.program_id(1) * segment
    last = tl.minimum(first + segment, inputs)
    if EARLY:
        # Started before the kernel ahead has ended: what does not depend on it, the weight, is fetched meanwhile.
        gdc_launch_dependents()
        if tiles_m == 1:
            prefetch(weight, n, first, outputs, inputs, LINES)
        gdc_wait()
    # Past the end, the last output's weight is read and the result not stored.
    at_x = x + m.to(tl.int64)[:, None] * inputs + (first + k)[None, :]
    at_w = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + (first + k)[None, :]
    if SWAP:  # noqa: SIM108  the two differ in shape
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    for start in range(first, last, BK):
        if EVEN:
            x_MK, w_NK = tl.load(at_x, mask=mask_m[:, None], other=0.0), tl.load(at_w)
        else:
            within = (start + k < inputs)[None, :]
            x_MK = tl.load(at_x, mask=mask_m[:, None] & within, other=0.0)
            w_NK = tl.load(at_w, mask=within, other=0.0)
        sums = _add_dot(x_MK, w_NK, sums, SWAP, NARROW, ASM)
        at_x += BK
        at_w += BK
    if SWAP:
        sums = tl.trans(sums)
    sums *= tl.load(scale + n, mask=mask_n, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * rows + m
    at_out = out + row[:, None] * outputs + n[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether its matrix unit takes e4m3; the interpreter's does. Elsewhere rows are not rounded."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def product(
    x_TK: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    cut: Cut | None = None,
) -> Tensor:
    """x @ weight.T * scale + bias, any T: [T, N]. `cut` None: `cut_of`'s. The weight is dense, in e4m3."""
    x_TK = dense(x_TK)
    rows, (outputs, inputs) = x_TK.shape[0], weight_NK.shape
    if rows == 0:
        return x_TK.new_empty((0, outputs), dtype=out_dtype)
    cut = cut or cut_of(rows, x_TK.dtype)
    tile, narrow = cut.tile, cut.narrow and has_fp8(x_TK.device)
    parts, segment = cut.parts(rows, outputs, inputs, num_processors(x_TK.device))
    sums_dtype, added_N = (torch.float32, None) if parts > 1 else (out_dtype, bias_N)
    sums_STN = torch.empty((parts, rows, outputs), dtype=sums_dtype, device=x_TK.device)
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    stage_bytes = (tile.rows * x_TK.element_size() + tile.outputs) * tile.inputs
    with on(x_TK):
        _scaled_product_kernel[(programs, parts)](
            *(x_TK, weight_NK if narrow else weight_NK.view(torch.uint8), scale_N),
            *(scale_N if added_N is None else added_N, sums_STN, rows, outputs, inputs, segment),
            BM=tile.rows,
            BN=tile.outputs,
            BK=tile.inputs,
            SWAP=tile.swap,
            NARROW=narrow,
            BIAS=added_N is not None,
            EVEN=inputs % tile.inputs == 0,
            ASM=x_TK.is_cuda and x_TK.dtype != torch.float32,
            LINES=early_lines(tile, weight_NK, parts),
            **early(x_TK),
            num_stages=min(tile.stages, shared_bytes(x_TK.device) // stage_bytes),
            num_warps=tile.warps,
        )
    return linear.add_parts(sums_STN, bias_N, out_dtype) if parts > 1 else sums_STN[0]
