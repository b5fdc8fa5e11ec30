"""The exact planner: which product runs at which number of rows, so that a row's bits never depend on its batch.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.kernels import native


class PackedLinear:
    """x [T, K] -> x @ weight.T + bias [T, N] for any T, a row's bits independent of T."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype | None) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._widen = out_dtype is not None and out_dtype != weight_NK.dtype
        self._weight_NK = weight_NK.to(out_dtype) if self._widen else weight_NK
        self._bias_N = bias_N

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows = x_TK.shape[0]
        if self._widen:
            x_TK = x_TK.to(self._weight_NK.dtype)
        pad = -rows % 8
        out = F.linear(F.pad(x_TK, (0, 0, 0, pad)), self._weight_NK, self._bias_N)
        return out[:rows]


class LinearPlanner:
    """First form: no certification yet."""

    def __init__(
        self,
        device: torch.device,
        *,
        exact: bool,
        max_rows: int,
        library: native.Library | None,
        cache_dir: Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.exact = exact

    def pack(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        exact: bool | None = None,
    ) -> PackedLinear:
        """The product with `weight_NK`; drop the original afterwards."""
        return PackedLinear(weight_NK, bias_N, out_dtype)

    def certify(self) -> None:
        """Call once after all packs."""
