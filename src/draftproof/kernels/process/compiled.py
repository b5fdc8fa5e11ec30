"""Processing of logits before the filters, in C++.

Shapes as in kernels/process/reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.runtime.native import Library


class ProcessCompiled:
    """`process_torch` in C++, rows in parallel."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_process", "9P5q")

    def __call__(
        self,
        logits_MV: Tensor,
        params: RowParams,
        slots_M: Tensor,
        positions_M: Tensor,
        tokens_SL: Tensor,
        lists_SN: Tensor,
        masks_MW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `Process`."""
        logits_MV = logits_MV.float().contiguous()
        packed_MC = params.packed_MC.contiguous()
        slots_M, positions_M = slots_M.contiguous(), positions_M.contiguous()
        rows, width = logits_MV.shape
        out_MV, failures_M = torch.empty_like(logits_MV), slots_M.new_empty(rows)
        given = (
            logits_MV,
            packed_MC,
            slots_M,
            positions_M,
            tokens_SL,
            lists_SN,
            masks_MW,
            out_MV,
            failures_M,
        )
        sizes = (rows, width, tokens_SL.shape[1], lists_SN.shape[1], torch.get_num_threads())
        self._run(self._pack(*[x.data_ptr() for x in given], *sizes))
        return out_MV, failures_M
