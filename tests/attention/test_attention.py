"""Every registered attention backend: right, and law 2's: a row is a function of its context.

Shapes: T rows, D head size, S slots, B blocks per slot.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftproof.attention import registry
from draftproof.attention.base import AttentionBackend
from draftproof.attention.chunked import TREES, ChunkedAttention
from draftproof.attention.exactness import AttentionShape, scores_check, values_check
from draftproof.attention.reference import REFERENCE, reference_attention
from draftproof.attention.sdpa import SDPA
from draftproof.runtime import native
from tests.helpers import is_exact
from tests.slow import few

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SLOTS, LONGEST = 3, 300


@pytest.fixture(
    params=[name for name, entry in registry.BACKENDS.items() if "cpu" in entry.devices and entry.is_exact]
)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    entry = registry.BACKENDS[request.param]
    library = native.load() if entry.needs_library else None
    if entry.needs_library and library is None:
        pytest.skip("no C++ compiler")
    return entry.build(library)


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    window: int = 0


@dataclass(frozen=True)
class Pass:
    """Rows over a cache in which every place, seen or not, holds something."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    slots: Tensor
    ends: Tensor
    window: int
    scale: float

    def run(self, backend: AttentionBackend, rows: slice | list[int] = slice(None)) -> Tensor:
        return backend(
            *(self.q[rows], self.k_cache, self.v_cache, self.table, self.slots[rows], self.ends[rows]),
            *(self.window, self.scale),
        )


def make_pass(shape: Shape, ends: list[int], slots: list[int], dtype: torch.dtype, seed: int = 0) -> Pass:
    generator = torch.Generator().manual_seed(seed)
    per_slot = -(-LONGEST // shape.block_size)
    blocks = 1 + SLOTS * per_slot
    size = (blocks, shape.kv_heads, shape.block_size, shape.dim)
    table = 1 + torch.randperm(SLOTS * per_slot, generator=generator).to(torch.int32)
    return Pass(
        q=(2 * torch.randn(len(ends), shape.heads, shape.dim, generator=generator)).to(dtype),
        k_cache=torch.randn(size, generator=generator).to(dtype),
        v_cache=torch.randn(size, generator=generator).to(dtype),
        table=table.view(SLOTS, per_slot),
        slots=torch.tensor(slots, dtype=torch.int64),
        ends=torch.tensor(ends, dtype=torch.int64),
        window=shape.window,
        scale=shape.dim**-0.5,
    )


def mixed(shape: Shape, dtype: torch.dtype) -> Pass:
    """A prefill chunk, a verify pass, single rows on both sides of the chunk borders, padding among them."""
    prefill = [(0, end) for end in range(55, 75)]
    verify = [(1, end) for end in range(254, 263)]
    single = [(2, end) for end in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257, LONGEST)]
    rows = [*prefill, (0, 0), *verify, (1, 0), *single]
    return make_pass(shape, [end for _, end in rows], [slot for slot, _ in rows], dtype)


SHAPES = [
    Shape(),
    Shape(window=40),
    Shape(window=1),
    Shape(heads=2, kv_heads=2, dim=16),
    Shape(heads=8, kv_heads=1, dim=64),
    Shape(heads=40, kv_heads=1, dim=32, window=70),
    Shape(heads=6, kv_heads=2, dim=128, block_size=32),
    Shape(heads=3, kv_heads=1, dim=20, block_size=7, window=33),
    Shape(heads=4, kv_heads=4, dim=64, block_size=1),
    Shape(heads=2, kv_heads=1, dim=256, window=33),
    Shape(heads=4, kv_heads=2, dim=512),
]


def check_equals_reference(backend: AttentionBackend, rows: Pass) -> None:
    found, expected = rows.run(backend), rows.run(reference_attention)
    bound = TOLERANCE[rows.q.dtype]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), atol=bound, rtol=bound)


def check_rows_are_independent(backend: AttentionBackend, rows: Pass) -> None:
    """Bit for bit: alone, in halves, shuffled, in full, and with other rows' queries not numbers."""
    count = len(rows.ends)
    together = rows.run(backend)
    alone = torch.cat([rows.run(backend, slice(i, i + 1)) for i in range(count)])
    assert torch.equal(together, alone)
    half = count // 2
    halves = torch.cat([rows.run(backend, slice(half)), rows.run(backend, slice(half, count))])
    assert torch.equal(halves, together)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(rows.run(backend, order), together[order])
    poisoned = dataclasses.replace(rows, q=rows.q.clone())
    poisoned.q[::2] = float("nan")
    assert torch.equal(poisoned.run(backend)[1::2], together[1::2])


