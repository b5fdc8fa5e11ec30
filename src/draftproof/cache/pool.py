"""The memory behind the paged cache: one K and one V tensor per layer, and a block table for each window size.

Target and draft layers with full attention share block ids: block 7 of a draft layer holds the same positions as block
7 of the target. Block 0 is never allocated: it is scratch. Unused table entries name it, so that stray writes are
harmless.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftproof.cache.states import LayerState, StateSpec
from draftproof.runtime.room import untouched_zeros
from draftproof.runtime.transfer import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """What one layer keeps of each token, in pages. `shared`: keys are also the values and are kept once; `window`:
    number of positions that a row sees, 0: all.
    """

    heads: int
    head_dim: int
    shared: bool = False
    window: int = 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return (1 if self.shared else 2) * self.heads * self.head_dim * dtype.itemsize


KVShape = PagedKV  # the old name, for one version
CacheSpec = PagedKV | StateSpec  # anything that a layer may declare


@dataclass(slots=True)
class LayerKV:
    """One layer's memory, and the table that maps a slot's pages to blocks."""

    k: Tensor  # [num_blocks, ...]: the layout is the attention backend's
    v: Tensor  # k itself if shared
    block_table_SB: Tensor  # int32 [num_slots, max_blocks_per_slot]; 0 = no block


@dataclass(slots=True)
class PagedCache:
    """The cache of one model's layers.

    `block_table_SB` is the table of layers with full attention, shared by all models of the engine; layers with a
    window have a separate one. `states`: what layers keep per slot besides pages.
    """

    layers: list[LayerKV]
    block_table_SB: Tensor
    states: list[LayerState] = field(default_factory=list)

    def beside(self, other: PagedCache, layers: Sequence[int]) -> PagedCache:
        """A cache of these layers followed by some of `other`'s, sharing their memory; states are those of this cache
        only.
        """
        lent = [other.layers[i] for i in layers]
        return PagedCache([*self.layers, *lent], self.block_table_SB, self.states)

    def on_copies(self) -> tuple[PagedCache, list[tuple[Tensor, Tensor]]]:
        """(a cache of the same memory with copied block tables, pairs of each table and its copy)."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for table_SB in (self.block_table_SB, *(layer.block_table_SB for layer in self.layers)):
            if table_SB.data_ptr() not in pairs:
                pairs[table_SB.data_ptr()] = table_SB, table_SB.clone()
        layers = [replace(x, block_table_SB=pairs[x.block_table_SB.data_ptr()][1]) for x in self.layers]
        return PagedCache(layers, pairs[self.block_table_SB.data_ptr()][1], self.states), list(pairs.values())

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear `blocks` in every layer, so that draft layers never see a previous owner's keys.

        On a CPU without torch, whose calls take 0.2 ms after a pass, as long as half a pass of a small model: a step
        clears about one block for each 16 tokens of a request.
        """
        kept = [layer.k for layer in self.layers]
        kept += [layer.v for layer in self.layers if layer.v is not layer.k]
        if self.block_table_SB.device.type == "cpu":
            for tensor in kept:
                assert tensor.is_contiguous() and max(blocks) < len(tensor)
                start, num_bytes = tensor.data_ptr(), tensor.stride(0) * tensor.itemsize
                for block in blocks:
                    ctypes.memset(start + block * num_bytes, 0, num_bytes)
            return
        blocks_B = upload(blocks, self.block_table_SB.device)
        for tensor in kept:
            tensor.index_fill_(0, blocks_B, 0)


Layout = Callable[
    [PagedKV, int, int], tuple[int, ...]
]  # shape, number of blocks, block size -> shape of the keys


def paged(shape: PagedKV, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """The layout that `Ops` expects: in a block head by head, position by position."""
    return num_blocks, shape.heads, block_size, shape.head_dim


def allocate(
    shapes: Sequence[PagedKV],
    block_table_SB: Tensor,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout = paged,
) -> PagedCache:
    """A cache of `num_blocks` blocks for layers of the given shapes, with one table, in the attention backend's
    layout.
    """

    def one(shape: PagedKV) -> Tensor:
        size = layout(shape, num_blocks, block_size)
        if device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        return untouched_zeros(size, dtype)

    def both(shape: PagedKV) -> LayerKV:
        keys = one(shape)
        return LayerKV(keys, keys if shape.shared else one(shape), block_table_SB)

    return PagedCache([both(shape) for shape in shapes], block_table_SB)
