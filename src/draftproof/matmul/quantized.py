"""Weights in fp8 (e4m3) with a scale per output: half the bytes, for drafters, whose bits affect acceptance only.

A GPU's matrix unit takes such a weight directly if the rows are in e4m3 too, so they are rounded.
Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.matmul.spec import Candidate, LinearFn
from draftproof.runtime import gpu

KIND = "fp8"
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest e4m3 number
STEP = 128  # inputs of a row that share a scale


@dataclass(frozen=True, slots=True)
class Fp8:
    """A weight in e4m3 with fp32 scales [N]; `dtype` is the dtype of the rows it multiplies."""

    weight_NK: Tensor
    scale_N: Tensor
    dtype: torch.dtype

    @classmethod
    def store(cls, weight_NK: Tensor) -> Fp8:
        return cls(*quantize(weight_NK), weight_NK.dtype)

    @property
    def kind(self) -> str:
        return KIND

    @property
    def size(self) -> tuple[int, int]:
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    @property
    def parts(self) -> Fp8:
        return self


def candidates(device: torch.device, dense: Sequence[Candidate]) -> list[Candidate]:
    """The one product for such weights: the fp8 kernel on a GPU that supports it, else a product of the rounded
    values.
    """
    takes = frozenset({KIND})
    if is_kept(device):
        return [Candidate("fp8", make_linear_fn, takes=takes)]
    on_gpu = gpu.available(device)
    # The first candidate is the fastest on a CPU; on a GPU it is the reference, and the last is the library's.
    product = dense[-1 if on_gpu else 0]

    def make(weight: Fp8, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        rounded_NK = dequantize(weight.weight_NK, weight.scale_N, weight.dtype)
        linear_fn = product.make(rounded_NK, bias_N, out_dtype)
        return linear_fn if on_gpu else with_rounded_rows(linear_fn)  # on a CPU, rows are rounded as on a GPU

    return [Candidate("rounded to fp8", make, takes=takes)]


def itemsize(device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of an element as products read it."""
    return FP8.itemsize if is_kept(device) else dtype.itemsize


def is_kept(device: torch.device) -> bool:
    """Whether weights stay in fp8 on this device: on a GPU whose matrix unit takes them. Elsewhere they are only
    rounded to fp8 values.
    """
    return gpu.available(device) and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    )


def quantize(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(the weight in e4m3, fp32 scales [N]): each row's largest value becomes `LARGEST`; a row of zeros stays zero."""
    largest_N = weight_NK.abs().amax(dim=1).float()
    # For a subnormal maximum the scale would underflow to zero: such a row is effectively zero.
    scale_N = (largest_N / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight_NK.float() / scale_N[:, None]).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), scale_N


def dequantize(weight_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, from the results of `quantize`."""
    return (weight_NK.float() * scale_N[:, None]).to(dtype)


def round_rows(x_TK: Tensor, step: int = STEP) -> Tensor:
    """The rows rounded to e4m3 values, in their own dtype.

    Each `step` inputs share a scale, the power of two that brings the largest to 128 or more; a power of two loses no
    digit, however it is computed.
    """
    inputs = x_TK.shape[1]
    x_TGS = F.pad(x_TK.float(), (0, -inputs % step)).unflatten(1, (-1, step))
    power_TG1 = x_TGS.abs().amax(dim=2, keepdim=True).clamp(min=1e-30).view(torch.int32) & 0x7F800000
    scale_TG1 = power_TG1.view(torch.float32) / 128
    rounded_TGS = (x_TGS / scale_TG1).to(FP8).float() * scale_TG1
    return rounded_TGS.flatten(1)[:, :inputs].to(x_TK.dtype)


def product_torch(
    x_TK: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """x @ weight.T * scale + bias in fp32, returned in `out_dtype`: [T, N]."""
    bias_N = None if bias_N is None else bias_N.float()
    return F.linear(x_TK.float(), dequantize(weight_NK, scale_N, torch.float32), bias_N).to(out_dtype)


def with_rounded_rows(linear_fn: LinearFn) -> LinearFn:
    """`linear_fn` on rows rounded as on a GPU."""
    return lambda x_TK: linear_fn(round_rows(x_TK))


def make_linear_fn(weight: Fp8, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """x [T, K] -> x @ weight.T + bias [T, N] on a GPU, with the weight in e4m3."""
    from draftproof.matmul.triton import quantized as gpu_quantized

    return partial(
        gpu_quantized.product,
        weight_NK=weight.weight_NK,
        scale_N=weight.scale_N,
        bias_N=bias_N,
        out_dtype=out_dtype,
    )
