"""Confidence in drafts that were copied from earlier text, in C++.

Shapes: S slots, L positions, R requests, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.confidence.record import MEMORY, MOST_MATCHED, MatchRecord
from draftproof.kernels.confidence.reference import EXPECTED, LOOKED_BACK, PRIOR_WEIGHT
from draftproof.runtime.native import Library


class ConfidenceCompiled:
    """`confidence_torch` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_confidence", "12P8q3d")

    def __call__(
        self,
        tokens_SL: Tensor,
        length_S: Tensor,
        slots_R: Tensor,
        tokens_RK: Tensor,
        count_R: Tensor,
        matched_R: Tensor,
        price: Tensor,
        record: MatchRecord,
    ) -> Tensor:
        out_R = torch.empty_like(count_R)
        given = (tokens_SL, length_S, slots_R, tokens_RK, count_R, matched_R, price)
        pointers = [t.data_ptr() for t in (*given, *record.tensors, out_R)]
        R, K = tokens_RK.shape
        assert record.drafts_SW.shape[1] >= K
        sizes = (tokens_SL.shape[1], R, K, record.drafts_SW.shape[1], *record.hits_BM.shape)
        self._run(self._pack(*pointers, *sizes, MOST_MATCHED, LOOKED_BACK, EXPECTED, PRIOR_WEIGHT, MEMORY))
        return out_R
