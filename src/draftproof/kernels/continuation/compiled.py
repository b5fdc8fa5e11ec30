"""The likeliest continuation of texts, in C++.

Shapes: N rows of tokens, L positions, R requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.kernels.continuation.index import SlotTexts, TextIndex
from draftproof.kernels.continuation.spec import MOST_PLACES, Limits
from draftproof.runtime.native import Library


class CompiledContinuation:
    """`TorchContinuation` in C++."""

    def __init__(self, library: Library) -> None:
        self._add = library.function("dp_add_to_text", "ppi")
        self._run, self._pack = library.packed("dp_continuation", "8P5q2d")

    def add(self, index: TextIndex, tokens: Sequence[int]) -> None:
        given = torch.tensor(tokens, dtype=torch.int32)
        self._add(index.address, given.data_ptr(), len(given))

    def propose(
        self,
        own: SlotTexts,
        shared: TextIndex | None,
        slots_R: Tensor,
        tokens_NL: Tensor,
        length_N: Tensor,
        row_R: Tensor,
        k_R: Tensor,
        num_drafts: int,
        limits: Limits,
    ) -> tuple[Tensor, Tensor]:
        R = len(slots_R)
        out = torch.empty(R * (num_drafts + 1), dtype=torch.int64)
        given = [t.data_ptr() for t in (own.address_S, slots_R, tokens_NL, length_N, row_R, k_R, out)]
        sizes = (tokens_NL.shape[1], R, num_drafts, limits.longest, MOST_PLACES)
        address = 0 if shared is None else shared.address
        self._run(self._pack(address, *given, *sizes, limits.each, limits.least))
        tokens, count_R = out.split([R * num_drafts, R])
        return tokens.view(R, num_drafts), count_R
