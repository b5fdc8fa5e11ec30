"""Law 1's `sample`: its interface and versions.

Shapes: M rows, V columns.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.kernels.sample.compiled import SampleCompiled
from draftproof.kernels.sample.reference import sample_torch
from draftproof.kernels.versions import Versions


class Sample(Protocol):
    def __call__(
        self,
        logits_MV: Tensor,  # fp32, processed except for temperature and filters
        params: RowParams,
        positions_M: Tensor,  # int64: position of the token to sample
        ids_V: Tensor | None,  # int64: target id of each column (reduced draft vocabulary), None = identity
        failures_M: Tensor | None = None,  # int64: returned for rows without finite logits; None: -1
    ) -> Tensor:
        """Law 1: the token is a function of its row. Returns int64 [M] target ids."""
        ...


def _triton() -> Sample:
    from draftproof.kernels.sample.triton import sample

    return sample


SAMPLE: Versions[Sample] = Versions(sample_torch, compiled=SampleCompiled, triton=_triton)
