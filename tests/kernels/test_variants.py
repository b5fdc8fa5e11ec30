"""Builds for other processors give equal bits in fp32, and in bf16 that is widened.

`built` is each library that a wheel contains for this architecture; those that this processor cannot run are skipped,
naming what it lacks. Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.attention.compiled.backend import CompiledAttention
from draftproof.attention.exactness import scores_check, values_check
from draftproof.kernels import ops
from draftproof.kernels.exactness import Check
from draftproof.matmul import certify, grouped, products
from draftproof.matmul.spec import Shape
from draftproof.runtime import compiling, native
from draftproof.runtime.compiling import Variant
from tests.kernels import bits
from tests.kernels.bits import CPU, DTYPES, outputs
from tests.kernels.cases import ATTENTION, MADE
from tests.slow import few

SIZES = [(1, 1), (1, 130), (15, 33), (33, 51), (70, 129), (257, 64)]  # outputs, inputs
ROWS = (*range(1, 20), 33)
VARIANTS = compiling.VARIANTS.get(platform.machine(), ())


def of_variant(variant: Variant, folder: Path) -> native.Library:
    """A variant's library as in a wheel: the installed wheel's, if draftproof is installed from one."""
    lacks = variant.needs - set(compiling.processor().split())
    if lacks:
        pytest.skip(f"{variant.name} not run: this processor lacks {', '.join(sorted(lacks))}")
    path = native.PREBUILT / f"{variant.name}.so"
    if not path.exists():
        compiler = compiling.find_compiler()
        assert compiler is not None
        path = compiling.compile_library(compiler, variant.flags, folder, link=compiling.PORTABLE_LINK)
    return native.Library(path, variant.name)


@pytest.fixture(scope="module", params=few(VARIANTS, VARIANTS[0]), ids=lambda v: v.name)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, library: native.Library
) -> native.Library:
    return of_variant(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(scope="module")
def wide(library: native.Library) -> native.Library:
    """The library of this processor without its bf16 instructions."""
    found = native.load(widened=True)
    assert found is not None
    return found


def peer(
    built: native.Library, wide: native.Library, library: native.Library, dtype: torch.dtype
) -> native.Library:
    """The library of this processor that `built` must equal in every bit."""
    if dtype != torch.bfloat16 or built.bf16_arithmetic == "widened":
        return wide
    if built.bf16_arithmetic != library.bf16_arithmetic:
        pytest.skip(f"nothing beside {built.build_key} computes bf16 by {built.bf16_arithmetic} here")
    return library


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        kind = as_int[one.element_size()]
        assert torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(MADE))
def test_operators_of_two_builds_agree(
    built: native.Library, wide: native.Library, library: native.Library, kind: str, dtype: torch.dtype
) -> None:
    operator, make = MADE[kind]
    check = make(dtype, CPU)
    found, expected = (
        getattr(ops.select(CPU, one), operator) for one in (built, peer(built, wide, library, dtype))
    )
    assert_bits(outputs(check, found), outputs(check, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [scores_check, values_check])
@pytest.mark.parametrize("name", list(ATTENTION))
def test_attention_of_two_builds_agrees(
    built: native.Library,
    wide: native.Library,
    library: native.Library,
    name: str,
    make: Callable[..., Check],
    dtype: torch.dtype,
) -> None:
    check = make(ATTENTION[name], 16, dtype, CPU)
    found, expected = (
        outputs(check, CompiledAttention(one)) for one in (built, peer(built, wide, library, dtype))
    )
    assert_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_products_of_two_builds_agree(
    built: native.Library,
    wide: native.Library,
    library: native.Library,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
) -> None:
    x_TK, weight_NK = certify.cancelling(
        max(ROWS), Shape(num_outputs, num_inputs, dtype, dtype, False), seed=5
    )
    bias_N = torch.randn(num_outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    for out_dtype, bias in itertools.product({dtype, torch.float32}, (None, bias_N)):
        found, expected = (
            products.CompiledLinear(one, weight_NK, bias, out_dtype)
            for one in (built, peer(built, wide, library, dtype))
        )
        for rows in ROWS:
            assert_bits([found(x_TK[:rows])], [expected(x_TK[:rows])])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_of_two_builds_agree(
    built: native.Library, wide: native.Library, library: native.Library, dtype: torch.dtype
) -> None:
    shape = Shape(70, 51, dtype, torch.float32, False)
    x_TK, weight_NK = certify.cancelling(40, shape, seed=5)
    weights = [weight_NK, -weight_NK, weight_NK.flip(0)]
    found, expected = (
        grouped.CompiledGroups(one, 3, weights, shape) for one in (built, peer(built, wide, library, dtype))
    )
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
    """The arithmetic determines the bits: builds with other names differ."""
    assert wide.bf16_arithmetic == "widened"
    x_TK, weight_NK = certify.cancelling(40, Shape(70, 520, torch.bfloat16, torch.bfloat16, False), seed=5)
    found, expected = (
        products.CompiledLinear(one, weight_NK, None, torch.float32)(x_TK) for one in (library, wide)
    )
    assert torch.equal(found, expected) == (library.bf16_arithmetic == "widened")


def test_a_widened_product_is_the_sum_in_order(wide: native.Library, tmp_path: Path) -> None:
    """The sum is one fused multiply-add after another, which fp64 computes without rounding."""
    x_TK, weight_NK = certify.cancelling(3, Shape(17, 51, torch.bfloat16, torch.bfloat16, False), seed=5)
    sums_TN = torch.zeros(3, 17)
    for k in range(51):
        product_TN = x_TK[:, k, None].double() * weight_NK[:, k].double()
        sums_TN = (sums_TN.double() + product_TN).float()
    assert torch.equal(products.CompiledLinear(wide, weight_NK, None, torch.float32)(x_TK), sums_TN)


def test_a_variant_has_the_arithmetic_that_its_name_promises(built: native.Library) -> None:
    (variant,) = [v for v in VARIANTS if v.name == built.build_key]
    assert (built.bf16_arithmetic == "widened") == variant.widened


def test_the_bits_are_those_of_every_machine(built: native.Library) -> None:
    """On machines with fused multiply-adds; the file was written on one of these."""
    found, expected = bits.hashes(built), json.loads(bits.FILE.read_text())
    assert found == {name: expected[name] for name in found}
    assert len(found) == len(expected) * (3 if built.bf16_arithmetic == "widened" else 2) // 3
