"""Products with fp8 weights, Triton against torch: every number of e4m3, any shape, few rows and many.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels import quantized
from draftproof.kernels.gpu import quantized as gpu_quantized

TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """Of `like`'s dtype, on its device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def check_quantized(device: torch.device, dtype: torch.dtype) -> None:
    """Every number, widened without loss; then products, with errors that are small beside a row's own weights."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127].to(device).view(2, 127).view(quantized.FP8)  # without NaN
    eye, one = torch.eye(127, device=device, dtype=dtype), torch.ones(2, device=device)
    small, tiles = device.type == "cpu", [tile for _, tile in gpu_quantized.tiles(dtype)]
    for tile in tiles:
        found = gpu_quantized.product(eye, codes, one, None, torch.float32, tile)
        assert torch.equal(found, codes.float().t()), tile
    for outputs, inputs, bias in ((50, 200, True), (33, 101, False), (64, 512, True), (130, 1536, False)):
        weight = randn(outputs, inputs, like=eye)
        weight *= torch.logspace(-3, 1, outputs, device=device).to(dtype)[:, None]
        weight[3], weight[4] = 0.0, weight[4] * (torch.arange(inputs, device=device) == 7)
        made, offset = quantized.quantize(weight), weight[:, 0].contiguous()
        size_N = weight.abs().amax(dim=1).float().clamp(min=1e-3)
        for out_dtype in {dtype, torch.float32}:
            for rows in (1, 6, 17, 70) if small else (1, 6, 16, 17, 32, 33, 64, 70, 128, 129, 300):
                x = randn(rows, inputs, like=eye, seed=rows) / inputs**0.5
                args = (x, *made, offset if bias else None, out_dtype)
                expected, bound = quantized.product_torch(*args) / size_N, TOLERANCE[out_dtype]
                for tile in (None,) if small else (None, *tiles):
                    found = gpu_quantized.product(*args, tile)
                    assert found.dtype == out_dtype
                    torch.testing.assert_close(found / size_N, expected, atol=bound, rtol=bound)
        assert gpu_quantized.product(x[:0], *made, None, dtype).shape == (0, outputs)
