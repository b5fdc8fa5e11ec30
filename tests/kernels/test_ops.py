"""The operators: compiled against twin, twin against plain formulas, and rows that do not depend on their batch.

Shapes: T rows, H width, D head size, S slots, B blocks per slot, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from draftproof.kernels import ops
from draftproof.runtime import native
from tests.slow import few

Threads = Callable[[int], contextlib.AbstractContextManager[None]]

ROWS = (0, 1, 2, 3, 7, 8, 9, 33)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HALVES = (torch.bfloat16, torch.float16)
EPS = 1e-6


@pytest.fixture
def compiled(library: native.Library) -> ops.Ops:
    return ops.select(torch.device("cpu"), library)


def data(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 64, 100, 513])
def test_norms_of_library_and_twin_agree_with_the_formula(
    compiled: ops.Ops, width: int, dtype: torch.dtype
) -> None:
    weight = data(width, dtype=dtype, seed=1)
    for rows in ROWS:
        x, residual = data(rows, width, dtype=dtype), data(rows, width, dtype=dtype, seed=2)
        total = (x.float() + residual.float()).to(dtype)
        for given, table in ((x, ops.TORCH), (x, compiled)):
            close(table.rms_norm(given, weight, EPS), _formula(given, weight))
            normed, sums = table.add_rms_norm(given, residual, weight, EPS)
            assert torch.equal(sums, total)
            close(normed, _formula(total, weight))


def _formula(x_TH: Tensor, weight_H: Tensor) -> Tensor:
    x = x_TH.double()
    scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (x * scale * weight_H.double()).to(x_TH.dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_norm_takes_weights_of_another_dtype(table: ops.Ops, dtype: torch.dtype) -> None:
    x, weight = data(3, 40, dtype=dtype), data(40, dtype=torch.float32)
    close(table.rms_norm(x, weight, EPS), _formula(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 48, 1000, 1025])
def test_silu_mul_agrees_with_the_formula(table: ops.Ops, width: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x = data(rows, 2 * width, dtype=dtype)
        gate, up = x.double().chunk(2, dim=-1)
        close(table.silu_mul(x), (torch.nn.functional.silu(gate) * up).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 48, 1000, 1025])
def test_gelu_mul_agrees_with_the_formula(table: ops.Ops, width: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        x = data(rows, 2 * width, dtype=dtype)
        gate, up = x.double().chunk(2, dim=-1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh")
        assert width * rows < 99 or (gelu - torch.nn.functional.gelu(gate)).abs().max() > 1e-4
        close(table.gelu_mul(x), (gelu * up).to(dtype))


def test_gelu_mul_of_large_numbers_is_finite(table: ops.Ops) -> None:
    gate = torch.tensor([[-1e20, -100.0, -6.0, 0.0, 6.0, 1e20]])
    out = table.gelu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    torch.testing.assert_close(
        out, torch.nn.functional.gelu(gate.double(), approximate="tanh").float(), atol=1e-7, rtol=1e-5
    )


@pytest.mark.parametrize("width", [1, 15, 4097])
def test_soft_cap_agrees_with_fp64_near_zero_and_far_from_it(table: ops.Ops, width: int) -> None:
    for rows in (0, 1, 3):
        for size in (1e-3, 1.0, 30.0, 1e4):
            logits = size * data(rows, width, dtype=torch.float32)
            expected = 30.0 * torch.tanh(logits.double() / 30.0)
            torch.testing.assert_close(table.soft_cap(logits, 30.0), expected.float(), atol=1e-12, rtol=1e-6)


def test_soft_cap_knows_infinities_and_nan(table: ops.Ops) -> None:
    inf = float("inf")
    found = table.soft_cap(torch.tensor([[inf, -inf, 0.0, float("nan")]]), 5.0)
    assert found[0, :3].tolist() == [5.0, -5.0, 0.0] and found[0, 3].isnan()


def test_silu_mul_of_large_numbers_is_finite(table: ops.Ops) -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4]])
    out = table.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 15, 4095, 4097, 9000])
def test_log_normalizer_agrees_with_fp64(table: ops.Ops, width: int) -> None:
    for rows in (0, 1, 3):
        logits = 5 * data(rows, width, dtype=torch.float32)
        torch.testing.assert_close(table.log_normalizer(logits), logits.double().logsumexp(-1).float())


def test_log_normalizer_knows_infinities_and_nan(table: ops.Ops) -> None:
    inf = float("inf")
    logits = torch.full((4, 9000), -inf)
    logits[1, 8000] = -100.0  # a finite entry after pieces of nothing but -inf
    logits[2, 1] = inf
    logits[3, 5000] = float("nan")
    found = table.log_normalizer(logits)
    assert found[:3].tolist() == [-inf, -100.0, inf]
    assert found[3].isnan()


@dataclass
class Store:
    """Inputs of rope_store: two KV heads, three query heads."""

    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    norm: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor

    def run(
        self,
        operators: ops.Ops,
        rows: slice = slice(None),
        v_norm: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k cache, v cache) after storing `rows` into empty caches."""
        k_cache, v_cache = torch.zeros_like(self.k_cache), torch.zeros_like(self.v_cache)
        q = operators.rope_store(
            *(self.qkv[rows], self.positions[rows], self.slots[rows], self.cos_sin, self.norm, self.norm),
            *(EPS, k_cache, v_cache, self.table, v_norm, shift),
        )
        return q, k_cache, v_cache


