"""Products on a GPU: an ordered Triton kernel in many tiles, and cuBLAS, as ways for the exact planner.

The kernel adds over K in order in fp32, never in parts, so every tile is expected to give the same bits; the planner
certifies each all the same.
Shapes: T rows, K inputs, N outputs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftproof.kernels.gpu.launch import dense, early, on, shared_bytes
from draftproof.kernels.products import Form, Way

SWIZZLE = 8  # row tiles that share a visit to the weight
LINES = 16  # cache lines of 128 bytes that are fetched of each row of the weight before the input is ready


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled form of the kernel. `swap`: the weight takes the matrix unit's longer side."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int
    swap: bool = False

    @property
    def name(self) -> str:
        side = " swapped" if self.swap else ""
        return f"triton {self.rows}x{self.outputs}x{self.inputs} s{self.stages} w{self.warps}{side}"

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether its buffers have room in shared memory."""
        step = (self.rows + self.outputs) * self.inputs * dtype.itemsize
        return step * self.stages <= shared_bytes(device)

    def suits(self, rows: int) -> bool:
        """Whether it is worth a try at so many rows: neither mostly empty nor mostly passes over the weight."""
        least = 0 if self.rows == 16 else self.rows // 2
        return rows > least and (rows <= self.rows or self.rows >= 64)


# The first of each is the reference.
TILES_HALF = (
    *(Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 5, 4), Tile(16, 32, 128, 6, 4), Tile(16, 16, 512, 3, 4)),
    *(Tile(16, 128, 64, 6, 4), Tile(16, 64, 128, 5, 4, True), Tile(16, 64, 256, 3, 4, True)),
    *(Tile(16, 128, 128, 4, 4, True), Tile(32, 32, 256, 4, 4), Tile(32, 64, 128, 5, 4)),
    *(Tile(32, 64, 128, 5, 4, True), Tile(32, 128, 128, 4, 4, True), Tile(64, 32, 128, 5, 4)),
    *(Tile(64, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4, True), Tile(64, 128, 64, 5, 4, True)),
    *(
        Tile(16, 32, 256, 6, 4),
        Tile(16, 16, 256, 6, 4),
        Tile(16, 64, 256, 5, 4, True),
        Tile(16, 32, 128, 10, 4),
    ),
    *(Tile(16, 32, 512, 3, 4), Tile(32, 32, 256, 6, 4), Tile(32, 32, 128, 10, 4), Tile(64, 32, 256, 4, 4)),
    *(Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 4, 8), Tile(128, 256, 64, 3, 8)),
    *(Tile(128, 256, 64, 4, 8), Tile(256, 128, 64, 4, 8), Tile(128, 256, 64, 4, 8, True)),
)
TILES_WIDE = (
    *(Tile(16, 32, 64, 3, 4), Tile(16, 64, 32, 3, 4), Tile(16, 16, 128, 3, 4), Tile(32, 32, 32, 3, 4)),
    *(Tile(64, 64, 16, 3, 4), Tile(64, 128, 16, 3, 8)),
)


