"""Attention written for clarity: one row at a time, in fp64. All other backends are compared with it.

Shapes: T rows, N kv heads, G query heads per kv head, L visible keys, S slots, B blocks per slot, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.attention.base import FunctionBackend


def reference_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    slots_T: Tensor,
    context_lens_T: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """See `RowAttention`. Each row is computed alone, so only its own context can affect it."""
    num_rows, num_heads, head_dim = q_THD.shape
    out_THD = torch.zeros_like(q_THD)
    for row, (slot, end) in enumerate(zip(slots_T.tolist(), context_lens_T.tolist(), strict=True)):
        if end == 0:
            continue
        start = max(0, end - window) if window else 0
        k_NLD = _visible(k_cache, block_table_SB[slot], start, end)
        v_NLD = _visible(v_cache, block_table_SB[slot], start, end)
        q_NG1D = q_THD[row].double().view(k_NLD.shape[0], -1, 1, head_dim)
        # Products are summed along contiguous memory, in an order that depends on the length alone.
        scores_NGL = (q_NG1D * k_NLD.unsqueeze(1)).sum(-1) * scale
        weights_NGL = torch.softmax(scores_NGL, dim=-1)
        v_NDL = v_NLD.transpose(1, 2).contiguous()
        out_NGD = (weights_NGL.unsqueeze(2) * v_NDL.unsqueeze(1)).sum(-1)
        out_THD[row] = out_NGD.view(num_heads, head_dim).to(q_THD.dtype)
    return out_THD.view(num_rows, num_heads * head_dim)


def _visible(cache: Tensor, blocks_B: Tensor, start: int, end: int) -> Tensor:
    """The cached vectors of positions start..end-1 of one slot, fp64 [N, L, D]."""
    positions = torch.arange(start, end, device=cache.device)
    block_size = cache.shape[2]
    vectors_LND = cache[blocks_B[positions // block_size].long(), :, positions % block_size]
    return vectors_LND.double().transpose(0, 1).contiguous()


REFERENCE = FunctionBackend(reference_attention)
