"""Keys and values of each row's own context, copied out of the paged cache: what the versions in torch compute on.

Shapes: T rows, N kv heads, L padded keys, B blocks per slot, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # keys; the grid of chunks starts at position 0


def padded_lengths(ends_T: Tensor) -> dict[int, Tensor]:
    """Rows by the number of keys that a row's own chunks have, ascending: {64: int64 [T'], 128: ...}.

    Padding rows (end 0) are in none. Ends 3, 64, 65, 0 give {64: [0, 1], 128: [2]}.
    """
    chunks_T = (ends_T + (CHUNK - 1)) // CHUNK
    counts = sorted(set(chunks_T.tolist()) - {0})
    return {count * CHUNK: (chunks_T == count).nonzero().squeeze(1) for count in counts}


def gather_keys(
    k_cache: Tensor, v_cache: Tensor, blocks_TB: Tensor, ends_T: Tensor, window: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [T, N, L, D], values [T, N, L, D], bool [T, L]: which positions a row sees).

    What a row must not see is zero, not only masked: whatever lies there, a NaN too, then meets a weight of 0.
    """
    block_size = k_cache.shape[2]
    positions_L = torch.arange(length, device=ends_T.device)
    seen_TL = positions_L < ends_T[:, None]
    if window:
        seen_TL &= positions_L >= ends_T[:, None] - window
    columns_L = (positions_L // block_size).clamp(max=blocks_TB.shape[1] - 1)
    blocks_TL, offsets_L = blocks_TB[:, columns_L].long(), positions_L % block_size

    def visible(cache: Tensor) -> Tensor:
        vectors_TLND = cache[blocks_TL, :, offsets_L.expand_as(blocks_TL)]
        return vectors_TLND.masked_fill_(~seen_TL[:, :, None, None], 0.0).transpose(1, 2).contiguous()

    k_TNLD = visible(k_cache)
    return k_TNLD, k_TNLD if v_cache is k_cache else visible(v_cache), seen_TL
