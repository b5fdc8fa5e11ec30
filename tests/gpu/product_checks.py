"""Products in Triton: all tiles give a row the same bits, and the right numbers.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.norm import reference as norm
from draftproof.matmul import products
from draftproof.matmul.certify import cancelling
from draftproof.matmul.spec import Shape, partial_sums
from draftproof.matmul.triton import linear as gpu_linear


def randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    """Every tile gives the bits of the reference on data whose sums cancel, at any number of rows; also with a long K
    in segments, which are added by the programs or by another kernel. On ordinary data it is within tolerance."""
    small = device.type == "cpu"
    long = [(40, 8192, True), (40, 4096, False)] if dtype != torch.float32 else []
    for outputs, inputs, bias in ((50, 200, True), (20, 100, True), (140, 512, False), *long):
        for out_dtype in {dtype, torch.float32}:
            shape = Shape(outputs, inputs, dtype, out_dtype, bias)
            x, weight = (t.to(device) for t in cancelling(18 if long and small else 110, shape, seed=3))
            offset = randn(outputs, device=device, dtype=dtype) if bias else None
            tiles = gpu_linear.tiles(dtype)
            linear_fns = [gpu_linear.ordered(tile, weight, offset, out_dtype) for tile in tiles]
            assert any(isinstance(f, gpu_linear.SplitKLinear) for f in linear_fns) == (inputs >= 4096)
            for linear_fn in linear_fns:  # partial sums add up to the same as summed products
                if not bias and out_dtype == dtype:
                    found, whole = partial_sums(linear_fn)(x[:17]), linear_fn(x[:17])
                    assert (found.dim() == 3) == isinstance(linear_fn, gpu_linear.SplitKLinear)
                    found = norm.add_parts_torch(found, dtype) if found.dim() == 3 else found
                    assert torch.equal(found, whole)
            expected = products.SLOW.make(weight, offset, out_dtype)(x)
            reference = linear_fns[0](x)
            torch.testing.assert_close(reference.float(), expected.float(), atol=0.05, rtol=0.05)
            in_pieces = [
                linear_fn for linear_fn, tile in zip(linear_fns, tiles, strict=True) if tile.pieces[1]
            ]
            for linear_fn in [*linear_fns[::4], *in_pieces] if small else linear_fns:
                if small:  # the interpreter sums each block of K separately
                    torch.testing.assert_close(linear_fn(x), reference, atol=0.05, rtol=0.05)
                    continue
                for count in (1, 6, 17, 70, 110):
                    assert torch.equal(linear_fn(x[:count]), reference[:count])
                assert torch.equal(linear_fn(x[13:20].clone()), reference[13:20])
        _check_sums(device, dtype, outputs, inputs, bias=bias)


def _check_sums(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int, *, bias: bool) -> None:
    """Products of ordinary numbers are within tolerance, for numbers of rows at and beyond tile sizes."""
    x = randn(110, inputs, device=device, dtype=dtype)
    weight = randn(outputs, inputs, device=device, dtype=dtype, seed=1) / 4
    offset = randn(outputs, device=device, dtype=dtype) if bias else None
    expected = x.double() @ weight.double().t() + (offset.double() if offset is not None else 0.0)
    size = inputs**0.5
    for tile in gpu_linear.tiles(dtype):
        linear_fn = gpu_linear.ordered(tile, weight, offset, torch.float32)
        for count in (18,) if device.type == "cpu" and not tile.pieces[1] else (65, 110):
            error = (linear_fn(x[:count]).double() - expected[:count]).abs().max().item() / size
            assert error < 1e-4, f"{tile.name}, {count} rows: {error:.1e}"
