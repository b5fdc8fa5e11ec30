"""Attention with torch's CPU kernel: the fastest version without compiled code, exact where certified.

Each row is a separate batch entry, and the heads of a group are its query rows. Rows share a call only with rows of the
same padded length: BLAS libraries choose their order of sums over the keys by that length, so a row with more padding
than it needs may get other bits (MKL on AMD sums 256 keys differently from 192).
Shapes: T rows, N kv heads, G query heads per kv head, L padded keys, S slots, B blocks per slot, D head size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.attention.base import FunctionBackend
from draftproof.attention.gathered import CHUNK, attend_by_length

MIN_QUERIES = 4  # torch's fp32 kernel takes other paths, with other bits, for fewer query rows
MAX_ROWS = 32  # maximum rows per call, which bounds the gathered copy of the cache


def sdpa_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    slots_T: Tensor,
    context_lens_T: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """See `RowAttention`."""
    return attend_by_length(
        partial(_attend, scale=scale),
        lambda _: MAX_ROWS,
        q_THD,
        k_cache,
        v_cache,
        block_table_SB,
        slots_T,
        context_lens_T,
        window,
    )


def _attend(q_THD: Tensor, k_TNLD: Tensor, v_TNLD: Tensor, seen_TL: Tensor, scale: float) -> Tensor:
    """Attention of rows of one padded length: [T, heads, D]."""
    assert seen_TL.shape[1] % CHUNK == 0
    q_TNGD = q_THD.unflatten(1, (k_TNLD.shape[1], -1))
    group = q_TNGD.shape[2]
    if group < MIN_QUERIES:
        q_TNGD = q_TNGD.repeat(1, 1, -(-MIN_QUERIES // group), 1)
    bias_TL = torch.zeros(seen_TL.shape, dtype=q_THD.dtype, device=q_THD.device)
    bias_TL.masked_fill_(~seen_TL, float("-inf"))
    out_TNGD = F.scaled_dot_product_attention(
        q_TNGD, k_TNLD, v_TNLD, attn_mask=bias_TL[:, None, None, :], scale=scale
    )
    return out_TNGD[:, :, :group].reshape(q_THD.shape)


SDPA = FunctionBackend(sdpa_attention)
