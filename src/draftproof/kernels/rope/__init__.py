"""Norm and rotation of q and k, and the write of k and v to the paged cache: interface and versions.

Shapes: T rows, D head size, P positions of the table, S slots, B blocks per slot.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.rope.compiled import RopeStoreCompiled
from draftproof.kernels.rope.reference import rope_store_torch
from draftproof.kernels.versions import Versions


class RopeStore(Protocol):
    def __call__(
        self,
        qkv_TX: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * D], contiguous; no v without v_cache
        positions_T: Tensor,  # int64; -1 = padding: nothing is stored, q is zero
        slots_T: Tensor,  # int64: row of the block table
        cos_sin_PD: Tensor,  # fp32 [max_position, rotary_dim]: cos of each pair, then sin of each pair
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, D], the pool's dtype
        v_cache: Tensor | None,
        block_table_SB: Tensor,  # int32
        v_norm_D: Tensor | None = None,
        shift_S: Tensor | None = None,  # int64, per slot: added to a position to get its row of cos_sin_PD
    ) -> Tensor:
        """Norm and rotate q and k (half-split pairs: i with i + rotary_dim/2), store k and v; returns q [T, heads, D].

        If the cache has no heads, qkv_TX holds q only and nothing is stored.
        """
        ...


def _triton() -> RopeStore:
    from draftproof.kernels.rope.triton import rope_store

    return rope_store


ROPE_STORE: Versions[RopeStore] = Versions(rope_store_torch, compiled=RopeStoreCompiled, triton=_triton)
