"""The product with fp8 weights. Rows are rounded to fp8 as well, so that the matrix unit reads the bytes directly from
shared memory; bytes widened in registers would be no faster than a bf16 weight.

For drafters, which are exempt from exactness: no certificates, and the tile is chosen by the number of rows.
Shapes: T rows, K inputs, N outputs, S parts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.matmul.triton import linear
from draftproof.matmul.triton.linear import Tile, begin_product, place, prefetch_lines, store_tile
from draftproof.runtime.triton.launch import dense, num_processors, on, pdl, shared_bytes

LEAST_STEPS = 8  # minimum steps over K per part


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """One compiled variant of the kernel. Each row has a scale per `inputs` of the tile.

    `programs`: K is split into parts, which a second kernel adds, as long as that leaves at most this many programs per
    multiprocessor; 0: never.
    """

    tile: Tile
    programs: int = 0

    @property
    def name(self) -> str:
        return f"{self.tile.name.removeprefix('triton ')} p{self.programs}"

    def parts(self, rows: int, outputs: int, inputs: int, processors: int) -> tuple[int, int]:
        """(number of parts of K, inputs of each part but possibly the last: a multiple of the tile's)."""
        steps = triton.cdiv(inputs, self.tile.inputs)
        tile = self.tile
        tiles = triton.cdiv(outputs, tile.outputs) * triton.cdiv(rows, tile.rows)
        wanted = min(self.programs * processors // tiles, steps // LEAST_STEPS)
        each = triton.cdiv(steps, max(wanted, 1))
        return triton.cdiv(steps, each), each * self.tile.inputs


# (maximum rows, tile). The fastest on an H200 of those that `bench/gpu_kernels.py fp8` times. Rows are rounded in steps
# of `quantized.STEP` inputs.
MANY = 1 << 62
FP8_TILES_HALF = (
    (16, Fp8Tile(Tile(16, 128, 128, 4, 8, True), 2)),
    (32, Fp8Tile(Tile(32, 128, 128, 3, 4, True), 2)),
    (MANY, Fp8Tile(Tile(64, 128, 128, 3, 8, True), 2)),
)
FP8_TILES_WIDE = ((MANY, Fp8Tile(Tile(16, 64, 128, 2, 4, True), 2)),)


def fp8_tiles(dtype: torch.dtype) -> tuple[tuple[int, Fp8Tile], ...]:
    return FP8_TILES_WIDE if dtype == torch.float32 else FP8_TILES_HALF


def fp8_tile_of(rows: int, dtype: torch.dtype) -> Fp8Tile:
    """The tile for `rows` rows of `dtype`."""
    return next(fp8_tile for most, fp8_tile in fp8_tiles(dtype) if rows <= most)


@triton.jit
def _to_e4m3(x, ASM: tl.constexpr):
    """fp32 numbers below 256, rounded to e4m3.

    ASM: the processor rounds. The interpreter's conversion only truncates, so it is given values that e4m3 represents.
    """
    if not ASM:
        bits = x.to(tl.int32, bitcast=True)
        kept = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (x + 1.5 * 2.0**14) - 1.5 * 2.0**14  # a multiple of 2^-9, as the subnormal numbers are
        x = tl.where(tl.abs(x) < 2.0**-6, small, kept)
    return x.to(tl.float8e4nv)


@triton.jit
def _add_dot(x_MK, w_NK, sums, SWAP_AB: tl.constexpr, ASM: tl.constexpr):
    """sums + x @ w.T, with x rounded as in `quantized.round_rows`; [BN, BM] if SWAP_AB."""
    wide_MK = x_MK.to(tl.float32)
    size_M = tl.maximum(tl.max(tl.abs(wide_MK), axis=1), 1e-30)
    power_M = size_M.to(tl.int32, bitcast=True) & 0x7F800000
    inverse_M = (0x7F000000 - power_M).to(tl.float32, bitcast=True) * 128.0
    x_MK = _to_e4m3(wide_MK * inverse_M[:, None], ASM)
    size_M = power_M.to(tl.float32, bitcast=True) * 0.0078125
    if SWAP_AB:
        sums += tl.dot(w_NK, tl.trans(x_MK)) * size_M[None, :]
    else:
        sums += tl.dot(x_MK, tl.trans(w_NK)) * size_M[:, None]
    return sums


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _scaled_product_kernel(
    x, weight, scale, bias, out, rows, outputs, inputs, segment,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP_AB: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A tile of rows and outputs over `segment` inputs, one part per program of the second axis: out [S, T, N].

    EVEN: K is a multiple of BK, as `segment` always is. SWAP_AB: the weight takes the matrix unit's longer side. ASM:
    the processor rounds.
    """
    tile_m, tile_n = place(rows, outputs, BM, BN, 1 << 16)  # all row tiles share one pass over the weight
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    mask_m = m < rows
    mask_n = n < outputs
    first = tl.program_id(1) * segment
    last = tl.minimum(first + segment, inputs)
    begin_product(weight, n, first, rows, outputs, inputs, BM, PDL, LINES)
    # Beyond the end the last output's weight is read, and the result is not stored.
    at_x = x + m.to(tl.int64)[:, None] * inputs + (first + k)[None, :]
    at_w = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + (first + k)[None, :]
    sums = tl.zeros((BN, BM) if SWAP_AB else (BM, BN), tl.float32)
    for start in range(first, last, BK):
        if EVEN:
            x_MK = tl.load(at_x, mask=mask_m[:, None], other=0.0)
            w_NK = tl.load(at_w)
        else:
            within = (start + k < inputs)[None, :]
            x_MK = tl.load(at_x, mask=mask_m[:, None] & within, other=0.0)
            w_NK = tl.load(at_w, mask=within, other=0.0)
        sums = _add_dot(x_MK, w_NK, sums, SWAP_AB, ASM)
        at_x += BK
        at_w += BK
    if SWAP_AB:
        sums = tl.trans(sums)
    sums *= tl.load(scale + n, mask=mask_n, other=0.0)[None, :]
    store_tile(out, sums, bias, m, n, rows, outputs, False, BIAS)


def product(
    x_TK: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    fp8_tile: Fp8Tile | None = None,
) -> Tensor:
    """x @ weight.T * scale + bias, any T: [T, N]. `fp8_tile` None: from `fp8_tile_of`. The weight is contiguous
    e4m3.
    """
    x_TK = dense(x_TK)
    rows = x_TK.shape[0]
    outputs, inputs = weight_NK.shape
    if rows == 0:
        return x_TK.new_empty((0, outputs), dtype=out_dtype)
    fp8_tile = fp8_tile or fp8_tile_of(rows, x_TK.dtype)
    tile = fp8_tile.tile
    parts, segment = fp8_tile.parts(rows, outputs, inputs, num_processors(x_TK.device))
    sums_dtype, added_N = (torch.float32, None) if parts > 1 else (out_dtype, bias_N)
    sums_STN = torch.empty((parts, rows, outputs), dtype=sums_dtype, device=x_TK.device)
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    stage_bytes = (tile.rows * x_TK.element_size() + tile.outputs) * tile.inputs
    with on(x_TK):
        _scaled_product_kernel[(programs, parts)](
            x_TK,
            weight_NK,
            scale_N,
            scale_N if added_N is None else added_N,
            sums_STN,
            rows,
            outputs,
            inputs,
            segment,
            BM=tile.rows,
            BN=tile.outputs,
            BK=tile.inputs,
            SWAP_AB=tile.swap_ab,
            BIAS=added_N is not None,
            EVEN=inputs % tile.inputs == 0,
            ASM=x_TK.is_cuda and x_TK.dtype != torch.float32,
            LINES=prefetch_lines(tile, weight_NK, parts),
            **pdl(x_TK),
            num_stages=min(tile.stages, shared_bytes(x_TK.device) // stage_bytes),
            num_warps=tile.warps,
        )
    return linear.add_parts(sums_STN, bias_N, out_dtype) if parts > 1 else sums_STN[0]