@triton.jit
def prefetch(weight, n, outputs, inputs, LINES: tl.constexpr):
    """Have the first LINES cache lines of these rows of the weight brought to the L2 cache."""
    per_line = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
    line = tl.minimum(tl.arange(0, LINES) * per_line, inputs - 1)
    at = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _product_kernel(
    x, weight, bias, out, rows, outputs, inputs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, SWIZZLE: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A tile of rows and outputs. EVEN: K is a multiple of BK."""
    tiles_n, tiles_m = tl.cdiv(outputs, BN), tl.cdiv(rows, BM)
    group = tl.program_id(0) // (SWIZZLE * tiles_n)
    first_m = group * SWIZZLE
    height = tl.minimum(tiles_m - first_m, SWIZZLE)
    within = tl.program_id(0) % (SWIZZLE * tiles_n)
    tile_m, tile_n = first_m + within % height, within // height
    m, n, k = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    mask_m, mask_n = m < rows, n < outputs
    if EARLY:
        # Started before the kernel ahead has ended: what does not depend on it, the weight, is fetched meanwhile.
        gdc_launch_dependents()
        if tiles_m == 1:
            prefetch(weight, n, outputs, inputs, LINES)
        gdc_wait()
    # An output past the end reads the last one: what it computes is not stored. A few rows padded that way would all
    # ask for one line of memory at once, so there they are masked.
    m_read = tl.minimum(m, rows - 1) if BM >= 64 else m
    at_x = x + m_read.to(tl.int64)[:, None] * inputs + k[None, :]
    at_w = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + k[None, :]
    if SWAP:  # noqa: SIM108  the two differ in shape
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, inputs, BK):
        if EVEN and BM >= 64:
            x_MK, w_NK = tl.load(at_x), tl.load(at_w)
        elif EVEN:
            x_MK, w_NK = tl.load(at_x, mask=mask_m[:, None], other=0.0), tl.load(at_w)
        else:
            x_MK = tl.load(at_x, mask=mask_m[:, None] & (start + k < inputs)[None, :], other=0.0)
            w_NK = tl.load(at_w, mask=(start + k < inputs)[None, :], other=0.0)
        if SWAP:
            sums = tl.dot(w_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
        at_x += BK
        at_w += BK
    if SWAP:
        sums = tl.trans(sums)
    if BIAS:
        sums += tl.load(bias + n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    at_out = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


class OrderedForm:
    """x [T, K] -> [T, N] through one tile, any T."""

    def __init__(self, tile: Tile, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> None:
        self._tile, self._weight_NK, self._bias_N = tile, dense(weight_NK), bias_N
        self._out_dtype = out_dtype

    def __call__(self, x_TK: Tensor) -> Tensor:
        tile, weight = self._tile, self._weight_NK
        x_TK = dense(x_TK)
        rows, (outputs, inputs) = x_TK.shape[0], weight.shape
        out_TN = torch.empty((rows, outputs), dtype=self._out_dtype, device=x_TK.device)
        if rows == 0:
            return out_TN
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
        with on(x_TK):
            _product_kernel[(programs,)](
                *(
                    x_TK,
                    weight,
                    weight if self._bias_N is None else self._bias_N,
                    out_TN,
                    rows,
                    outputs,
                    inputs,
                ),
                BM=tile.rows,
                BN=tile.outputs,
                BK=tile.inputs,
                SWAP=tile.swap,
                BIAS=self._bias_N is not None,
                EVEN=inputs % tile.inputs == 0,
                SWIZZLE=SWIZZLE,
                LINES=LINES,
                **early(x_TK),
                num_stages=tile.stages,
                num_warps=tile.warps,
            )
        return out_TN


def _ordered(tile: Tile) -> Way:
    return Way(tile.name, lambda w, b, out: OrderedForm(tile, w, b, out), any_rows=True)


def cublas(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Form:
    """torch's product; fp32 from a half-precision weight comes straight from the accumulator."""
    if out_dtype == weight_NK.dtype:
        return lambda x_TK: F.linear(x_TK, weight_NK, bias_N)
    weight_KN = weight_NK.t()

    def run(x_TK: Tensor) -> Tensor:
        out_TN = torch.mm(x_TK, weight_KN, out_dtype=out_dtype)
        return out_TN if bias_N is None else out_TN + bias_N.to(out_dtype)

    return run


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    return TILES_WIDE if dtype == torch.float32 else TILES_HALF


def ways(device: torch.device, dtype: torch.dtype) -> list[Way]:
    """The reference first, cuBLAS last."""
    # Sums of parts in half precision would differ by the number of rows; certificates would refuse them.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return [*(_ordered(tile) for tile in tiles(dtype) if tile.fits(dtype, device)), Way("cublas", cublas)]
