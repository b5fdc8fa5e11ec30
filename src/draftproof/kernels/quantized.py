"""Weights in fp8 (e4m3), a scale for each output: half the bytes, for drafters, whose bits change acceptance only.

A GPU's matrix unit takes such a weight as it is if the rows are in e4m3 too, so they are rounded.
Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.kernels import gpu
from draftproof.kernels.products import LinearFn

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of e4m3
STEP = 128  # inputs of a row that share a scale


def is_kept(device: torch.device) -> bool:
    """Whether weights stay in fp8 there: a GPU whose matrix unit takes them. Elsewhere they are only rounded to it."""
    return gpu.available(device) and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    )


def quantize(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(the weight in e4m3, fp32 scales [N]): each row's largest becomes `LARGEST`; a row of zeros stays one."""
    largest_N = weight_NK.abs().amax(dim=1).float()
    # A subnormal's quotient would underflow to a scale of zero: such a row is as good as zeros.
    scale_N = (largest_N / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight_NK.float() / scale_N[:, None]).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), scale_N


def dequantize(weight_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that `quantize` left, in `dtype`."""
    return (weight_NK.float() * scale_N[:, None]).to(dtype)


def round_rows(x_TK: Tensor, step: int = STEP) -> Tensor:
    """The rows rounded to e4m3, in their dtype. Each `step` inputs have a scale, the power of two that makes the
    largest 128 or more: it loses no digit, however it is computed."""
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
    """`linear_fn` on rows rounded as a GPU would round them."""
    return lambda x_TK: linear_fn(round_rows(x_TK))


def make_linear_fn(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """x [T, K] -> x @ weight.T + bias [T, N] on a GPU, which keeps the weight in e4m3."""
    from draftproof.kernels.gpu import quantized as gpu_quantized

    fp8_NK, scale_N = quantize(weight_NK)
    return partial(
        gpu_quantized.product, weight_NK=fp8_NK, scale_N=scale_N, bias_N=bias_N, out_dtype=out_dtype
    )
