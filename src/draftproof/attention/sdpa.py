"""Exact attention on torch's own CPU kernel, for machines without a compiler.

Shapes: T rows, N kv heads, G query heads per kv head, L padded keys, S slots, B blocks per slot, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # keys are padded to multiples of this, counted from position 0
MIN_QUERIES = 4  # torch's fp32 kernel takes other paths (and other bits) below this many query rows
GROUP = 32  # rows that share one call: bounds the gathered copy of the cache


def sdpa_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    slots_T: Tensor,
    ends_T: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """See `AttentionBackend`. Each row is a batch entry of its own, the heads of a group are its query rows."""
    num_rows, num_heads, head_dim = q_THD.shape
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for first in range(0, num_rows, GROUP):
        part = slice(first, first + GROUP)
        out_THD[part] = _group(
            q_THD[part], k_cache, v_cache, block_table_SB[slots_T[part]], ends_T[part], window, scale
        )
    return out_THD.view(num_rows, num_heads * head_dim)


def _group(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks_TB: Tensor,
    ends_T: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Attention of at most GROUP rows: [T, heads, D]."""
    num_kv_heads, block_size = k_cache.shape[1:3]
    length = max(CHUNK, -(-int(ends_T.max()) // CHUNK) * CHUNK)
    positions_L = torch.arange(length, device=q_THD.device)
    seen_TL = positions_L < ends_T[:, None]
    if window:
        seen_TL &= positions_L >= ends_T[:, None] - window
    columns_L = (positions_L // block_size).clamp(max=blocks_TB.shape[1] - 1)
    blocks_TL, offsets_L = blocks_TB[:, columns_L].long(), positions_L % block_size
    k_TNLD = _gather(k_cache, blocks_TL, offsets_L, seen_TL)
    v_TNLD = _gather(v_cache, blocks_TL, offsets_L, seen_TL)

    q_TNGD = q_THD.unflatten(1, (num_kv_heads, -1))
    group = q_TNGD.shape[2]
    if group < MIN_QUERIES:
        q_TNGD = q_TNGD.repeat(1, 1, -(-MIN_QUERIES // group), 1)
    live_T = ends_T > 0
    bias_TL = torch.zeros(seen_TL.shape, dtype=q_THD.dtype, device=q_THD.device)
    # A padding row sees everything here (a softmax over nothing is no number) and is zeroed below.
    bias_TL.masked_fill_(~seen_TL & live_T[:, None], float("-inf"))
    out_TNGD = F.scaled_dot_product_attention(
        q_TNGD, k_TNLD, v_TNLD, attn_mask=bias_TL[:, None, None, :], scale=scale
    )
    out_THD = out_TNGD[:, :, :group].reshape(q_THD.shape)
    return out_THD.masked_fill(~live_T[:, None, None], 0.0)


def _gather(cache: Tensor, blocks_TL: Tensor, offsets_L: Tensor, seen_TL: Tensor) -> Tensor:
    """Cached vectors of each row's padded grid, [T, N, L, D]; zero where the row must not see them.

    Zeroed, not only masked: whatever lies in a masked place, a NaN too, meets a weight of 0.
    """
    vectors_TLND = cache[blocks_TL, :, offsets_L.expand_as(blocks_TL)]
    return vectors_TLND.masked_fill_(~seen_TL[:, :, None, None], 0.0).transpose(1, 2).contiguous()