def store_case(rows: int, dim: int, rotary: int, dtype: torch.dtype, norm: bool, cache: torch.dtype) -> Store:
    """Rows of three slots at scattered positions, including block boundaries; every fifth row is padding."""
    block_size, blocks = 8, 5
    positions = (torch.arange(rows) * 7 + 7) % (block_size * blocks)
    positions[::5] = -1
    shape = (1 + 3 * blocks, 2, block_size, dim)
    return Store(
        qkv=data(rows, 7 * dim, dtype=dtype),
        positions=positions,
        slots=torch.arange(rows) % 3,
        cos_sin=data(block_size * blocks, rotary, dtype=torch.float32, seed=4) / 3,
        norm=data(dim, dtype=dtype, seed=5) if norm else None,
        k_cache=torch.zeros(shape, dtype=cache),
        v_cache=torch.zeros(shape, dtype=cache),
        table=(1 + torch.randperm(3 * blocks, generator=torch.Generator().manual_seed(6)))
        .to(torch.int32)
        .view(3, blocks),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotary"), [(16, 16), (32, 32), (64, 64), (128, 128), (64, 16), (80, 32), (20, 6)]
)
def test_rope_store_of_library_agrees_with_twin(
    compiled: ops.Ops, dim: int, rotary: int, dtype: torch.dtype
) -> None:
    for rows in ROWS:
        for norm in (False, True):
            case = store_case(rows, dim, rotary, dtype, norm, dtype)
            for actual, expected in zip(case.run(compiled), case.run(ops.TORCH), strict=True):
                close(actual, expected)


