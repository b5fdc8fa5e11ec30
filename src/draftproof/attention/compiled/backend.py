"""Attention in C++, the fastest exact backend on a CPU. See attention.cpp for how rows share work.

Shapes: T rows, S slots, B blocks per slot, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.attention.base import RowBackend
from draftproof.attention.sdpa import sdpa_attention
from draftproof.runtime.native import DTYPE_CODES, Library


class CompiledAttention(RowBackend):
    """The backend in C++; unsupported dtypes use torch."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_attention", "7P9qd")

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
        dtype = q_THD.dtype
        code = DTYPE_CODES.get(dtype)
        if code is None or k_cache.dtype != dtype:
            return sdpa_attention(
                q_THD, k_cache, v_cache, block_table_SB, slots_T, context_lens_T, window, scale
            )
        assert slots_T.dtype == context_lens_T.dtype == torch.int64 and block_table_SB.dtype == torch.int32
        assert slots_T.is_contiguous() and context_lens_T.is_contiguous() and block_table_SB.is_contiguous()
        rows, num_heads, head_dim = q_THD.shape
        _, num_kv_heads, block_size, _ = k_cache.shape
        q_THD = q_THD.contiguous()
        out_TX = q_THD.new_empty(rows, num_heads * head_dim)
        args = self._pack(
            q_THD.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table_SB.data_ptr(),
            slots_T.data_ptr(),
            context_lens_T.data_ptr(),
            out_TX.data_ptr(),
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            block_table_SB.shape[1],
            window,
            code,
            torch.get_num_threads(),
            scale,
        )
        self._run(args)
        return out_TX
