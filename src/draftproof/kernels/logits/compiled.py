"""The normalizer of a row of logits in C++.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.runtime.native import Library


class LogNormalizerCompiled:
    """`LogNormalizer` in C++."""

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
