"""Triton's interpreter, with products that do not depend on numpy's BLAS.

It multiplies by `numpy.matmul`, where a row's sum may depend on the other rows, on the library and on the processor. On
a GPU it does not, and the checks require that. Here operands are rounded to multiples of 2**-22: fp64 does not round
sums of their products below 2**9, so the order of summation has no effect. Larger sums are compared with a tolerance.
Shapes: M rows, K inputs, N outputs of a block.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

GRID = 2.0**22
matmul = np.matmul


def product(a_MK: Any, b_KN: Any, dtype: Any) -> Any:
    """a @ b, both rounded to multiples of 1 / GRID, computed in fp64 with whole numbers."""
    whole_a, whole_b = (np.rint(x.astype(np.float64) * GRID) for x in (a_MK, b_KN))
    return (matmul(whole_a, whole_b) / GRID**2).astype(dtype)


def install() -> None:
    """Make the interpreter multiply by `product` from now on."""
    original = InterpreterBuilder.create_dot

    def create_dot(*args: Any) -> Any:
        with mock.patch.object(np, "matmul", product):
            return original(*args)

    InterpreterBuilder.create_dot = create_dot
