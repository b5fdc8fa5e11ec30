"""Products on a GPU: an ordered Triton kernel with many tile shapes, and cuBLAS, as candidates for the exact planner.

The kernel adds over K in order in fp32, so all tiles should give the same bits; the planner certifies each anyway. A
long K with few outputs is split into segments; their number depends on the weight's shape, never on the batch. Each
segment is summed from zero. The sums are added first to last: by the program that made them, by a second kernel, or by
the norm that follows (`partial_sums`).
Shapes: T rows, K inputs, N outputs, S segments.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.runtime.triton.launch import (
    ALIGNMENT,
    dense,
    has_tma,
    num_processors,
    on,
    pdl,
    power_of_two,
    shared_bytes,
)
from draftproof.runtime.triton.pdl import begin

SWIZZLE = tl.constexpr(8)  # row tiles that share one pass over the weight
LINE = 128  # bytes
PREFETCH_BYTES = 4 << 20  # total prefetch of the weight by all programs, before the input is ready
MOST_LINES = 64  # maximum cache lines that a program prefetches per row of the weight
# K >= LONG with N <= min(K, NARROW) is summed in SEGMENTS fixed segments.
SEGMENTS, LONG, NARROW = 4, 4096, 8192
SEGMENT_UNIT = 512  # segment lengths are multiples of this


def num_segments(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """Number of K segments for this weight shape; 1 means unsplit.

    Example: at 96 rows a split [4096, 14336] weight keeps 128 programs busy instead of 32.
    """
    whole = inputs % (SEGMENTS * SEGMENT_UNIT) == 0 and dtype.itemsize == 2
    return SEGMENTS if whole and inputs >= LONG and outputs <= min(inputs, NARROW) else 1


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled form of the kernel.

    `swap_ab`: the weight takes the matrix unit's longer side. `parts`: one program per segment, and a second kernel
    adds the sums. `tma`: tiles are copied by TMA. `rows` is a power of two or, with `swap_ab` and `tma`, 1.5 times one:
    then two products share each tile of the weight.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int
    swap_ab: bool = False
    parts: bool = False
    tma: bool = False

    @property
    def name(self) -> str:
        side = (" swap_ab" if self.swap_ab else "") + (" split_k" if self.parts else "")
        side += " tma" if self.tma else ""
        return f"triton {self.rows}x{self.outputs}x{self.inputs} s{self.stages} w{self.warps}{side}"

    @property
    def pieces(self) -> tuple[int, int]:
        """Rows of the first product and of the tail product: 96 is 64 and 32, 64 is 64 and 0."""
        first = power_of_two(self.rows + 1) // 2
        return first, self.rows - first

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the device supports the tile: TMA, and enough shared memory for the buffers."""
        if self.tma and not has_tma(device):
            return False
        step = (self.rows + self.outputs) * self.inputs * dtype.itemsize
        return step * self.stages <= shared_bytes(device)

    def suits(self, rows: int, segments: int) -> bool:
        """Whether the tile is worth trying at `rows` rows: neither mostly empty nor many passes over the weight."""
        least = 0 if self.rows == 16 else self.rows // 2
        if self.parts and segments == 1:
            return False
        return rows > least and (rows <= self.rows or self.rows >= 64)


# The first of each list is the reference; the others were fastest for some shape on an H200. Each adds to the duration
# of a machine's first start.
TILES_HALF = (
    Tile(16, 32, 256, 4, 4),
    Tile(16, 32, 256, 6, 4),
    Tile(16, 64, 128, 5, 4),
    Tile(16, 64, 128, 5, 4, True),
    Tile(16, 64, 256, 3, 4, True),
    Tile(16, 64, 256, 5, 4, True),
    Tile(16, 128, 128, 4, 4, True),
    Tile(32, 32, 256, 6, 4),
    Tile(32, 64, 128, 5, 4, True),
    Tile(32, 128, 128, 4, 4, True),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(16, 128, 128, 4, 4, True, True),
    Tile(32, 128, 128, 4, 4, True, True),
    Tile(64, 128, 64, 5, 4, True, True),
)
TILES_TMA = (
    Tile(16, 64, 256, 5, 4, True, tma=True),
    Tile(64, 64, 128, 6, 4, True, tma=True),
    Tile(64, 128, 64, 4, 4, True, tma=True),
    Tile(128, 128, 64, 4, 8, tma=True),
    Tile(128, 256, 64, 4, 8, tma=True),
    Tile(128, 256, 64, 4, 8, True, tma=True),
    Tile(64, 128, 128, 4, 8, True, True, True),
    Tile(128, 128, 64, 6, 8, False, True, True),
    Tile(96, 64, 128, 5, 4, True, tma=True),
    Tile(96, 128, 64, 4, 4, True, tma=True),
    Tile(96, 128, 128, 4, 4, True, tma=True),
    Tile(96, 128, 128, 4, 8, True, True, True),
)
TILES_OLDER = (  # for devices without TMA, or with less shared memory
    Tile(32, 32, 128, 4, 4),
    Tile(64, 32, 128, 5, 4),
    Tile(128, 128, 64, 3, 8),
    Tile(128, 128, 64, 4, 8),
    Tile(128, 256, 64, 4, 8),
    Tile(64, 128, 64, 4, 4, False, True),
    Tile(128, 128, 64, 4, 8, False, True),
)
TILES_WIDE = (
    Tile(16, 32, 64, 3, 4),
    Tile(16, 64, 32, 3, 4),
    Tile(16, 16, 128, 3, 4),
    Tile(32, 32, 32, 3, 4),
    Tile(64, 64, 16, 3, 4),
    Tile(64, 128, 16, 3, 8),
)