def test_rope_store_rotates_pairs_half_a_head_apart(table: ops.Ops) -> None:
    case = store_case(3, 16, 8, torch.float32, False, torch.float32)
    q, k_cache, v_cache = case.run(table)
    position, slot = int(case.positions[1]), int(case.slots[1])
    cos, sin = case.cos_sin[position, :4], case.cos_sin[position, 4:]
    x = case.qkv[1, :16]
    low, high = x[:4], x[4:8]
    expected = torch.cat([low * cos - high * sin, high * cos + low * sin, x[8:]])
    torch.testing.assert_close(q[1, 0], expected)
    block = int(case.table[slot, position // 8])
    assert torch.equal(v_cache[block, 1, position % 8], case.qkv[1, 6 * 16 :])
    assert k_cache[block, 0, position % 8].abs().sum() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_store_turns_a_slots_rows_by_other_positions_than_they_are_kept_at(
    table: ops.Ops, dtype: torch.dtype
) -> None:
    case = store_case(23, 64, 16, dtype, True, dtype)
    case = replace(case, cos_sin=torch.cat([case.cos_sin] * 2))
    shift = torch.tensor([0, 3, 17])
    q, k_cache, v_cache = case.run(table, shift=shift)
    assert not torch.equal(q, case.run(table)[0])
    for slot, by in enumerate(shift.tolist()):
        turned = replace(case, cos_sin=case.cos_sin.roll(-by, 0))
        expected_q, expected_k, expected_v = turned.run(table)
        rows, blocks = case.slots == slot, case.table[slot].long()
        assert torch.equal(q[rows], expected_q[rows])
        assert torch.equal(k_cache[blocks], expected_k[blocks])
        assert torch.equal(v_cache[blocks], expected_v[blocks])


def test_rope_store_norms_values_where_they_have_a_norm(table: ops.Ops) -> None:
    case = store_case(7, 20, 6, torch.float32, True, torch.float32)
    (plain_q, plain_k, plain_v), weight = case.run(table), torch.ones(20)
    for normed in (weight, data(20, dtype=torch.float32, seed=9)):
        q, k_cache, v_cache = case.run(table, v_norm=normed)
        assert torch.equal(q, plain_q) and torch.equal(k_cache, plain_k)
        close(v_cache.view(-1, 20), table.rms_norm(plain_v.view(-1, 20), normed, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_store_of_queries_alone_stores_nothing(table: ops.Ops, dtype: torch.dtype) -> None:
    """For a layer that reads another layer's keys; the cache passed to it has no heads."""
    case = store_case(11, 32, 16, dtype, True, dtype)
    whole, k_cache, _ = case.run(table)
    none = k_cache[:, :0]
    alone = table.rope_store(
        *(case.qkv[:, : 3 * 32].contiguous(), case.positions, case.slots, case.cos_sin, case.norm, None),
        *(EPS, none, none, case.table),
    )
    assert torch.equal(alone, whole)


def test_rope_store_leaves_padding_rows_and_other_blocks_alone(table: ops.Ops) -> None:
    case = store_case(11, 32, 32, torch.bfloat16, True, torch.bfloat16)
    q, k_cache, v_cache = case.run(table)
    padding = case.positions < 0
    assert padding.sum() == 3
    assert (q[padding] == 0).all()
    assert (q[~padding] != 0).any(dim=-1).all()
    written = {
        (int(case.table[s, p // 8]), int(p % 8))
        for s, p in zip(case.slots.tolist(), case.positions.tolist(), strict=True)
        if p >= 0
    }
    for cache in (k_cache, v_cache):
        touched = {(int(b), int(o)) for b, o in (cache != 0).any(-1).any(1).nonzero()}
        assert touched == written


@pytest.mark.parametrize("dtype", HALVES)
def test_rope_store_writes_a_cache_of_another_dtype(table: ops.Ops, dtype: torch.dtype) -> None:
    case = store_case(7, 32, 32, torch.float32, True, dtype)
    wide = store_case(7, 32, 32, torch.float32, True, torch.float32)
    (_, k_cache, v_cache), (_, k_wide, v_wide) = case.run(table), wide.run(table)
    assert torch.equal(k_cache, k_wide.to(dtype)) and torch.equal(v_cache, v_wide.to(dtype))


@pytest.mark.parametrize("count", few([1, 2, 3, 6, 14], 1, 14))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch_at_any_number_of_threads(
    table: ops.Ops, threads: Threads, dtype: torch.dtype, count: int
) -> None:
    calls = _row_calls(table, dtype)
    with threads(1):
        alone = [torch.cat([call(slice(i, i + 1)) for i in range(33)]) for call in calls]
    with threads(count):
        for rows in (2, 3, 7, 8, 33):
            for call, expected in zip(calls, alone, strict=True):
                for first in (0, 33 - rows):
                    found = call(slice(first, first + rows))
                    assert torch.equal(_bits(found), _bits(expected[first : first + rows]))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def _row_calls(table: ops.Ops, dtype: torch.dtype) -> list[Callable[[slice], Tensor]]:
    """Each operator as a function of a slice of 33 fixed rows, at odd widths and at widths split over threads."""

    def norm(width: int) -> Callable[[slice], Tensor]:
        x, weight = data(33, width, dtype=dtype), data(width, dtype=dtype, seed=1)
        return lambda rows: torch.cat(
            [table.rms_norm(x[rows], weight, EPS), *table.add_rms_norm(x[rows], x[rows], weight, EPS)], dim=1
        )

    def silu(width: int) -> Callable[[slice], Tensor]:
        x = data(33, 2 * width, dtype=dtype)
        return lambda rows: table.silu_mul(x[rows])

    def gelu(width: int) -> Callable[[slice], Tensor]:
        x = data(33, 2 * width, dtype=dtype)
        return lambda rows: table.gelu_mul(x[rows])

    def cap(width: int) -> Callable[[slice], Tensor]:
        logits = 20 * data(33, width, dtype=torch.float32)
        return lambda rows: table.soft_cap(logits[rows], 30.0)

    def normalizer(width: int) -> Callable[[slice], Tensor]:
        logits = data(33, width, dtype=torch.float32)
        return lambda rows: table.log_normalizer(logits[rows])

    def store(dim: int) -> Callable[[slice], Tensor]:
        case = store_case(33, dim, dim // 2, dtype, True, dtype)
        return lambda rows: case.run(table, rows)[0]

    return [
        norm(37),
        norm(2050),
        silu(37),
        silu(1500),
        gelu(37),
        gelu(1500),
        cap(99),
        cap(20001),
        normalizer(99),
        normalizer(20001),
        store(64),
        store(20),
    ]
