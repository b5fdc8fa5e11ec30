"""Products over experts in one launch: rows sorted by expert, group lengths read on the device.

Adds over K in order in fp32, like linear.py, so that a row's bits do not depend on the rows that share its expert.
Shapes: P rows sorted by expert, E experts, K inputs, N outputs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.matmul.spec import Shape
from draftproof.matmul.triton.linear import Tile
from draftproof.runtime.triton.launch import dense, on, pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

# Tiles by the average number of rows per expert; not tuned.
TILES_HALF = (Tile(16, 64, 128, 5, 4), Tile(64, 128, 64, 4, 4), Tile(128, 128, 64, 4, 8))
TILES_WIDE = (Tile(16, 32, 64, 3, 4), Tile(64, 64, 16, 3, 4))


@triton.jit
def _grouped_kernel(
    x, weights, starts, out, outputs, inputs, E: tl.constexpr, EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's rows and of outputs. EVEN: K is a multiple of BK. The last programs may have no work."""
    begin(PDL)
    tiles_n = tl.cdiv(outputs, BN)
    number = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    e = tl.arange(0, EXPERTS)
    first_E = tl.load(starts + e, mask=e < E, other=0).to(tl.int32)
    end_E = tl.load(starts + e + 1, mask=e < E, other=0).to(tl.int32)
    tiles_E = (end_E - first_E + BM - 1) // BM
    expert = tl.sum((tl.cumsum(tiles_E, axis=0) <= number).to(tl.int32), axis=0)
    if expert < E:
        skipped = tl.sum(tl.where(e < expert, tiles_E, 0), axis=0)
        first = tl.sum(tl.where(e == expert, first_E, 0), axis=0)
        end = tl.sum(tl.where(e == expert, end_E, 0), axis=0)
        m = first + (number - skipped) * BM + tl.arange(0, BM)
        n = tile_n * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        mask_m = m < end
        mask_n = n < outputs
        row_w = expert.to(tl.int64) * outputs + tl.minimum(n, outputs - 1)
        at_x = x + m.to(tl.int64)[:, None] * inputs + k[None, :]
        at_w = weights + (row_w * inputs)[:, None] + k[None, :]
        sums = tl.zeros((BM, BN), tl.float32)
        for start in range(0, inputs, BK):
            if EVEN:
                x_MK = tl.load(at_x, mask=mask_m[:, None], other=0.0)
                w_NK = tl.load(at_w)
            else:
                x_MK = tl.load(at_x, mask=mask_m[:, None] & (start + k < inputs)[None, :], other=0.0)
                w_NK = tl.load(at_w, mask=(start + k < inputs)[None, :], other=0.0)
            sums = tl.dot(x_MK, tl.trans(w_NK), sums, input_precision="ieee")
            at_x += BK
            at_w += BK
        at_out = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(at_out, sums.to(out.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


class Groups:
    """The grouped product: x [P, K], starts [E + 1] -> [P, N]. The grid depends on P alone and suffices for any
    lengths.
    """

    def __init__(self, num_experts: int, weights: Iterable[Tensor], shape: Shape) -> None:
        self._shape = shape
        self._weights = _stacked(num_experts, weights)
        tiles = TILES_WIDE if shape.dtype == torch.float32 else TILES_HALF
        device = self._weights.device
        self._tiles = [tile for tile in tiles if tile.fits(shape.dtype, device)]

    def __call__(self, x_PK: Tensor, starts_E1: Tensor) -> Tensor:
        x_PK = dense(x_PK)
        shape = self._shape
        num_experts = len(self._weights)
        rows = x_PK.shape[0]
        out_PN = x_PK.new_empty(rows, shape.outputs, dtype=shape.out_dtype)
        if rows == 0:
            return out_PN
        most_active = min(num_experts, rows)
        each = rows / most_active
        tile = next((tile for tile in self._tiles if each <= tile.rows), self._tiles[-1])
        tiles_m = triton.cdiv(rows, tile.rows) + most_active  # an expert's last tile may be partial
        with on(x_PK):
            _grouped_kernel[(tiles_m * triton.cdiv(shape.outputs, tile.outputs),)](
                x_PK,
                self._weights,
                dense(starts_E1),
                out_PN,
                shape.outputs,
                shape.inputs,
                E=num_experts,
                EXPERTS=power_of_two(num_experts),
                BM=tile.rows,
                BN=tile.outputs,
                BK=tile.inputs,
                EVEN=shape.inputs % tile.inputs == 0,
                **pdl(x_PK),
                num_stages=tile.stages,
                num_warps=tile.warps,
            )
        return out_PN


def _stacked(num_experts: int, weights: Iterable[Tensor]) -> Tensor:
    """The weights as one tensor [E, N, K], filled one by one, so that the originals need not exist at the same time."""
    stacked: Tensor | None = None
    count = 0
    for count, weight_NK in enumerate(weights, start=1):
        if stacked is None:
            stacked = weight_NK.new_empty(num_experts, *weight_NK.shape)
        stacked[count - 1] = weight_NK
    assert stacked is not None and count == num_experts
    return stacked
