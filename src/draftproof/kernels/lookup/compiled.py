"""N-gram lookup in C++.

Shapes: S slots, L positions, R requests, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.runtime.native import Library


class LookupCompiled:
    """`lookup_torch` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_lookup", "5P6q")

    def __call__(
        self,
        tokens_SL: Tensor,
        length_S: Tensor,
        slots_R: Tensor,
        k_R: Tensor,
        num_drafts: int,
        shortest: int,
        longest: int,
        most_matched: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        R = len(slots_R)
        out = torch.empty(R * (num_drafts + 2), dtype=torch.int64)
        tensors = (tokens_SL, length_S, slots_R, k_R, out)
        pointers = [t.data_ptr() for t in tensors]
        columns = tokens_SL.shape[1]
        self._run(self._pack(*pointers, columns, R, num_drafts, shortest, longest, most_matched))
        tokens, count_R, matched_R = out.split([R * num_drafts, R, R])
        return tokens.view(R, num_drafts), count_R, matched_R
