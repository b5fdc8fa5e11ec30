"""Gathering each row's keys and values from the paged cache, for the backends in torch.

Shapes: T rows, N kv heads, L padded keys, B blocks per slot, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 64  # keys; the grid of chunks starts at position 0


def padded_lengths(context_lens_T: Tensor) -> dict[int, Tensor]:
    """Rows by the number of keys in their own chunks, ascending: {64: int64 [T'], 128: ...}.

    Padding rows (end 0) are left out. Ends 3, 64, 65, 0 give {64: [0, 1], 128: [2]}.
    """
    chunks_T = (context_lens_T + (CHUNK - 1)) // CHUNK
    counts = sorted(set(chunks_T.tolist()) - {0})
    return {count * CHUNK: (chunks_T == count).nonzero().squeeze(1) for count in counts}


def gather_keys(
    k_cache: Tensor, v_cache: Tensor, blocks_TB: Tensor, context_lens_T: Tensor, window: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [T, N, L, D], values [T, N, L, D], bool [T, L]: which positions a row sees).

    Positions that a row does not see are zeroed, not only masked, so that NaN there does not reach it: 0 * NaN is NaN.
    """
    block_size = k_cache.shape[2]
    positions_L = torch.arange(length, device=context_lens_T.device)
    seen_TL = positions_L < context_lens_T[:, None]
    if window:
        seen_TL &= positions_L >= context_lens_T[:, None] - window
    columns_L = (positions_L // block_size).clamp(max=blocks_TB.shape[1] - 1)
    blocks_TL = blocks_TB[:, columns_L].long()
    offsets_L = positions_L % block_size

    def visible(cache: Tensor) -> Tensor:
        vectors_TLND = cache[blocks_TL, :, offsets_L.expand_as(blocks_TL)]
        return vectors_TLND.masked_fill_(~seen_TL[:, :, None, None], 0.0).transpose(1, 2).contiguous()

    k_TNLD = visible(k_cache)
    return k_TNLD, k_TNLD if v_cache is k_cache else visible(v_cache), seen_TL


def attend_by_length(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    max_rows: Callable[[int], int],
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    slots_T: Tensor,
    context_lens_T: Tensor,
    window: int,
) -> Tensor:
    """The result of a `RowAttention`, [T, num_heads * D], by one or more calls for each number of padded keys.

    attend(q [T, num_heads, D], keys, values, seen as from `gather_keys`) -> [T, num_heads, D]; max_rows(L): maximum
    rows per call, which bounds the gathered copy of the cache.
    """
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    for length, rows_T in padded_lengths(context_lens_T).items():
        for part_T in rows_T.split(max_rows(length)):
            k_TNLD, v_TNLD, seen_TL = gather_keys(
                k_cache, v_cache, block_table_SB[slots_T[part_T]], context_lens_T[part_T], window, length
            )
            out_THD[part_T] = attend(q_THD[part_T], k_TNLD, v_TNLD, seen_TL)
    num_rows, num_heads, head_dim = q_THD.shape
    return out_THD.view(num_rows, num_heads * head_dim)
