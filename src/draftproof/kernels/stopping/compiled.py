"""When a drafter that makes one draft after the other stops, in C++.

Shapes: R requests, V columns of logits, S slots, L positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.stopping.record import MEMORY, MOST_KEPT, PRIOR_WEIGHT, StopRecord
from draftproof.runtime.native import Library


class StoppingCompiled:
    """`stopping_torch` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_stopping", "17P7q2d")

    def __call__(
        self,
        step: int,
        logits_RV: Tensor,
        drawn_R: Tensor,
        slots_R: Tensor,
        k_R: Tensor,
        tokens_SL: Tensor,
        length_S: Tensor,
        price: Tensor,
        record: StopRecord,
        count_R: Tensor,
    ) -> None:
        logits_RV = logits_RV.float().contiguous()
        given = (logits_RV, drawn_R, slots_R, k_R, tokens_SL, length_S, price)
        pointers = [t.data_ptr() for t in (*given, *record.tensors, count_R)]
        sizes = (*logits_RV.shape, tokens_SL.shape[1], MOST_KEPT, len(record.hits_B), torch.get_num_threads())
        self._run(self._pack(*pointers, step, *sizes, PRIOR_WEIGHT, MEMORY))
