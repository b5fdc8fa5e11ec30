"""The normalizer of a row of logits: its interface and versions.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.logits.compiled import LogNormalizerCompiled
from draftproof.kernels.logits.reference import log_normalizer_torch
from draftproof.kernels.versions import Versions


class LogNormalizer(Protocol):
    def __call__(self, logits_MV: Tensor) -> Tensor:
        """log(sum(exp(logits))) per row, fp32 [M]."""
        ...


def _triton() -> LogNormalizer:
    from draftproof.kernels.logits.triton import log_normalizer

    return log_normalizer


LOG_NORMALIZER: Versions[LogNormalizer] = Versions(
    log_normalizer_torch, compiled=LogNormalizerCompiled, triton=_triton
)
