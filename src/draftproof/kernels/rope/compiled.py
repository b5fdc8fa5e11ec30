"""Norm and rotation of q and k, and the write of k and v, in C++.

Shapes: T rows, D head size, P positions of the table, S slots, B blocks per slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.rope.reference import rope_store_torch
from draftproof.runtime.native import DTYPE_CODES, Library

MAX_HEAD_DIM = 1024  # the compiled version's limit, as in common.h


class RopeStoreCompiled:
    """`RopeStore` in C++; unsupported dtypes and shapes use the torch reference."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_rope_store", "12P11qd")

    def __call__(
        self,
        qkv_TX: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cos_sin_PD: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor | None,
        block_table_SB: Tensor,
        v_norm_D: Tensor | None = None,
        shift_S: Tensor | None = None,
    ) -> Tensor:
        codes = _dtype_codes(qkv_TX, k_cache, (q_norm_D, k_norm_D, v_norm_D))
        _, num_kv_heads, block_size, head_dim = k_cache.shape
        if codes is None or head_dim > MAX_HEAD_DIM:
            return rope_store_torch(
                qkv_TX, positions_T, slots_T, cos_sin_PD, q_norm_D, k_norm_D, eps, k_cache, v_cache,
                block_table_SB, v_norm_D, shift_S,
            )  # fmt: skip
        assert positions_T.dtype == slots_T.dtype == torch.int64 and block_table_SB.dtype == torch.int32
        rows, width = qkv_TX.shape
        num_heads = width // head_dim - (1 if v_cache is None else 2) * num_kv_heads
        q_THD = qkv_TX.new_empty(rows, num_heads, head_dim)
        norms_at = (0 if norm_D is None else norm_D.data_ptr() for norm_D in (q_norm_D, k_norm_D, v_norm_D))
        args = self._pack(
            qkv_TX.data_ptr(),
            positions_T.data_ptr(),
            slots_T.data_ptr(),
            cos_sin_PD.data_ptr(),
            *norms_at,
            q_THD.data_ptr(),
            k_cache.data_ptr(),
            0 if v_cache is None else v_cache.data_ptr(),
            block_table_SB.data_ptr(),
            0 if shift_S is None else shift_S.data_ptr(),
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            cos_sin_PD.shape[1],
            block_size,
            block_table_SB.shape[1],
            *codes,
            torch.get_num_threads(),
            eps,
        )
        self._run(args)
        return q_THD


def _dtype_codes(
    qkv_TX: Tensor, k_cache: Tensor, norms: tuple[Tensor | None, ...]
) -> tuple[int, int, int] | None:
    """Dtype codes of rows, cache and the norms' weights (0 if there are none); None if one is unsupported, or the
    weights' dtypes differ.
    """
    code = DTYPE_CODES.get(qkv_TX.dtype)
    cache_code = DTYPE_CODES.get(k_cache.dtype)
    norm_codes = {DTYPE_CODES.get(norm_D.dtype) for norm_D in norms if norm_D is not None} or {0}
    norm_code = norm_codes.pop() if len(norm_codes) == 1 else None
    if code is None or cache_code is None or norm_code is None:
        return None
    return code, cache_code, norm_code
