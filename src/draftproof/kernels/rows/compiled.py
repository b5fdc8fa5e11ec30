"""Moving rows, in C++.

Shapes: T rows, V rows of a table, H width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftproof.runtime.native import Library


class GatherCompiled:
    """`gather_torch` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_gather", "3P2q")

    def __call__(self, table_VH: Tensor, index_T: Tensor) -> Tensor:
        table_VH = table_VH.contiguous()
        index_T = index_T.contiguous()
        out_TH = table_VH.new_empty(len(index_T), table_VH.shape[1])
        row_bytes = table_VH.shape[1] * table_VH.element_size()
        self._run(
            self._pack(table_VH.data_ptr(), index_T.data_ptr(), out_TH.data_ptr(), len(index_T), row_bytes)
        )
        return out_TH


class ConcatCompiled:
    """`concat_torch` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_place", "2P3q")

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        rows = len(parts[0])
        size = parts[0].element_size()
        out = parts[0].new_empty(rows, sum(part.shape[1] for part in parts))
        at = out.data_ptr()
        out_bytes = out.shape[1] * size
        for part in parts:
            part = part.contiguous()
            part_bytes = part.shape[1] * size
            self._run(self._pack(part.data_ptr(), at, rows, part_bytes, out_bytes))
            at += part_bytes
        return out


class SwapCompiled:
    """`swap_torch` in C++."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_swap", "2P3q")

    def __call__(self, x_AX: Tensor, num: int) -> Tensor:
        x_AX = x_AX.contiguous()
        rows = len(x_AX)
        width = x_AX.shape[1] // num
        assert width * num == x_AX.shape[1]
        out = x_AX.new_empty(num * rows, width)
        part_bytes = width * x_AX.element_size()
        self._run(self._pack(x_AX.data_ptr(), out.data_ptr(), rows, num, part_bytes))
        return out
