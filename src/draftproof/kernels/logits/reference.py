"""The normalizer of a row of logits.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.sums import row_sum


def log_normalizer_torch(logits_MV: Tensor) -> Tensor:
    """log(sum(exp(logits))) per row: fp32 [M, V] -> fp32 [M]; +-inf if the row's largest entry is."""
    top_M1 = logits_MV.amax(dim=-1, keepdim=True)
    shift_M1 = torch.where(top_M1.isinf(), torch.zeros_like(top_M1), top_M1)
    total_M1 = row_sum(torch.exp(logits_MV - shift_M1))
    return (torch.log(total_M1) + shift_M1).squeeze(-1)
