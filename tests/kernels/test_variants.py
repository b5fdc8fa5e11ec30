"""Builds for other processors: in fp32, and in bf16 that is widened, they have one another's bits.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.attention.compiled import CompiledAttention
from draftproof.attention.exactness import scores_check, values_check
from draftproof.kernels import certify, grouped, native, ops, products
from draftproof.kernels.certify import Shape
from draftproof.kernels.exactness import Check
from tests.kernels.cases import ATTENTION, MADE

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = {"avx2", "bmi2", "f16c", "fma"}
SIZES = [(1, 1), (1, 130), (15, 33), (33, 51), (70, 129), (257, 64)]  # outputs, inputs
ROWS = (*range(1, 20), 33)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, library: native.Library) -> native.Library:
    """The library of a processor with AVX2."""
    flags = set(native.processor().split())
    if not flags >= {"avx512f", *NARROW}:
        pytest.skip("this processor has one variant: AVX-512 and AVX2 are needed to compare two")
    compiler = native.find_compiler()
    assert compiler is not None
    folder = tmp_path_factory.mktemp("narrow")
    sources = [path for path in native.source_files() if path.suffix == ".cpp"]
    variant = ("-march=x86-64-v3", "-pthread")
    return native.Library(native.compile_library(compiler, variant, sources, folder, None), "narrow")


@pytest.fixture(scope="module")
def wide(library: native.Library) -> native.Library:
    """The library of this processor without its bf16 instructions."""
    found = native.load(widened=True)
    assert found is not None
    return found


def outputs(check: Check, version: Any) -> list[Tensor]:
    return list(check.run(version, torch.arange(check.num_rows)))


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        kind = as_int[one.element_size()]
        assert torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(MADE))
def test_operators_of_two_builds_agree(
    narrow: native.Library, wide: native.Library, kind: str, dtype: torch.dtype
) -> None:
    operator, make = MADE[kind]
    check = make(dtype, CPU)
    found, expected = (getattr(ops.select(CPU, library), operator) for library in (narrow, wide))
    assert_bits(outputs(check, found), outputs(check, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [scores_check, values_check])
@pytest.mark.parametrize("name", list(ATTENTION))
def test_attention_of_two_builds_agrees(
    narrow: native.Library, wide: native.Library, name: str, make: Callable[..., Check], dtype: torch.dtype
) -> None:
    check = make(ATTENTION[name], 16, dtype, CPU)
    found, expected = (outputs(check, CompiledAttention(library)) for library in (narrow, wide))
    assert_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_products_of_two_builds_agree(
    narrow: native.Library, wide: native.Library, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    x_TK, weight_NK = certify.cancelling(
        max(ROWS), Shape(num_outputs, num_inputs, dtype, dtype, False), seed=5
    )
    bias_N = torch.randn(num_outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    for out_dtype, bias in itertools.product({dtype, torch.float32}, (None, bias_N)):
        found, expected = (
            products.CompiledLinear(library, weight_NK, bias, out_dtype) for library in (narrow, wide)
        )
        for rows in ROWS:
            assert_bits([found(x_TK[:rows])], [expected(x_TK[:rows])])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_of_two_builds_agree(
    narrow: native.Library, wide: native.Library, dtype: torch.dtype
) -> None:
    shape = Shape(70, 51, dtype, torch.float32, False)
    x_TK, weight_NK = certify.cancelling(40, shape, seed=5)
    weights = [weight_NK, -weight_NK, weight_NK.flip(0)]
    found, expected = (grouped.CompiledGroups(library, 3, weights, shape) for library in (narrow, wide))
    for starts in ((0, 40, 40, 40), (0, 1, 20, 40), (0, 0, 7, 40)):
        starts_E1 = torch.tensor(starts)
        assert_bits([found(x_TK, starts_E1)], [expected(x_TK, starts_E1)])


def test_fp32_has_the_same_bits_with_the_processors_bf16_instructions(
    library: native.Library, wide: native.Library
) -> None:
    x_TK, weight_NK = certify.cancelling(9, Shape(70, 129, torch.float32, torch.float32, False), seed=5)
    found, expected = (
        products.CompiledLinear(one, weight_NK, None, torch.float32) for one in (library, wide)
    )
    assert_bits([found(x_TK)], [expected(x_TK)])


def test_a_build_names_its_bf16_arithmetic(library: native.Library, wide: native.Library) -> None:
    """Which is what decides its bits: builds of other names differ."""
    assert wide.bf16_arithmetic == "widened"
    x_TK, weight_NK = certify.cancelling(40, Shape(70, 520, torch.bfloat16, torch.bfloat16, False), seed=5)
    found, expected = (
        products.CompiledLinear(one, weight_NK, None, torch.float32)(x_TK) for one in (library, wide)
    )
    assert torch.equal(found, expected) == (library.bf16_arithmetic == "widened")


def test_a_widened_product_is_the_sum_in_order(wide: native.Library, tmp_path: Path) -> None:
    """By the formula: one fused multiply-add after the other, which fp64 does without rounding."""
    x_TK, weight_NK = certify.cancelling(3, Shape(17, 51, torch.bfloat16, torch.bfloat16, False), seed=5)
    sums_TN = torch.zeros(3, 17)
    for k in range(51):
        product_TN = x_TK[:, k, None].double() * weight_NK[:, k].double()
        sums_TN = (sums_TN.double() + product_TN).float()
    assert torch.equal(products.CompiledLinear(wide, weight_NK, None, torch.float32)(x_TK), sums_TN)
