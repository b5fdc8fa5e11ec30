"""Norm and rotation of q and k, and the write of k and v to the paged cache.

Shapes: T rows, N heads (q, k and v together), D head size, P positions of the table, S slots, B blocks per slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.norm.reference import normalize


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
    shift_S: Tensor | None = None,
) -> Tensor:
    """See `RopeStore`. All arithmetic is fp32 and each value is rounded once; returns q [T, heads, D]."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    qkv_TND = qkv_TX.unflatten(1, (-1, head_dim))
    num_heads = qkv_TND.shape[1] - (1 if v_cache is None else 2) * num_kv_heads
    q_TND, k_TND, v_TND = qkv_TND.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)

    live_T = positions_T >= 0
    cos_sin_T1R = cos_sin_PD[turns(positions_T, slots_T, shift_S)].unsqueeze(1)
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


def turns(positions_T: Tensor, slots_T: Tensor, shift_S: Tensor | None) -> Tensor:
    """Row indices into the table of cosines and sines; 0 for padding rows."""
    turns_T = positions_T if shift_S is None else positions_T + shift_S[slots_T]
    return torch.where(positions_T >= 0, turns_T, 0)


def norm_rotate(x_TND: Tensor, norm_D: Tensor | None, eps: float, cos_sin_T1R: Tensor) -> Tensor:
    """Norm over D (if any), then rotation of the first rotary_dim elements; fp32 out."""
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
