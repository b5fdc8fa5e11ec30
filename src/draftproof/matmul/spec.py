"""The terms of a product: the weight's shape, the function that multiplies rows by it, and the candidates for it.

Shapes: T rows, K inputs, N outputs, S partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DENSE = "dense"  # the kind of a plain weight in the rows' dtype, see weights.py
LinearFn = Callable[[Tensor], Tensor]


def partial_sums(linear_fn: LinearFn) -> LinearFn:
    """The `partial_sums` method of `linear_fn` if it has one, else `linear_fn`.

    It returns unreduced sums over segments of K, fp32 [S, T, N] without a bias. Adding them first to last and rounding
    gives the result of `linear_fn`.
    """
    found: LinearFn = getattr(linear_fn, "partial_sums", linear_fn)
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """The subject of a certificate: a weight [outputs, inputs] of a kind, for rows of `dtype`."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    kind: str = DENSE

    def key(self) -> str:
        names = [str(d).removeprefix("torch.") for d in (self.dtype, self.out_dtype)]
        kind = "" if self.kind == DENSE else f" {self.kind}"
        return f"{self.outputs}x{self.inputs} {names[0]}>{names[1]}{' bias' if self.bias else ''}{kind}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version of the product.

    `make(parts, bias_N, out_dtype)` gives the function; `parts` are those of a weight of a kind in `takes`, for a dense
    one the matrix [N, K]. `any_rows`: exact by construction, so callable with any number of rows at any address; others
    only as certified.
    """

    name: str
    make: Callable[[Any, Tensor | None, torch.dtype], LinearFn]
    any_rows: bool = False
    takes: frozenset[str] = frozenset({DENSE})
