"""The Triton attention against the reference, with all kinds of tiles and chunks, and broken values in masked rows."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from draftproof.attention.triton.paged import LaunchConfig, Tiling, TritonAttention
from tests.attention import test_attention as attention


def place(rows: attention.Pass, device: torch.device) -> attention.Pass:
    tensors = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    return dataclasses.replace(
        rows, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)}
    )


def few(shape: attention.Shape, dtype: torch.dtype) -> attention.Pass:
    """`attention.mixed` with fewer rows."""
    rows = [
        (0, 55),
        (0, 56),
        (0, 57),
        (0, 0),
        (1, 255),
        (1, 256),
        (1, 257),
        (1, 0),
        (2, 1),
        (2, 64),
        (2, 300),
    ]
    return attention.make_pass(shape, [end for _, end in rows], [slot for slot, _ in rows], dtype)


def check_attention(device: torch.device, dtype: torch.dtype) -> None:
    small = device.type == "cpu"
    split, loop = TritonAttention(), TritonAttention(Tiling(split_rows=1))
    one_chunk_a_run = TritonAttention(Tiling(some=LaunchConfig(runs=1000)))
    for shape in (*attention.SHAPES[1::6], attention.SHAPES[-1]) if small else attention.SHAPES:
        rows = place((few if small else attention.mixed)(shape, dtype), device)
        attention.check_equals_reference(split, rows)
        together = rows.run(split)
        assert (together[rows.ends == 0] == 0).all()
        assert torch.equal(rows.run(loop), together)
        assert torch.equal(rows.run(one_chunk_a_run), together)
        apart = [10, 3, 6, 0]  # rows of different slots, so each may be its own tile
        assert torch.equal(rows.run(split.begin(1), apart), together[apart])
        assert torch.equal(rows.run(loop.begin(1), apart), together[apart])
        for part in ([10, 3, 6, 2, 8],) if small else (slice(3, 4), slice(5, 10), [10, 3, 6, 2, 8]):
            assert torch.equal(rows.run(split, part), together[part])
            assert torch.equal(rows.run(loop, part), together[part])


def check_attention_of_prompts(device: torch.device, dtype: torch.dtype) -> None:
    """Tiles of at least 64 rows x heads, which have a separate loop for steps without a mask. The data are whole
    numbers, whose sums do not round, so the interpreter's order of summation does not matter."""
    dtype = torch.float16 if dtype == torch.float32 else dtype  # in fp32 there are no such tiles
    prompt, small = (
        TritonAttention(Tiling(split_rows=1, prompt_rows=1)),
        TritonAttention(Tiling(split_rows=1)),
    )
    ends = [1, 2, *range(60, 67), *range(190, 250), 0, *range(250, 262)]
    for shape in (attention.SHAPES[i] for i in ((0, 1) if device.type == "cpu" else (0, 1, 6, 9))):
        made = attention.make_pass(shape, ends, [0] * len(ends), dtype)
        attention.check_equals_reference(prompt, place(made, device))
        q, k, v = torch.zeros_like(made.q), torch.zeros_like(made.k_cache), made.v_cache.round()
        q[..., 0], k[..., 0] = 1.0, made.k_cache[..., 0].round()
        made = dataclasses.replace(made, q=q, k_cache=k, v_cache=v, scale=math.log(2))
        # Broken values: none; one that only the last rows see; an early one of one head; both.
        for broken in ([], [255], [100], [100, 255]):
            for position in broken:
                block, offset = int(made.table[0, position // shape.block_size]), position % shape.block_size
                first = min(position % 2, shape.kv_heads - 1)
                v[block, first:, offset, 3] = float("nan" if position % 2 else "inf")
            rows = place(made, device)
            found, expected = rows.run(prompt), rows.run(small)
            assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any() == bool(broken)
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def check_attention_adds_up_many_chunks(device: torch.device, dtype: torch.dtype) -> None:
    """More chunks than are merged at once: 19 and 18 chunks of 16 keys."""
    rows = place(attention.make_pass(attention.Shape(), [300, 280, 3, 0], [0, 1, 2, 0], dtype), device)
    step = 32 if dtype == torch.float32 else 16  # halved for fp32
    split = TritonAttention(Tiling(chunk=16, step=step, some=LaunchConfig(runs=1000)))
    attention.check_equals_reference(split, rows)
    loop = TritonAttention(Tiling(chunk=16, step=step, split_rows=1))
    assert torch.equal(rows.run(split), rows.run(loop))


def check_attention_is_not_poisoned(device: torch.device, dtype: torch.dtype) -> None:
    for backend in (TritonAttention(), TritonAttention(Tiling(split_rows=1))):
        for end in (258,) if device.type == "cpu" else (12, 66, 258):
            ends = list(range(end - 5, end + 1))
            rows = place(attention.make_pass(attention.Shape(), ends, [0] * 6, dtype), device)
            attention.check_later_rows_do_not_reach_earlier_ones(backend, rows)
        rows = attention.make_pass(attention.Shape(window=40), [70, 257], [1, 2], dtype)
        attention.check_only_visible_keys_matter(backend, place(rows, device))


def check_attention_of_unlike_layers(device: torch.device, dtype: torch.dtype) -> None:
    """Layers with different numbers of heads in one pass: they share a plan only if its runs are equal."""
    tiling = Tiling(chunk=16, step=32 if dtype == torch.float32 else 16)
    begun = TritonAttention(tiling).begin(1)
    for kv_heads in (1, 4):
        rows = place(attention.make_pass(attention.Shape(kv_heads=kv_heads), [300], [0], dtype), device)
        assert torch.equal(rows.run(begun), rows.run(TritonAttention(tiling).begin(1)))


def check_attention_to_broken_values(device: torch.device, dtype: torch.dtype) -> None:
    """A row that sees an infinite value gets NaN there, alone or next to a row that sees another broken value."""
    made = attention.make_pass(attention.Shape(), [258, 260], [0, 0], dtype)
    for position, dim, value in ((257, 3, float("inf")), (259, 1, float("nan"))):
        block, offset = int(made.table[0, position // 16]), position % 16
        made.v_cache[block, :, offset, dim] = value
    rows, backend = place(made, device), TritonAttention()
    together = rows.run(backend)
    for row in (0, 1):
        alone = rows.run(backend, slice(row, row + 1))[0]
        assert torch.equal(alone.isnan(), together[row].isnan()) and alone.isnan().any()
        assert torch.equal(alone.nan_to_num(), together[row].nan_to_num())


def check_attention_weighs_alike_whatever_kernel_adds(device: torch.device, dtype: torch.dtype) -> None:
    """Weights so far apart that their ratio is not a normal number: scores 0, 70, 140, in chunks of 32 keys."""
    made = attention.make_pass(attention.Shape(heads=1, kv_heads=1, dim=16), [96], [0], dtype)
    q, k, v = torch.zeros_like(made.q), torch.zeros_like(made.k_cache), torch.zeros_like(made.v_cache)
    q[..., 0] = 1.0
    for position in range(96):
        at = int(made.table[0, position // 16]), slice(None), position % 16
        k[*at, 0], v[*at, 0], v[*at, 1] = 70 * (position // 32), 1.0, float(position < 32)
    rows = place(dataclasses.replace(made, q=q, k_cache=k, v_cache=v, scale=math.log(2)), device)
    tilings = ({"some": LaunchConfig(runs=1000)}, {"some": LaunchConfig(runs=1)}, {"split_rows": 0})
    found = [rows.run(TritonAttention(Tiling(chunk=32, step=32, **t))) for t in tilings]  # type: ignore[arg-type]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
