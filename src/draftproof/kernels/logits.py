"""The normalizer of a row of logits: torch twin and compiled version.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.native import Library
from draftproof.kernels.norm import row_sum


def log_normalizer_torch(logits_MV: Tensor) -> Tensor:
    """log(sum(exp(logits))) per row: fp32 [M, V] -> fp32 [M]; +-inf where the row's largest entry is that."""
    top_M1 = logits_MV.amax(dim=-1, keepdim=True)
    shift_M1 = torch.where(top_M1.isinf(), torch.zeros_like(top_M1), top_M1)
    total_M1 = row_sum(torch.exp(logits_MV - shift_M1))
    return (torch.log(total_M1) + shift_M1).squeeze(-1)


class LogNormalizerCompiled:
    """`ops.LogNormalizer` in C++."""

    def __init__(self, library: Library) -> None:
        self._run = library.function("dp_log_normalizer", "ppiii")

    def __call__(self, logits_MV: Tensor) -> Tensor:
        if logits_MV.dtype != torch.float32:
            raise ValueError(f"logits_MV: dtype {logits_MV.dtype}: must be float32")
        logits_MV = logits_MV.contiguous()
        rows, width = logits_MV.shape
        out_M = logits_MV.new_empty(rows)
        self._run(logits_MV.data_ptr(), out_M.data_ptr(), rows, width, torch.get_num_threads())
        return out_M
