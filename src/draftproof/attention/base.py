"""Attention over the paged cache: what a backend computes, and what a layer calls.

Shapes: T rows, S slots, B blocks per slot, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftproof.cache.pool import PagedCache
from draftproof.kernels.ops import Ops


class AttentionBackend(Protocol):
    """Softmax attention of each row over the first `ends_T` positions of its slot.

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
        ends_T: Tensor,  # int64: number of leading positions the row sees; 0 = padding, output zero
        window: int,  # the row sees the last `window` of them only; 0 = all
        scale: float,
    ) -> Tensor:
        """Returns [T, num_heads * D] in q's dtype."""
        ...


@dataclass(slots=True)
class Rows:
    """Where the rows of one flat pass sit. A padding row has position -1 and end 0."""

    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    ends_T: Tensor  # int64; position + 1 where attention is causal
    most_each: int = 0  # no slot has more neighbouring rows; 0 = not known. Speed only

    @classmethod
    def causal(cls, positions_T: Tensor, slots_T: Tensor) -> Rows:
        return cls(positions_T, slots_T, positions_T + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The constants of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    eps: float = 1e-6
    cos_sin_PD: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


@dataclass(slots=True)
class PagedAttention:
    """What a layer calls during one pass: store this pass's keys and values, then attend."""

    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    rows: Rows

    def __post_init__(self) -> None:
        # A backend may want to share work between the layers of a pass: `begin` gives one that does.
        begin = getattr(self.backend, "begin", None)
        if begin is not None:
            self.backend = begin(self.rows.most_each)

    def __call__(self, layer: int, qkv_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """qkv_TX [T, (num_heads + 2 * num_kv_heads) * D] -> [T, num_heads * D]."""
        kv = self.cache.layers[layer]
        table = self.cache.block_table_SB
        q_THD = self.ops.rope_store(
            qkv_TX,
            self.rows.positions_T,
            self.rows.slots_T,
            spec.cos_sin_PD,
            spec.q_norm_D,
            spec.k_norm_D,
            spec.eps,
            kv.k,
            kv.v,
            table,
        )
        return self.backend(
            q_THD, kv.k, kv.v, table, self.rows.slots_T, self.rows.ends_T, spec.window, spec.scale
        )
