"""Products with fp8 weights, Triton against torch: every e4m3 number, various shapes, few rows and many.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.matmul import quantized
from draftproof.matmul.triton import quantized as gpu_quantized
from draftproof.matmul.triton.linear import Tile
from draftproof.matmul.triton.quantized import Fp8Tile
from draftproof.runtime.triton.launch import num_processors

TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """Random numbers of `like`'s dtype, on its device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def fp8_tiles(dtype: torch.dtype) -> list[gpu_quantized.Fp8Tile]:
    """The tiles of the table, and one for each feature that none of these uses."""
    found = [fp8_tile for _, fp8_tile in gpu_quantized.fp8_tiles(dtype)]
    step = 32 if dtype == torch.float32 else 128
    found += [Fp8Tile(Tile(16, 32, step, 3, 4), programs=4), Fp8Tile(Tile(16, 64, step, 3, 4, True))]
    found += [Fp8Tile(Tile(64, 64, step, 2, 4)), Fp8Tile(Tile(16, 64, 256, 2, 4, True), 8)]
    return [*dict.fromkeys(found)]


def check_quantized(device: torch.device, dtype: torch.dtype) -> None:
    """Every e4m3 number is decoded exactly; then products, with errors that are small relative to a row's weights."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127].to(device).view(2, 127).view(quantized.FP8)  # without NaN
    eye, one = torch.eye(127, device=device, dtype=dtype), torch.ones(2, device=device)
    small, all_tiles, met = device.type == "cpu", fp8_tiles(dtype), set[bool]()
    for fp8_tile in all_tiles:
        found = gpu_quantized.product(eye, codes, one, None, torch.float32, fp8_tile)
        assert torch.equal(found, codes.float().t()), fp8_tile
    for outputs, inputs, bias in ((50, 200, True), (33, 101, False), (64, 512, True), (130, 3200, False)):
        weight = randn(outputs, inputs, like=eye)
        weight *= torch.logspace(-3, 1, outputs, device=device).to(dtype)[:, None]
        weight[3], weight[4] = 0.0, weight[4] * (torch.arange(inputs, device=device) == 7)
        made, offset = quantized.quantize(weight), weight[:, 0].contiguous()
        size_N = weight.abs().amax(dim=1).float().clamp(min=1e-3)
        for out_dtype in {dtype, torch.float32}:
            for rows in (1, 6, 17, 70) if small else (1, 6, 16, 17, 32, 33, 64, 70, 128, 129, 300):
                x = randn(rows, inputs, like=eye, seed=rows) / inputs**0.5
                x[0, :3] *= 50  # outliers
                x[1:2] = 0.0
                used = gpu_quantized.fp8_tile_of(rows, dtype)
                others = all_tiles[rows % len(all_tiles) :][:1] if small else all_tiles
                for fp8_tile in (used, *others):
                    given = quantized.round_rows(x.float(), fp8_tile.tile.inputs)
                    args = (*made, offset if bias else None, out_dtype)
                    expected = quantized.product_torch(given, *args) / size_N
                    # Tensor cores sum fp8 products in fewer bits than the interpreter.
                    bound = max(TOLERANCE[out_dtype], 0.0 if small else 5e-3)
                    found = gpu_quantized.product(x, *args, None if fp8_tile is used else fp8_tile)
                    assert found.dtype == out_dtype
                    met.add(fp8_tile.parts(rows, outputs, inputs, num_processors(device))[0] > 1)
                    torch.testing.assert_close(found / size_N, expected, atol=bound, rtol=bound)
        assert gpu_quantized.product(x[:0], *made, None, dtype).shape == (0, outputs)
    assert met == {True, False}, "some K is cut, and some is not"
