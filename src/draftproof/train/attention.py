"""Attention of an EAGLE-3 head in training, text by text, since most of the mask of a packed row is empty.

The library attends over the whole packed row with a mask of [T, passes x T]. Here the texts of a row become a batch,
padded to the longest. In pass 0 a token attends to itself and the tokens before it; in each later pass also to the keys
that its own position has in the passes since. Both kinds of scores share one softmax; both are padded to multiples of
ALIGNED, without which bf16 products are slow.
Shapes: T packed row, N texts, L longest text, P passes after the first, H heads, K key heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "draftproof_texts"
ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Places:
    """Index maps between a packed row and its texts as a batch. `rows_NL`: index into T of each token of the batch,
    arbitrary for padding; `places_T`: index into N * L of each token of the row."""

    rows_NL: Tensor
    places_T: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], num_rows: int, device: torch.device) -> Places:
        """The maps for texts of these lengths, packed into a row of `num_rows`: the last may be cut off, or the end of
        the row may be unused."""
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        kept = [min(n, num_rows - start) for n, start in zip(lengths, starts.tolist(), strict=True)]
        kept = [n for n in kept if n > 0]
        starts_N1 = starts[: len(kept), None]
        longest = -(-max(kept) // ALIGNED) * ALIGNED
        rows_NL = (starts_N1 + torch.arange(longest)).clamp(max=num_rows - 1)
        numbers = torch.arange(rows_NL.numel()).view(rows_NL.shape)
        places_T = torch.zeros(num_rows, dtype=torch.int64)
        for number, (start, n) in enumerate(zip(starts.tolist(), kept, strict=False)):
            places_T[start : start + n] = numbers[number, :n]
        return cls(rows_NL.to(device), places_T.to(device))


def register() -> None:
    """Register `attend` with `transformers` as NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: Any,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    places: Places,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention with the interface of `transformers`: (output, no weights). Keys and values hold all passes so far, one
    pass after the other."""
    num_rows, size = query_1HTD.shape[2:]
    num_keys = key_1KTD.shape[1]
    num_texts, longest = places.rows_NL.shape
    rows = places.rows_NL.flatten()

    def side_by_side(t: Tensor) -> Tensor:
        """From [1, heads or K, rows, D] to [N, K, ?, L, D]; ?: passes of keys, or the heads that share a key head."""
        t = t.reshape(num_keys, -1, num_rows, size).index_select(2, rows)
        return t.view(num_keys, -1, num_texts, longest, size).permute(2, 0, 1, 3, 4)

    query_NKGLD = side_by_side(query_1HTD) * scaling
    key_NKPLD, value_NKPLD = side_by_side(key_1KTD), side_by_side(value_1KTD)
    before_NKGLL = query_NKGLD @ key_NKPLD[:, :, :1].transpose(-1, -2)
    later = torch.ones(longest, longest, dtype=torch.bool, device=rows.device).triu(1)
    before_NKGLL = before_NKGLL.masked_fill(later, -torch.inf)
    own_NKGLP = (query_NKGLD.unsqueeze(4) * key_NKPLD[:, :, 1:].transpose(2, 3).unsqueeze(2)).sum(-1)
    num_own = own_NKGLP.shape[-1]
    own_NKGLP = torch.nn.functional.pad(own_NKGLP, (0, -num_own % ALIGNED), value=-torch.inf)
    scores = torch.cat([before_NKGLL, own_NKGLP.to(before_NKGLL.dtype)], -1)
    scores = scores.softmax(-1, dtype=torch.float32).to(value_1KTD.dtype)
    out_NKGLD = scores[..., :longest] @ value_NKPLD[:, :, :1]
    for number in range(num_own):
        out_NKGLD = out_NKGLD + scores[..., longest + number, None] * value_NKPLD[:, :, 1 + number].unsqueeze(
            2
        )
    flat = out_NKGLD.permute(0, 3, 1, 2, 4).reshape(num_texts * longest, -1, size)
    return flat.index_select(0, places.places_T)[None], None