@triton.jit
def place(rows, outputs, BM: tl.constexpr, BN: tl.constexpr, SWIZZLE: tl.constexpr):
    """(row tile, output tile) of this program. SWIZZLE row tiles share one pass over the weight."""
    tiles_n = tl.cdiv(outputs, BN)
    tiles_m = tl.cdiv(rows, BM)
    group = tl.program_id(0) // (SWIZZLE * tiles_n)
    within = tl.program_id(0) % (SWIZZLE * tiles_n)
    height = tl.minimum(tiles_m - group * SWIZZLE, SWIZZLE)
    return group * SWIZZLE + within % height, within // height


@triton.jit
def begin_product(
    weight, n, k, rows, outputs, inputs, BM: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """`begin`, with a prefetch during the wait: LINES cache lines of these rows of the weight, from input k on, are
    fetched into the L2 cache, unless several row tiles would fetch the same ones.
    """
    if PDL:
        gdc_launch_dependents()
        if rows <= BM:
            per_line = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
            line = tl.minimum(k + tl.arange(0, LINES) * per_line, inputs - 1)
            at = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + line[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )
        gdc_wait()


@triton.jit
def store_tile(out, sums, bias, m, n, rows, outputs, SWAP_AB: tl.constexpr, BIAS: tl.constexpr):
    """Store the sums [m, n], or [n, m] if SWAP_AB, plus the bias, in the part given by the second axis: out [S, T,
    N].
    """
    if SWAP_AB:
        sums = tl.trans(sums)
    if BIAS:
        sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    row = tl.program_id(1).to(tl.int64) * rows + m
    at_out = out + row[:, None] * outputs + n[None, :]
    tl.store(at_out, sums.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _span(segment, inputs, SEGMENTED: tl.constexpr):
    """(first input, end) of this program: all of K if SEGMENTED, else the segment given by the second axis."""
    if SEGMENTED:
        return 0, inputs
    return tl.program_id(1) * segment, (tl.program_id(1) + 1) * segment


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _product_kernel(
    x, weight, x_tiles, tail_tiles, weight_tiles, bias, out, rows, outputs, inputs, segment,
    BM: tl.constexpr, TAIL_ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP_AB: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, SEGMENTED: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """A tile of rows and outputs; without SEGMENTED over the `segment` inputs of each program of the second axis.

    out [S, T, N]. EVEN: K is a multiple of BK. SEGMENTED: one program goes through all of K, in segments of `segment`
    inputs. TMA: tiles are loaded by descriptors, zero-padded; else those are unused. TAIL_ROWS: rows after the first
    BM, whose product uses the same tile of the weight; with TMA and SWAP_AB only.
    """
    tile_m, tile_n = place(rows, outputs, BM + TAIL_ROWS, BN, SWIZZLE)
    first_m = tile_m * (BM + TAIL_ROWS)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m = first_m + tl.arange(0, BM)
    first, last = _span(segment, inputs, SEGMENTED)
    begin_product(weight, n, first, rows, outputs, inputs, BM + TAIL_ROWS, PDL, LINES)
    # Outputs past the end read the last one's weight; their results are not stored. Rows are masked: with few rows,
    # clamping would make all the others read the same cache line at once.
    at_x = x + m.to(tl.int64)[:, None] * inputs + (first + k)[None, :]
    at_w = weight + (tl.minimum(n, outputs - 1).to(tl.int64) * inputs)[:, None] + (first + k)[None, :]
    nothing = tl.zeros((BN, BM) if SWAP_AB else (BM, BN), tl.float32)
    sums = nothing
    total = nothing
    if TAIL_ROWS:
        tail = tl.zeros((BN, TAIL_ROWS), tl.float32)
        tail_total = tail
    for start in range(first, last, BK):
        if TAIL_ROWS:
            tail_MK = tail_tiles.load([first_m + BM, start])
        if TMA:
            x_MK = x_tiles.load([first_m, start])
            w_NK = weight_tiles.load([tile_n * BN, start])
        elif EVEN:
            x_MK = tl.load(at_x, mask=(m < rows)[:, None], other=0.0)
            w_NK = tl.load(at_w)
        else:
            x_MK = tl.load(at_x, mask=(m < rows)[:, None] & (start + k < inputs)[None, :], other=0.0)
            w_NK = tl.load(at_w, mask=(start + k < inputs)[None, :], other=0.0)
        if SWAP_AB:
            sums = tl.dot(w_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
        if TAIL_ROWS:
            tail = tl.dot(w_NK, tl.trans(tail_MK), tail, input_precision="ieee")
        at_x += BK
        at_w += BK
        if SEGMENTED:  # noqa: SIM102  SEGMENTED is known at compile time
            if (start + BK) % segment == 0:
                total += sums
                sums = nothing
                if TAIL_ROWS:
                    tail_total += tail
                    tail = tl.zeros((BN, TAIL_ROWS), tl.float32)
    store_tile(out, total if SEGMENTED else sums, bias, m, n, rows, outputs, SWAP_AB, BIAS)
    if TAIL_ROWS:
        m = first_m + BM + tl.arange(0, TAIL_ROWS)
        store_tile(out, tail_total if SEGMENTED else tail, bias, m, n, rows, outputs, SWAP_AB, BIAS)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["bias"])
def _sum_kernel(
    parts, bias, out, size, outputs,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the sum of parts [S, T, N], added first to last, plus the bias."""
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(parts + segment * tl.cast(size, tl.int64) + i, mask=i < size, other=0.0)
    if BIAS:
        total += tl.load(bias + i % outputs, mask=i < size, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)


def add_parts(parts_STN: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The sum of parts [S, T, N], added first to last, plus the bias: [T, N]."""
    segments, rows, outputs = parts_STN.shape
    out_TN = torch.empty((rows, outputs), dtype=out_dtype, device=parts_STN.device)
    size = rows * outputs
    block = 512
    with on(out_TN):
        _sum_kernel[(triton.cdiv(size, block),)](
            parts_STN,
            out_TN if bias_N is None else bias_N,
            out_TN,
            size,
            outputs,
            SEGMENTS=segments,
            BIAS=bias_N is not None,
            BLOCK=block,
            **pdl(out_TN),
        )
    return out_TN


def prefetch_lines(tile: Tile, weight_NK: Tensor, parts: int = 1) -> int:
    """Cache lines that a program prefetches of each row of its part of the weight; a power of two.

    Example: [4096, 4096] in 2 bytes, tiles of 32 outputs: 128 programs prefetch 32 rows each; one line of every row is
    512 KiB, so 8 lines are 4 MiB.
    """
    outputs, inputs = weight_NK.shape
    programs = min(triton.cdiv(outputs, tile.outputs) * parts, 2 * num_processors(weight_NK.device))
    whole_row = inputs * weight_NK.dtype.itemsize // (LINE * parts)
    lines = min(PREFETCH_BYTES // (LINE * programs * tile.outputs), whole_row, MOST_LINES)
    return power_of_two(max(4, lines) + 1) // 2


class SplitKLinear:
    """x [T, K] -> [T, N], by a kernel that computes the sums of segments, fp32 [S, T, N], and one that adds them."""

    def __init__(self, product: LinearFn, bias_N: Tensor | None, out_dtype: torch.dtype) -> None:
        self._product = product
        self._bias_N = bias_N
        self._out_dtype = out_dtype

    def __call__(self, x_TK: Tensor) -> Tensor:
        return add_parts(self._product(x_TK), self._bias_N, self._out_dtype)

    def partial_sums(self, x_TK: Tensor) -> Tensor:
        """See `spec.partial_sums`."""
        return self._product(x_TK) if self._bias_N is None else self(x_TK)


class OrderedLinear:
    """x [T, K] -> [T, N] with one tile, any T; [S, T, N] if the tile has one program per segment."""

    def __init__(self, tile: Tile, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> None:
        outputs, inputs = weight_NK.shape
        self._weight_NK = dense(weight_NK)
        self._bias_N = bias_N
        self._out_dtype = out_dtype
        # TMA requires rows that start at multiples of 16 bytes
        tma = tile.tma and inputs * weight_NK.itemsize % ALIGNMENT == 0
        self._tile = replace(tile, rows=tile.rows if tma else tile.pieces[0], tma=tma)
        self._segments = num_segments(outputs, inputs, weight_NK.dtype)
        self._parts = self._segments if tile.parts else 1
        assert self._parts == 1 or (bias_N is None and out_dtype == torch.float32), (
            "parts are rounded once added"
        )
        self._lines = prefetch_lines(tile, weight_NK, self._parts)

    def __call__(self, x_TK: Tensor) -> Tensor:
        size = (len(x_TK), len(self._weight_NK))
        out = x_TK.new_empty((self._parts, *size) if self._parts > 1 else size, dtype=self._out_dtype)
        if len(x_TK):
            self._run(dense(x_TK), out)
        return out

    def _run(self, x_TK: Tensor, out: Tensor) -> None:
        tile = self._tile
        weight = self._weight_NK
        bias_N = self._bias_N
        rows = x_TK.shape[0]
        outputs, inputs = weight.shape
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
        segmented = self._segments > self._parts
        first, tail = tile.pieces
        tiles: tuple[object, ...] = (x_TK, x_TK, weight)
        if tile.tma:
            sizes = ((x_TK, first), (x_TK, tail), (weight, tile.outputs))
            tiles = tuple(_tiles(x_RK, size, tile.inputs) if size else x_RK for x_RK, size in sizes)
        with on(x_TK):
            _product_kernel[(programs, self._parts)](
                x_TK,
                weight,
                *tiles,
                weight if bias_N is None else bias_N,
                out,
                rows,
                outputs,
                inputs,
                inputs // (self._segments if segmented else self._parts),
                BM=first,
                TAIL_ROWS=tail,
                BN=tile.outputs,
                BK=tile.inputs,
                SWAP_AB=tile.swap_ab,
                BIAS=bias_N is not None,
                EVEN=inputs % tile.inputs == 0,
                SEGMENTED=segmented,
                TMA=tile.tma,
                LINES=self._lines,
                **pdl(x_TK),
                num_stages=tile.stages,
                num_warps=tile.warps,
            )


def _tiles(x_RK: Tensor, rows: int, inputs: int) -> TensorDescriptor:
    """The TMA descriptor of tiles of `rows` by `inputs`."""
    return TensorDescriptor(x_RK, [*x_RK.shape], [x_RK.shape[1], 1], [rows, inputs])


def ordered(tile: Tile, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """The product with one tile."""
    if tile.parts and num_segments(weight_NK.shape[0], weight_NK.shape[1], weight_NK.dtype) > 1:
        return SplitKLinear(OrderedLinear(tile, weight_NK, None, torch.float32), bias_N, out_dtype)
    return OrderedLinear(replace(tile, parts=False), weight_NK, bias_N, out_dtype)


def cublas(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """torch's product; an fp32 result of a half-precision weight comes straight from the accumulator."""
    if out_dtype == weight_NK.dtype:
        return lambda x_TK: F.linear(x_TK, weight_NK, bias_N)
    weight_KN = weight_NK.t()

    def run(x_TK: Tensor) -> Tensor:
        out_TN = torch.mm(x_TK, weight_KN, out_dtype=out_dtype)
        return out_TN if bias_N is None else out_TN + bias_N.to(out_dtype)

    return run


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    return TILES_WIDE if dtype == torch.float32 else (*TILES_HALF, *TILES_TMA, *TILES_OLDER)


def suits(candidate: str, shape: Shape, rows: int) -> bool:
    """Whether the candidate with this name is worth trying at `rows` rows."""
    segments = num_segments(shape.outputs, shape.inputs, shape.dtype)
    tile = next((tile for tile in tiles(shape.dtype) if tile.name == candidate), None)
    return tile is None or tile.suits(rows, segments)


def candidates(device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """The candidates on this device: the reference first, cuBLAS last."""
    # Half-precision partial sums would depend on the number of rows, and certification would fail.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    fitting = [tile for tile in tiles(dtype) if tile.fits(dtype, device)]
    unwanted = TILES_OLDER if {*TILES_TMA} <= {*fitting} else ()
    found = [Candidate(t.name, functools.partial(ordered, t), True) for t in fitting if t not in unwanted]
    return [*found, Candidate("cublas", cublas)]
