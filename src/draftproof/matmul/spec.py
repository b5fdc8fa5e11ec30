"""What a product is: the weight's shape, the function that multiplies rows by it, and versions to choose from.

Shapes: T rows, K inputs, N outputs, S parts of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DENSE = "dense"  # the kind of a weight that is numbers of the rows' dtype, see weights.py
LinearFn = Callable[[Tensor], Tensor]


def partial_sums(linear_fn: LinearFn) -> LinearFn:
    """The form that leaves sums over parts of K as they are, fp32 [S, T, N] without a bias, where `linear_fn` has
    such a method; their sum, first to last and rounded, is what `linear_fn` gives. Else `linear_fn`."""
    found: LinearFn = getattr(linear_fn, "partial_sums", linear_fn)
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """What a certificate is about: a weight [outputs, inputs] of a kind, for rows of `dtype`."""

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
    """A version of the product: `make(parts, bias_N, out_dtype)` gives the function, `parts` being those of a weight of
    the kinds that it takes: of a dense one its numbers [N, K].

    `any_rows`: exact by construction, so any number of rows at any address will do; others only as certified.
    """

    name: str
    make: Callable[[Any, Tensor | None, torch.dtype], LinearFn]
    any_rows: bool = False
    takes: frozenset[str] = frozenset({DENSE})
