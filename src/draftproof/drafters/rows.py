"""The rows a draft head is fed after a target pass, built from its declared layout.

Shapes: R requests, T target rows, N draft rows, J rows read per request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.drafters.base import InputLayout, Verified


@dataclass(slots=True)
class DraftRows:
    """One flat draft pass. Padding rows have position -1."""

    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64
    slots_N: Tensor  # int64
    source_N: Tensor  # int64: the target row whose features the row takes; num_target_rows for a mask row
    read_RJ: Tensor  # int64: rows whose outputs become drafts
    anchor_position_R: Tensor  # int64: position of the newest token


def build(verified: Verified, layout: InputLayout, num_read: int, mask_token: int = 0) -> DraftRows:
    """Context rows, then the anchor, then masks; what is left of a request's share is padding.

    Example: one request verified [s5 d6 d7 d8]@5..8 and kept s5 d6 (live 2), next r7. With context all:
      shift=1                 d6@5/h5  r7@6/h6  pad  pad                    read row of r7
      shift=1, masks=2        d6@5/h5  r7@6/h6  mask@7  mask@8  pad  pad    read r7, mask, mask
      anchor                  s5@5  d6@6  r7@7  pad  pad                    read row of r7
    """
    device = verified.tokens_T.device
    num_extra = int(layout.anchor) + layout.masks
    num_target = np.array(verified.num_rows_R, dtype=np.int64)
    num_context = {"all": num_target, "last": np.ones_like(num_target), "none": np.zeros_like(num_target)}
    num_rows = num_context[layout.context] + num_extra
    start = np.cumsum(num_rows) - num_rows
    owner = np.repeat(np.arange(len(num_rows)), num_rows)
    owner_N = torch.from_numpy(owner).to(device)
    offset_N = torch.from_numpy(np.arange(len(owner)) - start[owner]).to(device)
    start_R = torch.from_numpy(start).to(device)

    last_R = verified.cu_R1[:-1] + verified.live_R - 1
    if layout.context == "all":
        first_R, count_R = verified.cu_R1[:-1], verified.live_R
    elif layout.context == "last":
        first_R, count_R = last_R, torch.ones_like(last_R)
    else:
        first_R, count_R = last_R + 1, torch.zeros_like(last_R)

    # rows past the context count on from the last live target row
    past_N = offset_N - count_R[owner_N]
    is_context_N = past_N < 0
    source_N = torch.where(is_context_N, first_R[owner_N] + offset_N, last_R[owner_N])
    position_R = verified.positions_T[last_R]
    positions_N = torch.where(
        is_context_N, verified.positions_T[source_N], position_R[owner_N] + 1 + past_N
    ).masked_fill_(past_N >= num_extra, -1)

    token_at_N = source_N + layout.shift
    past_end_N = token_at_N > last_R[owner_N]
    known_N = verified.tokens_T[token_at_N.clamp(max=len(verified.tokens_T) - 1)]
    is_newest_N = (is_context_N & past_end_N) | (
        past_N == 0 if layout.anchor else torch.zeros_like(past_end_N)
    )
    tokens_N = torch.where(is_newest_N, verified.next_R[owner_N], known_N)
    if layout.masks:
        is_mask_N = past_N >= int(layout.anchor)
        tokens_N = tokens_N.masked_fill(is_mask_N, mask_token)
        source_N = source_N.masked_fill(is_mask_N, len(verified.tokens_T))

    first_read_R = start_R + count_R + num_extra - num_read
    read_RJ = first_read_R[:, None] + torch.arange(num_read, device=device)
    return DraftRows(tokens_N, positions_N, verified.slots_R[owner_N], source_N, read_RJ, position_R + 1)
