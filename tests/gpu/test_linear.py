"""The exact planner on a GPU: rows do not depend on their batch, and certificates detect wrong candidates.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.matmul import certify, products
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.plan_cache import BucketLinear
from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.runtime import gpu

if torch.cuda.is_available() and gpu.available(torch.device("cuda")):
    from draftproof.kernels.norm.triton import add_rms_norm
    from draftproof.matmul.triton import linear as gpu_linear

COUNTS = (*range(1, 98), 129, 257, 513, 600, 1025, 2100)
BF16 = torch.bfloat16


def planner(
    device: torch.device, folder: Path, find_candidates: object = products.candidates
) -> LinearPlanner:
    return LinearPlanner(
        device,
        exact=True,
        max_rows=600,
        library=None,
        cache_dir=folder,
        find_candidates=find_candidates,  # type: ignore[arg-type]
    )


def norms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norms that may follow a product."""
    return add_rms_norm(x, residual, weight, 1e-6)


def split_k(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """Wrong on purpose: sums one half of K, then the other."""
    half = weight_NK.shape[1] // 2
    first, second = weight_NK[:, :half].contiguous(), weight_NK[:, half:].contiguous()
    tile = gpu_linear.tiles(weight_NK.dtype)[0]
    a = gpu_linear.OrderedLinear(tile, first, None, torch.float32)
    b = gpu_linear.OrderedLinear(tile, second, None, torch.float32)
    return lambda x: (a(x[:, :half].contiguous()) + b(x[:, half:].contiguous())).to(out_dtype)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "wide"),
    [
        (512, 2048, BF16, False),
        (1030, 4096, BF16, True),
        (512, 8192, BF16, True),  # in segments
        (1024, 4096, BF16, False),  # in segments, which the following norm adds up
        (100, 520, torch.float32, True),
        (100, 520, torch.float16, False),
    ],
)
def test_a_row_has_the_same_bits_at_every_number_of_rows(
    cuda: torch.device, tmp_path: Path, outputs: int, inputs: int, dtype: torch.dtype, wide: bool
) -> None:
    out_dtype = torch.float32 if wide else dtype
    made = planner(cuda, tmp_path)
    shape = Shape(outputs, inputs, dtype, out_dtype, wide)
    x, weight = (t.to(cuda) for t in certify.cancelling(max(COUNTS), shape, seed=5))
    bias = torch.randn(outputs, device=cuda).to(dtype) if wide else None
    product = made.pack(weight, bias, out_dtype=out_dtype)
    made.certify()
    alone = torch.cat([product(row) for row in x.split(1)])
    ones, met = torch.ones_like(alone[0]), set[int]()
    torch.cuda.synchronize()
    for rows in COUNTS:
        assert torch.equal(product(x[:rows]), alone[:rows]), f"{rows} rows"
        if not wide:
            partial_sums = product.partial_sums(x[:rows])
            met.add(partial_sums.dim())
            added, expected = (norms(y, alone[:rows], ones) for y in (partial_sums, alone[:rows]))
            assert all(map(torch.equal, added, expected)), f"{rows} rows"
    assert wide or (3 in met) == (gpu_linear.num_segments(outputs, inputs, dtype) > 1)
    assert torch.equal(product(x[3:12]), alone[3:12])
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(alone.double(), exact, atol=0.5, rtol=0.02)
    again = planner(cuda, tmp_path)
    second = again.pack(weight, bias, out_dtype=out_dtype)
    again.certify()
    assert again.report() == made.report() != []
    assert torch.equal(second(x[:9]), alone[:9])


def test_a_product_split_over_k_gets_no_certificate(cuda: torch.device, tmp_path: Path) -> None:
    def find(*_: object) -> list[Candidate]:
        return [*gpu_linear.candidates(torch.device("cuda"), BF16)[:3], Candidate("split", split_k)]

    shape = Shape(256, 4096, BF16, BF16, False)
    assert certify.certify(shape, find(), 64, cuda)["split"] == ()
    made = planner(cuda, tmp_path, find)
    _, weight = certify.cancelling(1, shape, seed=5)
    made.pack(weight.to(cuda))
    made.certify()
    assert "split" not in {row.candidate for row in made.report()}


def test_a_split_let_into_the_planner_changes_rows(cuda: torch.device) -> None:
    """Mutation: split-K is used from 24 rows on without a certificate. The comparison above must detect it."""
    shape = Shape(256, 4096, BF16, BF16, False)
    x, weight = (t.to(cuda) for t in certify.cancelling(64, shape, seed=5))
    ordered = gpu_linear.OrderedLinear(gpu_linear.tiles(BF16)[0], weight, None, BF16)
    linear_fns = {"ordered": ordered, "split": split_k(weight, None, BF16)}
    product = BucketLinear(linear_fns, dict.fromkeys(linear_fns, True), (16, 64), ("ordered", "split"))
    alone = torch.cat([product(row) for row in x.split(1)])
    assert torch.equal(product(x[:16]), alone[:16])
    assert not torch.equal(product(x[:24]), alone[:24])


def test_a_way_is_called_at_certified_numbers_of_rows_only(cuda: torch.device, tmp_path: Path) -> None:
    """Like cuBLAS, the candidate may sum in another order at some numbers of rows, also between certified ones."""
    called: set[int] = set()

    def sometimes(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        ordered = gpu_linear.OrderedLinear(gpu_linear.tiles(BF16)[0], weight, bias, out_dtype)
        split = split_k(weight, bias, out_dtype)

        def run(x: Tensor) -> Tensor:
            called.add(len(x))
            return ordered(x) if len(x) in (4, 16, 64) else split(x)

        return run

    slow = dataclasses.replace(gpu_linear.candidates(torch.device("cuda"), BF16)[0], name="slow", make=_twice)
    made = planner(cuda, tmp_path, lambda *_: [slow, Candidate("sometimes", sometimes)])
    _, weight = certify.cancelling(1, Shape(256, 4096, BF16, BF16, False), seed=5)
    product = made.pack(weight.to(cuda))
    made.certify()
    x, _ = certify.cancelling(600, product.shape, seed=6)
    called.clear()
    x = x.to(cuda)
    alone = torch.cat([product(row) for row in x.split(1)])
    for rows in (2, 3, 4, 5, 13, 16, 50, 64, 65, 600):
        assert torch.equal(product(x[:rows]), alone[:rows])
    assert called and called <= {4, 16, 64}


def _twice(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """The reference at ten times the cost."""
    ordered = gpu_linear.OrderedLinear(gpu_linear.tiles(BF16)[0], weight, bias, out_dtype)
    return lambda x: [ordered(x) for _ in range(10)][-1]
