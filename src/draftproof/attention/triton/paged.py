"""Paged attention in Triton: a `RowAttention` that never synchronises with the host, so a CUDA graph can capture it.

Keys are processed in chunks at fixed absolute positions, each starting from zero, and a row's chunks are added first to
last. Consecutive rows of one slot and the heads of a group form a tile that reads each key once. With few rows, runs of
chunks are distributed over the whole device, and a second kernel adds the chunks. With many rows, a tile adds its own
chunks. All variants give the same bits, so the choice, and the length of runs, may depend on the batch.
Shapes: T rows, S slots, B blocks per slot, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from draftproof.attention.triton.kernels import combine_kernel, loop_kernel, split_kernel
from draftproof.attention.triton.tiles import tiles_kernel
from draftproof.runtime.triton.launch import dense, num_processors, on, pdl, power_of_two, shared_bytes

SCRATCH_BYTES = 512 << 20  # maximum memory for chunks' results; beyond it chunks are not distributed
MANY_SUMS = 1024  # rows times heads; with more, a program adds whole vectors
SPARE_TILES = 16  # loop kernel programs beyond the tiles of one long request; there may be more tiles
TILE_NUMBERS = 1 << 14  # query elements per tile that fit in registers: 128 of size 128, 32 of size 512


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch settings for one kind of pass. No bit depends on them."""

    most: int = 32  # maximum rows times heads of a tile
    num_warps: int = 4
    num_stages: int = 5
    registers: int | None = None  # per thread, for narrow vectors; None: unlimited
    runs: int = 2  # split-KV work units per multiprocessor; a run is one or more chunks


@dataclass(frozen=True, slots=True)
class Tiling:
    """How work is divided. Bits depend on `chunk` and `step` only.

    The defaults were measured on an H200: many requests with one row each need several programs per multiprocessor; a
    prompt is compute-bound.
    """

    chunk: int = 256  # keys
    step: int = 64  # keys per step; half as many for long vectors
    some: LaunchConfig = LaunchConfig()
    decode: LaunchConfig = LaunchConfig(
        num_stages=3, registers=128, runs=4
    )  # more than 32 requests with one row each
    prompt: LaunchConfig = LaunchConfig(most=128, num_warps=8)
    prompt_rows: int = 512
    split_rows: int = 128  # chunks are distributed up to this many rows; a power of two, at most 128

    def launch_config(self, rows: int, alike: bool) -> LaunchConfig:
        """The launch settings of a pass of `rows` rows; `alike`: each is of a different request."""
        if rows >= self.prompt_rows:
            return self.prompt
        return self.decode if alike and rows > 32 else self.some


@dataclass(frozen=True, slots=True)
class _Shape:
    """Constants of one call."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int
    tile: int  # rows times heads
    alike: bool  # a tile has one row
    per_tile: int  # rows
    tiles: int  # tiles of `per_tile` rows; a few more if requests end within one
    launch_config: LaunchConfig
    chunk: int
    chunks: int  # upper bound
    step: int
    split: bool
    itemsize: int
    shared_bytes: int  # the device's shared memory per program

    @property
    def group2(self) -> int:
        return power_of_two(self.heads // self.kv_heads)

    @property
    def padded_dim(self) -> int:
        return max(power_of_two(self.dim), 16)


class TritonAttention:
    """A `RowAttention`. `begin` returns one whose calls share the work that depends on a pass's rows only."""

    def __init__(self, tiling: Tiling | None = None) -> None:
        self._tiling = tiling or Tiling()

    def begin(self, max_query_len: int = 0) -> AttentionPass:
        """`max_query_len`: bound on consecutive rows of one slot; 0 = unknown."""
        return AttentionPass(self._tiling, max_query_len)

    def __call__(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table_SB: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
        window: int,
        scale: float,
    ) -> Tensor:
        attend = self.begin()
        return attend(q_THD, k_cache, v_cache, block_table_SB, slots_T, context_lens_T, window, scale)


