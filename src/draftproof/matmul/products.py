"""The candidates for multiplying rows by a weight: compiled, packed oneDNN, torch's plain product, and a slow exact
one.

A candidate turns a weight into a `LinearFn`: x [T, K] -> [T, N]. `certify.py` determines at which numbers of rows a
candidate may be called, and `linear.py` calls it at those only.
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
from draftproof.runtime.room import Arena

TILE = 32  # outputs per compressed tile (compressed.h)
PACK_HINT = 64  # number of rows that oneDNN optimises its weight layout for; it accepts any number


def settle(linear_fn: LinearFn, arena: Arena) -> None:
    """Move the data that `linear_fn` reads at every call to `arena`, if it supports that."""
    move = getattr(linear_fn, "settle", None)
    if move is not None:
        move(arena)


def packed_bytes(linear_fn: LinearFn) -> int | None:
    """Bytes of the packed copy of the weight; None if `linear_fn` has none, or does not report it."""
    found: int | None = getattr(linear_fn, "packed_bytes", None)
    return found


def packed_share(library: Library, dtype: torch.dtype) -> float:
    """Size of a packed weight relative to the stored weight; approximate, since it depends on the values."""
    weight_NK = torch.randn(8 * TILE, 8 * TILE).to(dtype)
    return packed_weight(library, weight_NK)[0].nbytes / weight_NK.nbytes


def candidates(
    device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype, library: Library | None
) -> list[Candidate]:
    """The candidates available on this machine for weights of `dtype`, in a fixed order; the first is the reference."""
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
    """The product in C++ (product.cpp), using a packed copy of the weight, in bf16 compressed (compressed.h)."""

    def __init__(
        self, library: Library, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> None:
        self._run, self._pack = library.packed("dp_product", "5P6q")
        outputs, inputs = weight_NK.shape
        code = DTYPE_CODES[weight_NK.dtype]
        self._weight, self._starts = packed_weight(library, weight_NK.contiguous())
        self._bias_N = None if bias_N is None else bias_N.float().contiguous()
        self._weight_at = self._weight.data_ptr()
        self._starts_at = 0 if self._starts is None else self._starts.data_ptr()
        self._bias_at = 0 if self._bias_N is None else self._bias_N.data_ptr()
        self._shape = (outputs, inputs, code, DTYPE_CODES[out_dtype])
        self._outputs = outputs
        self._dtype = weight_NK.dtype
        self._out_dtype = out_dtype

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self._weight.nbytes

    def settle(self, arena: Arena) -> None:
        """Move the packed weight to `arena`."""
        self._weight = arena.keep(self._weight)
        self._weight_at = self._weight.data_ptr()

    def __call__(self, x_TK: Tensor) -> Tensor:
        assert x_TK.dtype == self._dtype
        x_TK = x_TK.contiguous()
        rows = x_TK.shape[0]
        out_TN = torch.empty((rows, self._outputs), dtype=self._out_dtype)
        if rows:
            outputs, inputs, code, out_code = self._shape
            at = x_TK.data_ptr(), self._weight_at, self._starts_at, self._bias_at, out_TN.data_ptr()
            args = self._pack(*at, rows, outputs, inputs, code, out_code, torch.get_num_threads())
            self._run(args)
        return out_TN


def packed_weight(library: Library, weight_NK: Tensor) -> tuple[Tensor, Tensor | None]:
    """(a contiguous weight in the format of `dp_product`, the start of each compressed tile; None if not
    compressed).
    """
    outputs, inputs = weight_NK.shape
    num_threads = torch.get_num_threads()
    at = weight_NK.data_ptr()
    if weight_NK.dtype == torch.bfloat16:
        starts = torch.empty(-(-outputs // TILE) + 1, dtype=torch.int64)
        find = library.function("dp_product_compressed_starts", "ppiii", "i")
        if find(at, starts.data_ptr(), outputs, inputs, num_threads):
            packed = _aligned(int(starts[-1]))
            compress = library.function("dp_product_compress", "pppiii")
            compress(at, starts.data_ptr(), packed.data_ptr(), outputs, inputs, num_threads)
            return packed, starts
    code = DTYPE_CODES[weight_NK.dtype]
    packed = _aligned(library.function("dp_product_packed_bytes", "iii", "i")(outputs, inputs, code))
    pack = library.function("dp_product_pack", "ppiiii")
    pack(at, packed.data_ptr(), outputs, inputs, code, num_threads)
    return packed, None


def _aligned(num_bytes: int) -> Tensor:
    """Zeros, aligned to cache lines."""
    found = torch.zeros(num_bytes // 4, dtype=torch.int32)  # torch aligns memory to 64 bytes
    assert num_bytes % 4 == 0 and found.data_ptr() % 64 == 0
    return found


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Whether torch's packed oneDNN product works here for `dtype`: builds and machines differ, so it is tried."""
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
    """The product one row at a time, with operators that are row-safe on any library. Used if nothing else
    certifies.
    """

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
