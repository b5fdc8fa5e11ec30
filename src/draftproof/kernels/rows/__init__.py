"""Moving rows: interfaces and versions.

Shapes: T rows, A rows, V rows of a table, H width, W width of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from draftproof.kernels.rows.compiled import ConcatCompiled, GatherCompiled, SwapCompiled
from draftproof.kernels.rows.reference import concat_torch, gather_torch, swap_torch
from draftproof.kernels.versions import Versions


class Gather(Protocol):
    def __call__(self, table_VH: Tensor, index_T: Tensor) -> Tensor:
        """table[index]: [T, H]; index int64, a negative one (no token) reads row 0."""
        ...


class Concat(Protocol):
    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Matrices with equal numbers of rows, side by side."""
        ...


class Swap(Protocol):
    def __call__(self, x_AX: Tensor, num: int) -> Tensor:
        """[A, num * W] -> [num * A, W]: the first part of every row, then the second of every row, and so on."""
        ...


def _triton_gather() -> Gather:
    from draftproof.kernels.rows.triton import gather

    return gather


def _triton_concat() -> Concat:
    from draftproof.kernels.rows.triton import concat

    return concat


GATHER: Versions[Gather] = Versions(gather_torch, compiled=GatherCompiled, triton=_triton_gather)
CONCAT: Versions[Concat] = Versions(concat_torch, compiled=ConcatCompiled, triton=_triton_concat)
SWAP: Versions[Swap] = Versions(swap_torch, compiled=SwapCompiled, triton=None)
