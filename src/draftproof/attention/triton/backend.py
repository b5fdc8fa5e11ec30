"""The backend of a GPU: the Triton kernels of `paged.py`, which cut a pass's rows into tiles once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftproof.attention.base import AttentionPass, FunctionPass, PagedBackend, QueryRows
from draftproof.attention.triton.paged import TritonAttention


class TritonBackend(PagedBackend):
    def __init__(self) -> None:
        self._kernels = TritonAttention()

    def __call__(self, *arguments: Any) -> Tensor:
        return self._kernels(*arguments)

    def plan(self, rows: QueryRows) -> AttentionPass:
        return FunctionPass(self._kernels.begin(rows.max_query_len), rows)
