"""Norm and rotation of q and k, and the write of k and v to the paged cache: torch twin and compiled version.

Shapes: T rows, N heads (q, k and v together), D head size, P positions of the table, S slots, B blocks per slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.native import DTYPE_CODES, Library
from draftproof.kernels.norm import normalize

MAX_HEAD_DIM = 1024  # the compiled version's limit, as in common.h


def rope_store_torch(
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
) -> Tensor:
    """See `ops.RopeStore`. All arithmetic is fp32 and each value is rounded once; returns q [T, heads, D]."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    qkv_TND = qkv_TX.unflatten(1, (-1, head_dim))
    num_heads = qkv_TND.shape[1] - (1 if v_cache is None else 2) * num_kv_heads
    q_TND, k_TND, v_TND = qkv_TND.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)

    live_T = positions_T >= 0
    cos_sin_T1R = cos_sin_PD[positions_T.clamp(min=0)].unsqueeze(1)
    q_TND = norm_rotate(q_TND, q_norm_D, eps, cos_sin_T1R).to(qkv_TX.dtype)
    k_TND = norm_rotate(k_TND, k_norm_D, eps, cos_sin_T1R)
    if v_norm_D is not None:
        v_TND = normalize(v_TND.float(), v_norm_D, eps)

    kept = live_T.nonzero().squeeze(1)
    positions = positions_T[kept]
    slots = slots_T[kept]
    blocks = block_table_SB[slots, positions // block_size].long()
    offsets = positions % block_size
    k_cache[blocks, :, offsets] = k_TND[kept].to(k_cache.dtype)
    if v_cache is not None:
        v_cache[blocks, :, offsets] = v_TND[kept].to(v_cache.dtype)
    return torch.where(live_T[:, None, None], q_TND, torch.zeros((), dtype=q_TND.dtype, device=q_TND.device))


def norm_rotate(x_TND: Tensor, norm_D: Tensor | None, eps: float, cos_sin_T1R: Tensor) -> Tensor:
    """Norm over D (if any), then rotate the first rotary_dim of it; fp32 out."""
    x_TND = x_TND.float()
    if norm_D is not None:
        x_TND = normalize(x_TND, norm_D, eps)
    half = cos_sin_T1R.shape[-1] // 2
    cos = cos_sin_T1R[..., :half]
    sin = cos_sin_T1R[..., half:]
    low = x_TND[..., :half]
    high = x_TND[..., half : 2 * half]
    rotated = (low * cos - high * sin, high * cos + low * sin, x_TND[..., 2 * half :])
    return torch.cat(rotated, dim=-1)


class RopeStoreCompiled:
    """`ops.RopeStore` in C++; dtypes and shapes it does not know go to the twin."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_rope_store", "11P11qd")

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
    ) -> Tensor:
        codes = _dtype_codes(qkv_TX, k_cache, (q_norm_D, k_norm_D, v_norm_D))
        _, num_kv_heads, block_size, head_dim = k_cache.shape
        if codes is None or head_dim > MAX_HEAD_DIM:
            return rope_store_torch(
                qkv_TX,
                positions_T,
                slots_T,
                cos_sin_PD,
                q_norm_D,
                k_norm_D,
                eps,
                k_cache,
                v_cache,
                block_table_SB,
                v_norm_D,
            )
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
        self._run(args, q_THD)
        return q_THD


def _dtype_codes(
    qkv_TX: Tensor, k_cache: Tensor, norms: tuple[Tensor | None, ...]
) -> tuple[int, int, int] | None:
    """Dtype codes of rows, cache and the norms' weights (0 where there are none); None where the library does not know
    one, or weights differ in theirs."""
    code = DTYPE_CODES.get(qkv_TX.dtype)
    cache_code = DTYPE_CODES.get(k_cache.dtype)
    norm_codes = {DTYPE_CODES.get(norm_D.dtype) for norm_D in norms if norm_D is not None} or {0}
    norm_code = norm_codes.pop() if len(norm_codes) == 1 else None
    if code is None or cache_code is None or norm_code is None:
        return None
    return code, cache_code, norm_code
