"""Compressed bf16 weights: every weight comes back as it was, and products have the bits of weights packed as they are.

The latter is how the grouped product reads its weights.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.matmul import certify, grouped, linear, products
from draftproof.matmul.spec import Shape
from draftproof.runtime import native
from tests.kernels.test_variants import VARIANTS, of_variant
from tests.slow import few

Threads = Callable[[int], contextlib.AbstractContextManager[None]]

BF16 = torch.bfloat16
BLOCK = 32  # inputs and outputs of a block
ROWS = (1, 2, 3, 4, 5, 8, 9, 13, 33)
SIZES = [(1, 1), (31, 33), (64, 130), (33, 95), (257, 64)]


@pytest.fixture(scope="module", params=("here", "widened", *few([v.name for v in VARIANTS], "x86-64-v3")))
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, library: native.Library
) -> native.Library:
    """A library that compresses."""
    name = request.param
    found: native.Library | None = library
    if name == "widened":
        found = native.load(widened=True)
    elif name != "here":
        found = of_variant(next(v for v in VARIANTS if v.name == name), tmp_path_factory.mktemp(name))
    assert found is not None
    if products.packed_weight(found, torch.ones(1, 1, dtype=BF16))[1] is None:
        pytest.skip(
            f"{name} keeps bf16 weights as they are: AMX tiles read them, or it has no shuffles of bytes"
        )
    return found


def every_number(*, sorted_: bool) -> Tensor:
    """All 65536, [256, 256]: sorted, so that a block has at most 16 high bytes, or shuffled, so that it has more."""
    bits = torch.arange(1 << 16)
    if sorted_:  # eight by eight blocks of 1024 numbers in a row
        blocks = bits.view(8, 8, BLOCK, BLOCK).transpose(1, 2)
        return blocks.reshape(256, 256).to(torch.int16).view(BF16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))
    return bits[order].view(256, 256).to(torch.int16).view(BF16)


def expanded(library: native.Library, packed: Tensor, starts: Tensor, like_NK: Tensor) -> Tensor:
    weight_NK = torch.full_like(like_NK, -7.0)
    expand = library.function("dp_product_expand", "pppii")
    expand(packed.data_ptr(), starts.data_ptr(), weight_NK.data_ptr(), *like_NK.shape)
    return weight_NK


def compressed(library: native.Library, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    packed, starts = products.packed_weight(library, weight_NK)
    assert starts is not None
    return packed, starts


def mixed(num_outputs: int, num_inputs: int) -> Tensor:
    """Like trained weights, with numbers of every kind in some blocks only."""
    generator = torch.Generator().manual_seed(num_outputs)
    weight_NK = torch.randn(num_outputs, num_inputs, generator=generator) / 50
    weight_NK[:BLOCK, -BLOCK:] *= 2.0 ** torch.randint(
        -60, 60, (1, min(BLOCK, num_inputs)), generator=generator
    )
    weight_NK[-1, 0], weight_NK[0, -1] = -0.0, 0.0
    return weight_NK.to(BF16)


@pytest.mark.parametrize("sorted_", [True, False])
def test_every_number_comes_back(built: native.Library, sorted_: bool) -> None:
    weight_NK = every_number(sorted_=sorted_)
    packed, starts = compressed(built, weight_NK)
    found_NK = expanded(built, packed, starts, weight_NK)
    assert torch.equal(found_NK.view(torch.int16), weight_NK.view(torch.int16))
    blocks = weight_NK.nbytes // (2 * BLOCK * BLOCK)
    assert (
        packed.nbytes
        == int(starts[-1])
        == 256 // BLOCK * 128 + blocks * BLOCK**2 * (3 if sorted_ else 4) // 2
    )


def test_blocks_of_both_kinds_come_back_beside_one_another(built: native.Library) -> None:
    weight_NK = every_number(sorted_=True)
    raw_NK = every_number(sorted_=False)
    for number in range(0, 64, 3):
        n, k = (number // 8 * BLOCK, number % 8 * BLOCK)
        weight_NK[n : n + BLOCK, k : k + BLOCK] = raw_NK[n : n + BLOCK, k : k + BLOCK]
    for num_outputs, num_inputs in ((256, 256), (255, 255), (33, 97), (1, 1)):
        part_NK = weight_NK[:num_outputs, :num_inputs].contiguous()
        found_NK = expanded(built, *compressed(built, part_NK), part_NK)
        assert torch.equal(found_NK.view(torch.int16), part_NK.view(torch.int16))


SMALLEST = (
    (torch.arange(40 * 70) % 256).to(torch.int16).view(BF16).view(40, 70)
)  # subnormal: the high byte is zero


@pytest.mark.parametrize(
    "given", [SMALLEST, torch.zeros(40, 70), torch.full((40, 70), -0.0), torch.ones(40, 70)]
)
def test_a_block_of_one_high_byte_is_compressed(built: native.Library, given: Tensor) -> None:
    weight_NK = given.to(BF16)
    packed, starts = compressed(built, weight_NK)
    assert packed.nbytes == 2 * (64 + 3 * BLOCK * BLOCK * 3 // 2)
    found_NK = expanded(built, packed, starts, weight_NK)
    assert torch.equal(found_NK.view(torch.int16), weight_NK.view(torch.int16))


def assert_bits(found: Tensor, expected: Tensor) -> None:
    kind = torch.int16 if found.dtype == BF16 else torch.int32
    assert torch.equal(found.view(kind), expected.view(kind))


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_products_have_the_bits_of_a_weight_packed_as_it_is(
    built: native.Library, size: tuple[int, int], out_dtype: torch.dtype, threads: Threads
) -> None:
    shape = Shape(*size, BF16, out_dtype, False)
    x_TK, cancelling_NK = certify.cancelling(max(ROWS), shape, seed=5)
    for weight_NK in (cancelling_NK, mixed(*size)):
        whole = grouped.CompiledGroups(built, 1, [weight_NK], shape)
        linear_fn = products.CompiledLinear(built, weight_NK, None, out_dtype)
        for rows in ROWS:
            expected_TN = whole(x_TK[:rows], torch.tensor([0, rows]))
            for count in (1, 2, 3):
                with threads(count):
                    assert_bits(linear_fn(x_TK[:rows]), expected_TN)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_products_with_every_number_have_the_same_bits(built: native.Library, rows: int) -> None:
    """NaN and infinity among them, so each input is multiplied alone."""
    for weight_NK in (every_number(sorted_=True), every_number(sorted_=False)):
        column_N1 = weight_NK.reshape(-1, 1)[::7].contiguous()
        shape = Shape(len(column_N1), 1, BF16, torch.float32, False)
        x_T1 = torch.linspace(-2.0, 3.0, rows)[:, None].to(BF16)
        expected_TN = grouped.CompiledGroups(built, 1, [column_N1], shape)(x_T1, torch.tensor([0, rows]))
        assert_bits(products.CompiledLinear(built, column_N1, None, torch.float32)(x_T1), expected_TN)


def test_more_rows_than_a_panel_have_the_same_bits(built: native.Library) -> None:
    shape = Shape(100, 1030, BF16, torch.float32, False)
    x_TK, _ = certify.cancelling(150, shape, seed=5)
    weight_NK = mixed(100, 1030)
    expected_TN = grouped.CompiledGroups(built, 1, [weight_NK], shape)(x_TK, torch.tensor([0, 150]))
    assert_bits(products.CompiledLinear(built, weight_NK, None, torch.float32)(x_TK), expected_TN)


def test_the_planner_says_what_is_read_and_held(built: native.Library, tmp_path: Path) -> None:
    planner = linear.LinearPlanner(
        torch.device("cpu"), exact=True, max_rows=8, library=built, cache_dir=tmp_path
    )
    weight_NK = 1 + torch.rand(64, 64)  # few exponents: every block can be compressed
    packed = [planner.pack(weight_NK.to(BF16), kept=kept) for kept in (False, True)]
    packed.append(planner.pack(weight_NK))
    planner.certify()
    assert planner.num_packed == 3 and planner.packed(1, 3) == packed[1:]
    num_stored, num_packed = 64 * 64 * 2, 2 * (64 + 2 * BLOCK * BLOCK * 3 // 2)
    assert [linear.weight_bytes for linear in packed] == [num_packed, num_packed, 2 * num_stored]
    assert [linear.held_bytes for linear in packed] == [num_packed - num_stored, num_packed, 0]
