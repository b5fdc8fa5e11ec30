"""Triton's interpreter, with products that do not depend on numpy's BLAS.

It multiplies by `numpy.matmul`, and a row's sum there may change with the rows beside it: that is for the library and
the processor to choose. A GPU does no such thing, and the checks say so. Here products are made of multiples of 2**-22:
fp64 rounds no sum of such products below 2**9, so no order of adding up can show. What a check puts in that sums up to
more is compared with a tolerance.
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
    """a @ b of the nearest multiples of 1 / GRID, in whole numbers of fp64."""
    whole_a, whole_b = (np.rint(x.astype(np.float64) * GRID) for x in (a_MK, b_KN))
    return (matmul(whole_a, whole_b) / GRID**2).astype(dtype)


def install() -> None:
    """From now on the interpreter multiplies by `product`."""
    original = InterpreterBuilder.create_dot

    def create_dot(*args: Any) -> Any:
        with mock.patch.object(np, "matmul", product):
            return original(*args)

    InterpreterBuilder.create_dot = create_dot
