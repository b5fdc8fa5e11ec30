"""Processing of logits before the filters: what it is, and its versions.

Shapes: M rows, V vocabulary, W words of 32 bits, S slots, L positions, N numbers of the longest list.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.process.compiled import ProcessCompiled
from draftproof.kernels.process.reference import process_torch
from draftproof.kernels.row_params import RowParams
from draftproof.kernels.versions import Versions


class Process(Protocol):
    def __call__(
        self,
        logits_MV: Tensor,  # fp32, left as it is
        params: RowParams,
        slots_M: Tensor,  # int64
        positions_M: Tensor,  # int64: the position that each row samples
        tokens_SL: Tensor,  # int32: known tokens, then the drafts being verified
        lists_SN: Tensor,  # int32: see spec.py
        masks_MW: Tensor,  # int32: a bit an id, of each row, read where its slot is `MASKED`; there may be more rows
    ) -> tuple[Tensor, Tensor]:
        """(the logits after everything but temperature and filters, new; why a row will have no token, int64 [M]: its
        logits were no numbers, or were and the request rules every token out)."""
        ...


def _triton() -> Process:
    from draftproof.kernels.process.triton import process

    return process


PROCESS: Versions[Process] = Versions(process_torch, compiled=ProcessCompiled, triton=_triton)
