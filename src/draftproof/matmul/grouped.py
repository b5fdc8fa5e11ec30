"""Products over experts: rows sorted by expert, each group multiplied by its expert's weight.

A grouped product takes x [P, K] and starts [E + 1] (the rows of expert e are starts[e] to starts[e + 1]) and returns
[P, N]. A row's bits depend on the row and its expert alone, not on how many rows each expert has.
Shapes: P rows sorted by expert, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from draftproof.kernels.exactness import Bits, Check, rows_agree
from draftproof.matmul.certify import cancelling, prove_power
from draftproof.matmul.spec import Shape
from draftproof.runtime import gpu
from draftproof.runtime.native import DTYPE_CODES, Library

GroupedLinear = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[int, Iterable[Tensor], Shape], GroupedLinear]

# Rows of three experts in the certificate: none, one, and numbers around every kernel's tile sizes.
SPLITS = ((1, 0, 0), (0, 2, 1), (3, 5, 8), (16, 17, 1), (15, 33, 31), (64, 0, 40), (7, 65, 130))
WIDEST = 256  # outputs that a certificate checks: they differ in their weights only


class EqualGroups:
    """Starts of groups with equal numbers of rows: int64 [num + 1], for any number of rows."""

    def __init__(self, num: int, max_rows: int, device: torch.device) -> None:
        ends_E1 = torch.arange(num + 1, device=device)
        # indexing a table computes nothing, so passes that use it can be recorded
        self._table_TE1 = torch.arange(max_rows + 1, device=device)[:, None] * ends_E1

    def __call__(self, rows: int) -> Tensor:
        return self._table_TE1[rows] if rows < len(self._table_TE1) else self._table_TE1[1] * rows


class PerExpert:
    """One product after the other, each as certified by the planner. The host reads the groups' lengths."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]], shape: Shape) -> None:
        self._products = products
        self._shape = shape

    def __call__(self, x_PK: Tensor, starts_E1: Tensor) -> Tensor:
        out_PN = x_PK.new_empty(x_PK.shape[0], self._shape.outputs, dtype=self._shape.out_dtype)
        starts = starts_E1.tolist()
        for product, first, end in zip(self._products, starts[:-1], starts[1:], strict=True):
            if first < end:
                out_PN[first:end] = product(x_PK[first:end])
        return out_PN


class CompiledGroups:
    """The grouped product in C++ (product.cpp), using packed copies of the weights; exact by construction."""

    def __init__(self, library: Library, num_experts: int, weights: Iterable[Tensor], shape: Shape) -> None:
        self._run, self._pack = library.packed("dp_grouped_product", "4P7q")
        code = DTYPE_CODES[shape.dtype]
        words = (
            library.function("dp_product_packed_bytes", "iii", "i")(shape.outputs, shape.inputs, code) // 4
        )
        pack = library.function("dp_product_pack", "ppiiii")
        self._weights = torch.zeros(num_experts, words, dtype=torch.int32)
        assert self._weights.data_ptr() % 64 == 0
        for packed, weight_NK in zip(self._weights, weights, strict=True):
            weight_NK = weight_NK.contiguous()
            sizes = (shape.outputs, shape.inputs, code, torch.get_num_threads())
            pack(weight_NK.data_ptr(), packed.data_ptr(), *sizes)
        self._shape = shape
        self._sizes = (num_experts, shape.outputs, shape.inputs, code, DTYPE_CODES[shape.out_dtype])

    def __call__(self, x_PK: Tensor, starts_E1: Tensor) -> Tensor:
        assert x_PK.dtype == self._shape.dtype
        x_PK = x_PK.contiguous()
        rows = x_PK.shape[0]
        out_PN = torch.empty((rows, self._shape.outputs), dtype=self._shape.out_dtype)
        args = self._pack(
            x_PK.data_ptr(),
            self._weights.data_ptr(),
            starts_E1.data_ptr(),
            out_PN.data_ptr(),
            rows,
            *self._sizes,
            torch.get_num_threads(),
        )
        self._run(args)
        return out_PN


def find(device: torch.device, shape: Shape, library: Library | None) -> Make | None:
    """The constructor of this machine's grouped product for `shape`; None: only one product at a time."""
    if gpu.available(device):
        from draftproof.matmul.triton.grouped import Groups

        return Groups
    known = {shape.dtype, shape.out_dtype} <= DTYPE_CODES.keys()
    if device.type == "cpu" and library is not None and known:
        return lambda count, weights, given: CompiledGroups(library, count, weights, given)
    return None


def is_exact(make: Make, shape: Shape, device: torch.device) -> bool:
    """Whether a row has the bits that it has alone, at one thread, in every grouping, on data whose sums cancel.

    Raises NoPowerError if the data would not expose another order of sums.
    """
    outputs = shape.outputs if shape.outputs <= WIDEST else WIDEST // 2 + shape.outputs % (WIDEST // 2)
    narrow = Shape(outputs, shape.inputs, shape.dtype, shape.out_dtype, False)
    prove_power(narrow, seed=13)
    most = [max(rows) for rows in zip(*SPLITS, strict=True)]  # number of test rows per expert
    x_PK, weight_NK = (t.to(device) for t in cancelling(sum(most), narrow, seed=13))
    expert_P = torch.arange(len(most), device=device).repeat_interleave(torch.tensor(most, device=device))
    starts_E1 = torch.arange(len(most) + 1, device=device)

    def run(linear_fn: GroupedLinear, rows_T: Tensor) -> Bits:
        experts_T, order_T = expert_P[rows_T].sort(stable=True)
        sorted_TN = linear_fn(x_PK[rows_T[order_T]], torch.searchsorted(experts_T, starts_E1))
        return (torch.empty_like(sorted_TN).index_copy_(0, order_T, sorted_TN),)

    firsts = [sum(most[:e]) for e in range(len(most))]
    check = Check(
        num_rows=len(x_PK),
        width=narrow.inputs,
        run=run,
        wrong=None,  # the data's power is proved above
        device=device,
        groups=tuple(
            tuple(first + i for first, rows in zip(firsts, split, strict=True) for i in range(rows))
            for split in SPLITS
        ),
    )
    linear_fn = make(len(most), [weight_NK, weight_NK.flip(0).contiguous(), -weight_NK], narrow)
    return rows_agree(check, linear_fn, torch.get_num_threads())
