"""The candidates for multiplying rows by a weight: compiled, oneDNN packed, torch's plain product, and a slow exact
one.

A candidate makes of a weight a `LinearFn`: x [T, K] -> [T, N]. `certify.py` finds out which candidate may be called at
which number of rows, and `linear.py` obeys.
Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.kernels.sums import row_sum
from draftproof.matmul.spec import Candidate, LinearFn
from draftproof.runtime import gpu
from draftproof.runtime.native import DTYPE_CODES, Library

PACK_HINT = 64  # rows oneDNN lays a weight out for; it takes any number later


def candidates(
    device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, library: Library | None
) -> list[Candidate]:
    """The candidates that this machine has for weights of `dtype`, in a fixed order: the first is the reference."""
    if gpu.available(device):
        from draftproof.matmul.triton import linear

        return linear.candidates(device, dtype)
    found = []
    if device.type == "cpu" and library is not None and {dtype, out_dtype} <= DTYPE_CODES.keys():
        found.append(
            Candidate("compiled", lambda w, b, out: CompiledLinear(library, w, b, out), any_rows=True)
        )
    if device.type == "cpu" and _onednn_takes(out_dtype if out_dtype != dtype else dtype):
        found.append(Candidate("packed", _packed))
    found.append(Candidate("plain", _plain))
    return found


SLOW = Candidate("row by row", lambda w, b, out: _RowByRow(w, b, out), any_rows=True)


class CompiledLinear:
    """The product in C++ (product.cpp), over a packed copy of the weight."""

    def __init__(
        self, library: Library, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> None:
        self._run, self._pack = library.packed("dp_product", "4P6q")
        outputs, inputs = weight_NK.shape
        code = DTYPE_CODES[weight_NK.dtype]
        size = library.function("dp_product_packed_bytes", "iii", "i")(outputs, inputs, code)
        self._weight = torch.zeros(size // 4, dtype=torch.int32)  # torch aligns memory to 64 bytes
        assert self._weight.data_ptr() % 64 == 0
        weight_NK = weight_NK.contiguous()
        library.function("dp_product_pack", "ppiiii")(
            weight_NK.data_ptr(), self._weight.data_ptr(), outputs, inputs, code, torch.get_num_threads()
        )
        self._bias_N = None if bias_N is None else bias_N.float().contiguous()
        self._weight_at = self._weight.data_ptr()
        self._bias_at = 0 if self._bias_N is None else self._bias_N.data_ptr()
        self._shape = (outputs, inputs, code, DTYPE_CODES[out_dtype])
        self._outputs = outputs
        self._dtype = weight_NK.dtype
        self._out_dtype = out_dtype

    def __call__(self, x_TK: Tensor) -> Tensor:
        assert x_TK.dtype == self._dtype
        x_TK = x_TK.contiguous()
        rows = x_TK.shape[0]
        out_TN = torch.empty((rows, self._outputs), dtype=self._out_dtype)
        if rows:
            outputs, inputs, code, out_code = self._shape
            at = x_TK.data_ptr(), self._weight_at, self._bias_at, out_TN.data_ptr()
            args = self._pack(*at, rows, outputs, inputs, code, out_code, torch.get_num_threads())
            self._run(args, out_TN)
        return out_TN


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Whether torch's packed oneDNN product exists here for `dtype`: builds and machines differ, so it is tried."""
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        if dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return False
        weight_NK = torch.ones(32, 32, dtype=dtype)
        return bool((_packed(weight_NK, None, dtype)(weight_NK) == 32).all())
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def _packed(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    widen = out_dtype != weight_NK.dtype
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.to(out_dtype).contiguous(), PACK_HINT)
    bias_N = None if bias_N is None else bias_N.to(out_dtype)
    product = torch.ops.mkldnn._linear_pointwise.default

    def run(x_TK: Tensor) -> Tensor:
        return product(x_TK.to(out_dtype) if widen else x_TK, packed, bias_N, "none", [], "")

    return run


def _plain(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    widen = out_dtype != weight_NK.dtype
    weight_NK = weight_NK.to(out_dtype)
    bias_N = None if bias_N is None else bias_N.to(out_dtype)
    return lambda x_TK: F.linear(x_TK.to(out_dtype) if widen else x_TK, weight_NK, bias_N)


class _RowByRow:
    """The product a row at a time, by operators that are row-safe whatever the library: where nothing else
    certifies."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> None:
        self._weight_NK = weight_NK
        self._out_dtype = out_dtype
        self._bias_N = None if bias_N is None else bias_N.float()

    def __call__(self, x_TK: Tensor) -> Tensor:
        out_TN = x_TK.new_empty(x_TK.shape[0], self._weight_NK.shape[0], dtype=self._out_dtype)
        for row, x_K in enumerate(x_TK.float()):
            sums_N = row_sum(self._weight_NK.float() * x_K).squeeze(-1)
            out_TN[row] = sums_N if self._bias_N is None else sums_N + self._bias_N
        return out_TN