class AttentionPass:
    """Attention for the layers of one pass, with fixed rows: they are divided into tiles once."""

    def __init__(self, tiling: Tiling, max_query_len: int) -> None:
        self._tiling = tiling
        self._max_query_len = max_query_len
        self._plans: dict[tuple[int, int, int], Tensor] = {}

    def __call__(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table_SB: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
        window: int,
        scale: float,
    ) -> Tensor:
        """See `RowAttention`."""
        rows, heads, dim = q_THD.shape
        out_TX = q_THD.new_empty(rows, heads * dim)
        if rows == 0:
            return out_TX
        assert all(x.is_contiguous() for x in (k_cache, v_cache, block_table_SB, slots_T, context_lens_T))
        shape = self._shape(q_THD, k_cache, block_table_SB, window)
        q_THD = dense(q_THD)
        scale = scale * math.log2(math.e)
        inputs = (q_THD, k_cache, v_cache, block_table_SB, slots_T, context_lens_T)
        with on(q_THD):
            plan = self._plan(shape, slots_T, context_lens_T)
            if shape.split:
                self._split(shape, inputs, plan, out_TX, scale)
            else:
                self._loop(shape, inputs, plan, out_TX, scale)
        return out_TX

    def _shape(self, q_THD: Tensor, k_cache: Tensor, block_table_SB: Tensor, window: int) -> _Shape:
        rows, heads, dim = q_THD.shape
        _, kv_heads, block_size, _ = k_cache.shape
        group2 = power_of_two(heads // kv_heads)
        wide = q_THD.dtype == torch.float32
        together = min(rows, self._max_query_len or rows)
        launch_config = self._tiling.launch_config(rows, together == 1)
        most = min(launch_config.most, 32) if wide else launch_config.most
        most = min(most, TILE_NUMBERS // max(power_of_two(dim), 16))
        tile = max(min(power_of_two(together * group2), most), group2, 16)
        per_tile = 1 if together == 1 else tile // group2
        chunks = triton.cdiv(block_table_SB.shape[1] * block_size, self._tiling.chunk)
        scratch = rows * heads * chunks * (dim + 2) * 4
        num_slots = len(block_table_SB)
        return _Shape(
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            block_size=block_size,
            window=window,
            tile=tile,
            alike=together == 1,
            per_tile=per_tile,
            tiles=triton.cdiv(rows, together) * triton.cdiv(together, per_tile),
            launch_config=launch_config,
            chunk=self._tiling.chunk,
            chunks=chunks,
            step=self._tiling.step // 2 if wide or dim > 128 else self._tiling.step,
            split=rows <= self._tiling.split_rows and scratch <= SCRATCH_BYTES and num_slots < 1 << 16,
            itemsize=k_cache.dtype.itemsize,
            shared_bytes=shared_bytes(q_THD.device),
        )

    def _plan(self, shape: _Shape, slots_T: Tensor, context_lens_T: Tensor) -> Tensor:
        """int32 [3 + rows + 1 + rows + rows], see `tiles_kernel`, padded so that `split_rows` tiles can be read."""
        runs = self._num_runs(shape, slots_T.device) if shape.split else 0
        key = (shape.per_tile, shape.window, runs)
        plan = self._plans.get(key)
        if plan is None:
            plan = slots_T.new_empty(3 * shape.rows + 4 + self._tiling.split_rows, dtype=torch.int32)
            tiles_kernel[(1,)](
                slots_T,
                context_lens_T,
                plan,
                shape.rows,
                shape.window,
                CHUNK=shape.chunk,
                ROWS=shape.per_tile,
                WINDOWED=bool(shape.window),
                SPLIT=shape.split,
                RUNS=runs,
                BLOCK=self._tiling.split_rows if shape.split else 1024,
                **pdl(slots_T),
                num_warps=4,
            )
            self._plans[key] = plan
        return plan

    def _num_runs(self, shape: _Shape, device: torch.device) -> int:
        """Number of split-KV work units per KV head."""
        return max(1, shape.launch_config.runs * num_processors(device) // shape.kv_heads)

    def _split(
        self, shape: _Shape, inputs: tuple[Tensor, ...], plan: Tensor, out_TX: Tensor, scale: float
    ) -> None:
        q = inputs[0]
        width = inputs[3].shape[1]
        context_lens_T = inputs[5]
        size = (shape.rows, shape.heads, shape.chunks)
        acc = torch.empty(*size, shape.dim, dtype=torch.float32, device=q.device)
        ml = torch.empty(*size, 2, dtype=torch.float32, device=q.device)
        # A tile's last run may be short, so there may be one more per tile: 16 rows, 33 runs in all, 8 heads: 392.
        most = min(self._num_runs(shape, q.device) + shape.rows, shape.rows * shape.chunks)
        split_kernel[(most * shape.kv_heads,)](
            *inputs[:4],
            context_lens_T,
            plan,
            acc,
            ml,
            out_TX,
            shape.rows,
            width,
            shape.chunks,
            shape.window,
            scale,
            **self._tile_constants(shape),
            TILES=self._tiling.split_rows,
            **pdl(q),
        )
        whole = shape.padded_dim
        part = whole if shape.rows * shape.heads > MANY_SUMS else min(whole, 32)
        combine_kernel[(shape.rows, shape.heads, whole // part)](
            acc,
            ml,
            context_lens_T,
            plan,
            out_TX,
            shape.chunks,
            shape.window,
            ALIKE=shape.alike,
            enable_fp_fusion=False,
            HEADS=shape.heads,
            D=shape.dim,
            PART=part,
            CHUNK=shape.chunk,
            WINDOWED=bool(shape.window),
            **pdl(q),
            num_warps=1,
        )

    def _loop(
        self, shape: _Shape, inputs: tuple[Tensor, ...], plan: Tensor, out_TX: Tensor, scale: float
    ) -> None:
        least = 2 * num_processors(out_TX.device) // shape.kv_heads
        loop_kernel[(min(max(shape.tiles + SPARE_TILES, least), shape.rows), shape.kv_heads)](
            *inputs,
            plan,
            out_TX,
            inputs[3].shape[1],
            shape.window,
            scale,
            **self._tile_constants(shape),
            **pdl(out_TX),
        )

    def _pipeline(self, shape: _Shape) -> dict[str, int]:
        """Number of pipeline stages (as many buffers of keys and values as fit in 4/7 of the shared memory), and
        registers.
        """
        # One stage for the block table and one per buffer; small tiles have a buffer for every two stages.
        fitting = shape.shared_bytes * 4 // 7 // (2 * shape.step * shape.padded_dim * shape.itemsize)
        most = 1 + fitting * (1 if shape.tile >= 64 else 2)
        narrow = shape.itemsize == 2 and shape.dim <= 128
        registers = shape.launch_config.registers
        return {
            "num_stages": max(2, min(shape.launch_config.num_stages, most)),
            **({"maxnreg": registers} if narrow and registers is not None else {}),
        }

    def _tile_constants(self, shape: _Shape) -> dict[str, int]:
        return {
            "HEADS": shape.heads,
            "D": shape.dim,
            "DP": shape.padded_dim,
            "CHUNK": shape.chunk,
            "WINDOWED": bool(shape.window),
            "M": shape.tile,
            "N": shape.step,
            "KV_HEADS": shape.kv_heads,
            "GROUP": shape.heads // shape.kv_heads,
            "GROUP2": shape.group2,
            "ALIKE": shape.alike,
            "BLOCK_SIZE": shape.block_size,
            "num_warps": shape.launch_config.num_warps,
            **self._pipeline(shape),
            # Multiply-adds are fused only where the source says so: masked and unmasked steps must agree.
            "enable_fp_fusion": False,
        }
