"""The memory behind the paged cache: one K and one V tensor per layer, on a block table for each window that there is.

Target and draft layers that see all positions share block ids: block 7 of a draft layer holds the same positions as
block 7 of the target.
Block 0 is never handed out: it is scratch, which unused table entries name, so that a stray write hurts nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from draftproof.cache.states import LayerState, StateSpec
from draftproof.runtime.room import untouched_zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """What one layer keeps of each token, in pages. `shared`: the keys are the values too, and are kept once; `window`:
    so many positions are seen, 0: all."""

    heads: int
    head_dim: int
    shared: bool = False
    window: int = 0

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return (1 if self.shared else 2) * self.heads * self.head_dim * dtype.itemsize


KVShape = PagedKV  # the old name, for one version
CacheSpec = PagedKV | StateSpec  # whatever a layer may declare


@dataclass(slots=True)
class LayerKV:
    """One layer's memory, and the table that says which block holds which page of a slot."""

    k: Tensor  # [num_blocks, ...]: the layout is the attention backend's
    v: Tensor  # k itself where they are shared
    block_table_SB: Tensor  # int32 [num_slots, max_blocks_per_slot]; 0 = no block


@dataclass(slots=True)
class PagedCache:
    """Layers of one model. `block_table_SB` is that of layers that see all positions, which all models of the engine
    share; layers of a window have one of their own. `states`: what layers keep of each slot beside pages."""

    layers: list[LayerKV]
    block_table_SB: Tensor
    states: list[LayerState] = field(default_factory=list)

    def beside(self, other: PagedCache, layers: Sequence[int]) -> PagedCache:
        """A cache of these layers and then some of `other`'s, of the same memory; states are its own alone."""
        lent = [other.layers[i] for i in layers]
        return PagedCache([*self.layers, *lent], self.block_table_SB, self.states)

    def on_copies(self) -> tuple[PagedCache, list[tuple[Tensor, Tensor]]]:
        """(a cache of the same memory on tables of its own, each table and its copy)."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for table_SB in (self.block_table_SB, *(layer.block_table_SB for layer in self.layers)):
            if table_SB.data_ptr() not in pairs:
                pairs[table_SB.data_ptr()] = table_SB, table_SB.clone()
        layers = [replace(x, block_table_SB=pairs[x.block_table_SB.data_ptr()][1]) for x in self.layers]
        return PagedCache(layers, pairs[self.block_table_SB.data_ptr()][1], self.states), list(pairs.values())

    def zero(self, blocks: Tensor) -> None:
        """Clear `blocks` (int64 ids) in every layer: draft layers must not see an earlier owner's keys."""
        for layer in self.layers:
            layer.k.index_fill_(0, blocks, 0)
            if layer.v is not layer.k:
                layer.v.index_fill_(0, blocks, 0)


Layout = Callable[
    [PagedKV, int, int], tuple[int, ...]
]  # shape, number of blocks, block size -> sizes of the keys


def paged(shape: PagedKV, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """The layout that `Ops` knows: in a block head by head, position by position."""
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
    """A cache of `num_blocks` blocks for layers of the given shapes, all on one table, as the attention backend lays it
    out."""

    def one(shape: PagedKV) -> Tensor:
        size = layout(shape, num_blocks, block_size)
        if device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        return untouched_zeros(size, dtype)

    def both(shape: PagedKV) -> LayerKV:
        keys = one(shape)
        return LayerKV(keys, keys if shape.shared else one(shape), block_table_SB)

    return PagedCache([both(shape) for shape in shapes], block_table_SB)
