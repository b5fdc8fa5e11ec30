"""Attention over the paged cache: what a backend computes, and what a layer calls.

Shapes: T rows, S slots, B blocks per slot, D head size; in a pass over draft blocks R blocks of J rows each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from draftproof.cache.pool import PagedCache
from draftproof.kernels.ops import Ops


class AttentionBackend(Protocol):
    """Softmax attention of each row over the first `context_lens_T` positions of its slot.

    Law 2: the grid of key chunks starts at absolute position 0 (sliding windows too) and has a constant size; chunks
    are computed whole, padded and masked; a wholly masked chunk is an exact no-op. Keys are read from the cache only.
    """

    def __call__(
        self,
        q_THD: Tensor,  # [T, num_heads, D]
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, D]
        v_cache: Tensor,
        block_table_SB: Tensor,  # int32
        slots_T: Tensor,  # int64
        context_lens_T: Tensor,  # int64: number of leading positions the row sees; 0 = padding, output zero
        window: int,  # the row sees the last `window` of them only; 0 = all
        scale: float,
    ) -> Tensor:
        """Returns [T, num_heads * D] in q's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class BlockRows:
    """What the layers of rows see that are draft blocks, block after block, beyond `Rows.context_lens_T`."""

    context_lens_T: Tensor  # int64: the end of the row's block
    rows_JR: Tensor  # int64: index of each block's first row, second row, ...


@dataclass(slots=True)
class Rows:
    """The rows of one flat pass: their places. A padding row has position -1 and context length 0."""

    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    context_lens_T: (
        Tensor  # int64: leading positions that the row sees; position + 1 where attention is causal
    )
    block: BlockRows | None = None
    max_query_len: int = 0  # most neighbouring rows of one slot; 0 = not known. Speed only


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The constants of one attention layer.

    In a pass over draft blocks `window` counts from the block's first row, so every row of a block sees the same
    context; `causal` False: rows see their whole block.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    causal: bool = True
    eps: float = 1e-6
    cos_sin_PD: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    v_norm_D: Tensor | None = None


@dataclass(slots=True)
class PagedAttention:
    """Attention as a layer calls it during one pass: store this pass's keys and values, then attend."""

    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    rows: Rows
    _begun: dict[int, AttentionBackend] = field(default_factory=dict)

    def __call__(self, layer: int, qkv_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """qkv_TX [T, (num_heads + 2 * num_kv_heads) * D] -> [T, num_heads * D]; without v where keys are the values."""
        q_THD = self.store(layer, qkv_TX, spec)
        rows = self.rows
        block = self.rows.block
        if block is None:
            return self._attend(-1, layer, q_THD, rows.slots_T, rows.context_lens_T, spec.window, spec)
        if not spec.causal:
            window = spec.window + len(block.rows_JR) if spec.window else 0
            return self._attend(-2, layer, q_THD, rows.slots_T, block.context_lens_T, window, spec)
        return self._staggered(layer, q_THD, block.rows_JR, spec)

    def store(self, layer: int, qkv_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """Keys and values into the cache; q [T, num_heads, D], normed and rotated. Columns of q may be left out."""
        kv = self.cache.layers[layer]
        return self.ops.rope_store(
            qkv_TX,
            self.rows.positions_T,
            self.rows.slots_T,
            spec.cos_sin_PD,
            spec.q_norm_D,
            spec.k_norm_D,
            spec.eps,
            kv.k,
            None if kv.v is kv.k else kv.v,
            self.cache.block_table_SB,
            spec.v_norm_D,
        )

    def query(self, layer: int, q_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over what is stored already: q_TX [T, num_heads * D] -> [T, num_heads * D]."""
        rows = self.rows
        kv = self.cache.layers[layer]
        table = self.cache.block_table_SB
        none = kv.k[:, :0]
        q_THD = self.ops.rope_store(
            q_TX,
            rows.positions_T,
            rows.slots_T,
            spec.cos_sin_PD,
            spec.q_norm_D,
            None,
            spec.eps,
            none,
            none,
            table,
        )
        return self._attend(-1, layer, q_THD, rows.slots_T, rows.context_lens_T, spec.window, spec)

    def _staggered(self, layer: int, q_THD: Tensor, rows_JR: Tensor, spec: AttentionSpec) -> Tensor:
        """A block's j-th row sees `window` positions before the block and j + 1 of the block: a call for each j."""
        gather = self.ops.gather
        num_rows, *head = q_THD.shape
        outs = []
        for j, index_R in enumerate(rows_JR.unbind()):
            q_RX = gather(q_THD.view(num_rows, -1), index_R)
            slots_R1, context_lens_R1 = (
                gather(x_T.view(-1, 1), index_R) for x_T in (self.rows.slots_T, self.rows.context_lens_T)
            )
            window = spec.window + j + 1 if spec.window else 0
            q_RHD = q_RX.view(-1, *head)
            outs.append(
                self._attend(j, layer, q_RHD, slots_R1.view(-1), context_lens_R1.view(-1), window, spec)
            )
        return self.ops.concat(outs).view(num_rows, -1)

    def _attend(
        self,
        kind: int,
        layer: int,
        q_THD: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
        window: int,
        spec: AttentionSpec,
    ) -> Tensor:
        """One call of the backend. `kind` tells apart calls whose rows are the same, since a backend may share work
        between those: from 0 on they are one row of each block, -2 rows that see their block's end, -1 all others."""
        if kind not in self._begun:
            begin = getattr(self.backend, "begin", lambda _: self.backend)
            self._begun[kind] = begin(1 if kind >= 0 else self.rows.max_query_len)
        kv = self.cache.layers[layer]
        table = self.cache.block_table_SB
        return self._begun[kind](q_THD, kv.k, kv.v, table, slots_T, context_lens_T, window, spec.scale)
