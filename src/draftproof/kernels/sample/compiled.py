"""Law 1's `sample` in C++.

Shapes: M rows, V columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.runtime.native import Library


class SampleCompiled:
    """`Sample` in C++: rows in parallel, vectorised noise, logarithms only for tokens that can still win."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_sample", "6P3q")

    def __call__(
        self,
        logits_MV: Tensor,
        params: RowParams,
        positions_M: Tensor,
        ids_V: Tensor | None,
        failures_M: Tensor | None = None,
    ) -> Tensor:
        """See `Sample`."""
        logits_MV = logits_MV.float().contiguous()
        packed_MC, positions_M = params.packed_MC.contiguous(), positions_M.long().contiguous()
        ids_V = None if ids_V is None else ids_V.long().contiguous()
        rows, width = logits_MV.shape
        tokens_M = packed_MC.new_empty(rows)
        args = self._pack(
            logits_MV.data_ptr(),
            packed_MC.data_ptr(),
            positions_M.data_ptr(),
            0 if ids_V is None else ids_V.data_ptr(),
            0 if failures_M is None else failures_M.data_ptr(),
            tokens_M.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
        )
        self._run(args)
        return tokens_M
