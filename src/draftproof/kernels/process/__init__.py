"""Processing of logits before the filters: its interface and versions.

Shapes: M rows, V vocabulary, W words of 32 bits, S slots, L positions, N entries of the longest list.
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
        logits_MV: Tensor,  # fp32, not modified
        params: RowParams,
        slots_M: Tensor,  # int64
        positions_M: Tensor,  # int64: the position to sample
        tokens_SL: Tensor,  # int32: known tokens, then the drafts being verified
        lists_SN: Tensor,  # int32: see spec.py
        masks_MW: Tensor,  # int32: one bit per id, read for rows whose slot is `MASKED`; may have more rows
    ) -> tuple[Tensor, Tensor]:
        """(new logits with everything applied but temperature and filters; why a row may have no token, int64 [M]).

        The reason is `NO_NUMBER` if the row's logits hold NaN or inf, else `NONE_LEFT`: the request rules every token
        out.
        """
        ...


def _triton() -> Process:
    from draftproof.kernels.process.triton import process

    return process


PROCESS: Versions[Process] = Versions(process_torch, compiled=ProcessCompiled, triton=_triton)
