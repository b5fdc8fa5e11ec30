"""The backend for GPUs: the Triton kernels of `paged.py`, which divide a pass's rows into tiles once."""

from __future__ import annotations

from draftproof.attention.base import AttentionPass, FunctionPass, PagedBackend, QueryRows
from draftproof.attention.triton.paged import TritonAttention


class TritonBackend(PagedBackend):
    def __init__(self) -> None:
        self._kernels = TritonAttention()

    def plan(self, rows: QueryRows) -> AttentionPass:
        return FunctionPass(self._kernels.begin(rows.max_query_len), rows)
