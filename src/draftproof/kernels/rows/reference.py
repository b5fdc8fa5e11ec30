"""Moving rows: gathering them by index, and laying matrices side by side.

Shapes: T rows, V rows of a table, H width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_torch(table_VH: Tensor, index_T: Tensor) -> Tensor:
    """table[index], [T, H]; index int64, a negative one (no token) reads row 0."""
    return table_VH.index_select(0, index_T.clamp(min=0))


def concat_torch(parts: Sequence[Tensor]) -> Tensor:
    """Matrices with equal numbers of rows, side by side."""
    return torch.cat(list(parts), dim=-1)


def swap_torch(x_AX: Tensor, num: int) -> Tensor:
    """[A, num * W] -> [num * A, W]: the first part of every row, then the second of every row, and so on."""
    rows = len(x_AX)
    width = x_AX.shape[1] // num
    return x_AX.view(rows, num, width).transpose(0, 1).contiguous().view(num * rows, width)
