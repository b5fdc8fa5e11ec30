"""Triton's interpreter, with products that do not depend on numpy's BLAS.

It multiplies by `numpy.matmul`, and a row's sum there may change with the rows beside it: that is for the library and
the processor to choose. A GPU does no such thing, and the checks say so.
Shapes: M rows, K inputs, N outputs of a block.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder


def product(a_MK: Any, b_KN: Any, dtype: Any) -> Any:
    """a @ b, summed by halves; K is a power of 2, as in every block of Triton's. Nothing but elementwise operators."""
    terms_MKN = a_MK.astype(dtype)[..., :, :, None] * b_KN.astype(dtype)[..., None, :, :]
    while (size := terms_MKN.shape[-2]) > 1:
        assert size % 2 == 0
        terms_MKN = terms_MKN[..., : size // 2, :] + terms_MKN[..., size // 2 :, :]
    return terms_MKN[..., 0, :]


def install() -> None:
    """From now on the interpreter multiplies by `product`."""
    original = InterpreterBuilder.create_dot

    def create_dot(*args: Any) -> Any:
        with mock.patch.object(np, "matmul", product):
            return original(*args)

    InterpreterBuilder.create_dot = create_dot