def is_certified(backend: AttentionBackend, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether an engine on this machine would use it, at torch's present number of threads."""
    sizes = AttentionShape(
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.dim, window=shape.window
    )
    made = [
        make(sizes, shape.block_size, dtype, torch.device("cpu")) for make in (scores_check, values_check)
    ]
    return all(is_exact(check, backend, torch.get_num_threads()) for check in made)


def by_construction(backend: AttentionBackend) -> bool:
    """Whether it owes its exactness to nobody's library."""
    if isinstance(backend, ChunkedAttention):
        return backend.products is TREES
    return backend is not SDPA


def check_only_visible_keys_matter(backend: AttentionBackend, rows: Pass) -> None:
    """Bit for bit: whatever lies past a row's end, before its window or in other slots, NaN and infinity included."""
    for i in range(len(rows.ends)):
        expected = rows.run(backend, slice(i, i + 1))
        for junk in (float("nan"), float("inf"), 7.0):
            hidden = _hide_from(rows, i, junk)
            assert torch.equal(hidden.run(backend, slice(i, i + 1)), expected)


def check_later_rows_do_not_reach_earlier_ones(backend: AttentionBackend, rows: Pass) -> None:
    """Bit for bit: a draft row whose key and value are not finite, in one pass with the rows before it."""
    together = rows.run(backend)
    last = int(rows.ends.max())
    poisoned = dataclasses.replace(rows, k_cache=rows.k_cache.clone(), v_cache=rows.v_cache.clone())
    block, offset = (
        int(rows.table[rows.slots[0], (last - 1) // _block_size(rows)]),
        (last - 1) % _block_size(rows),
    )
    poisoned.k_cache[block, :, offset] = float("nan")
    poisoned.v_cache[block, :, offset] = float("nan")
    found = poisoned.run(backend)
    earlier = rows.ends < last
    assert earlier.any() and torch.equal(found[earlier], together[earlier])
    assert found[~earlier].isnan().all()


def _block_size(rows: Pass) -> int:
    return rows.k_cache.shape[2]


def _hide_from(rows: Pass, row: int, junk: float) -> Pass:
    """A copy of the pass with `junk` wherever `row` must not look."""
    end, slot = int(rows.ends[row]), int(rows.slots[row])
    start = max(0, end - rows.window) if rows.window else 0
    k_cache, v_cache = torch.full_like(rows.k_cache, junk), torch.full_like(rows.v_cache, junk)
    for position in range(start, end):
        block, offset = int(rows.table[slot, position // _block_size(rows)]), position % _block_size(rows)
        k_cache[block, :, offset] = rows.k_cache[block, :, offset]
        v_cache[block, :, offset] = rows.v_cache[block, :, offset]
    return dataclasses.replace(rows, k_cache=k_cache, v_cache=v_cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_backend_equals_the_reference(backend: AttentionBackend, shape: Shape, dtype: torch.dtype) -> None:
    rows = mixed(shape, dtype)
    check_equals_reference(backend, rows)
    assert (rows.run(backend)[rows.ends == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", few(SHAPES, SHAPES[1], SHAPES[7]), ids=str)
def test_rows_are_independent(backend: AttentionBackend, shape: Shape, dtype: torch.dtype) -> None:
    """A backend that calls a library's products is looked at where it has its certificate: elsewhere nobody uses it."""
    if not by_construction(backend) and not is_certified(backend, shape, dtype):
        pytest.skip("not certified on this processor, so no engine uses it")
    check_rows_are_independent(backend, mixed(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [Shape(), Shape(window=40), Shape(dim=20, block_size=7)], ids=str)
def test_only_visible_keys_matter(backend: AttentionBackend, shape: Shape, dtype: torch.dtype) -> None:
    check_only_visible_keys_matter(backend, make_pass(shape, [1, 16, 64, 70, 257], [0, 1, 2, 0, 1], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("end", [12, 66, 258])
def test_later_rows_do_not_reach_earlier_ones(
    backend: AttentionBackend, dtype: torch.dtype, end: int
) -> None:
    ends = list(range(end - 5, end + 1))
    check_later_rows_do_not_reach_earlier_ones(backend, make_pass(Shape(), ends, [0] * 6, dtype))


@pytest.mark.parametrize("dtype", few(DTYPES, torch.bfloat16))
def test_the_number_of_threads_does_not_matter(backend: AttentionBackend, dtype: torch.dtype) -> None:
    shape = Shape(heads=8, kv_heads=4, dim=64)
    counts: tuple[int, ...] = (1, 2, 3, 6, 14)
    if not by_construction(backend):
        if not is_certified(backend, shape, dtype):
            pytest.skip("not certified on this processor, so no engine uses it")
        counts = (1, 2, 3)  # certificates are for these, and for an engine's own number
    rows = mixed(shape, dtype)
    before = torch.get_num_threads()
    found = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append((rows.run(backend), rows.run(backend, slice(3, 4))))
    finally:
        torch.set_num_threads(before)
    for together, one in found:
        assert torch.equal(together, found[0][0])
        assert torch.equal(one, found[0][0][3:4])


def test_no_rows_give_no_rows(backend: AttentionBackend) -> None:
    assert make_pass(Shape(), [], [], torch.float32).run(backend).shape == (0, 128)


def attention_with_chunks_of_the_batch(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table_SB: Tensor,
    slots_T: Tensor,
    context_lens_T: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Wrong on purpose: keys are summed in chunks whose size depends on the number of rows."""
    out = []
    chunk = 8 * max(1, len(context_lens_T))
    for q_HD, slot, end in zip(q_THD.float(), slots_T.tolist(), context_lens_T.tolist(), strict=True):
        start = max(0, end - window) if window else 0
        positions = torch.arange(start, end)
        places = table_SB[slot, positions // k_cache.shape[2]].long(), positions % k_cache.shape[2]
        group = q_HD.shape[0] // k_cache.shape[1]
        k = k_cache[places[0], :, places[1]].float().repeat_interleave(group, dim=1)
        v = v_cache[places[0], :, places[1]].float().repeat_interleave(group, dim=1)
        weights = torch.exp((q_HD * k).sum(-1) * scale)
        total, summed = torch.zeros(q_HD.shape[0]), torch.zeros_like(q_HD)
        for w, x in zip(weights.split(chunk), v.split(chunk), strict=True):
            total, summed = total + w.sum(0), summed + (w[..., None] * x).sum(0)
        out.append((summed / total.clamp(min=1e-30)[:, None]).to(q_THD.dtype).flatten())
    return torch.stack(out)


def attention_that_reads_one_key_too_many(*arguments: object) -> Tensor:
    """Wrong on purpose."""
    q, k, v, table, slots, ends, window, scale = arguments
    assert isinstance(ends, Tensor)
    return reference_attention(q, k, v, table, slots, ends + (ends > 0), window, scale)  # type: ignore[arg-type]


def test_the_checks_catch_a_batch_dependent_chunk() -> None:
    rows = make_pass(Shape(), [40, 200, 290], [0, 1, 2], torch.float32)
    check_equals_reference(attention_with_chunks_of_the_batch, rows)
    with pytest.raises(AssertionError):
        check_rows_are_independent(attention_with_chunks_of_the_batch, rows)


def test_the_checks_catch_one_key_too_many() -> None:
    rows = make_pass(Shape(), [40, 100, 200], [0, 1, 2], torch.float32)
    check_rows_are_independent(attention_that_reads_one_key_too_many, rows)
    with pytest.raises(AssertionError):
        check_equals_reference(attention_that_reads_one_key_too_many, rows)
    with pytest.raises(AssertionError):
        check_only_visible_keys_matter(attention_that_reads_one_key_too_many, rows)


def test_selecting_a_backend_prefers_the_fastest_and_explains_refusals() -> None:
    cpu = torch.device("cpu")
    assert registry.select(cpu, None) is registry.BACKENDS["sdpa"].build(None)
    assert registry.select(cpu, None, "reference") is REFERENCE
    with pytest.raises(ValueError, match="did you mean 'sdpa'"):
        registry.select(cpu, None, "spda")
    with pytest.raises(
        ValueError,
        match="without a C\\+\\+ compiler; usable here: sdpa, chunked, elementwise, torch_sdpa, reference",
    ):
        registry.select(cpu, None, "compiled")
