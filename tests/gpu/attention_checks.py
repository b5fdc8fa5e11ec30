"""The Triton attention against the reference, cut in every way, and with broken values where nobody may look."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from draftproof.kernels.gpu.attention import Cut, Tiling, TritonAttention
from tests.conformance import test_attention as attention


def place(rows: attention.Pass, device: torch.device) -> attention.Pass:
    tensors = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    return dataclasses.replace(
        rows, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, Tensor)}
    )


def few(shape: attention.Shape, dtype: torch.dtype) -> attention.Pass:
    """`attention.mixed`, but fewer rows."""
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
    one_chunk_a_run = TritonAttention(Tiling(some=Cut(runs=1000)))
    for shape in (*attention.SHAPES[1::6], attention.SHAPES[-1]) if small else attention.SHAPES:
        rows = place((few if small else attention.mixed)(shape, dtype), device)
        attention.check_equals_reference(split, rows)
        together = rows.run(split)
        assert (together[rows.ends == 0] == 0).all()
        assert torch.equal(rows.run(loop), together)
        assert torch.equal(rows.run(one_chunk_a_run), together)
        apart = [10, 3, 6, 0]  # of different slots, so each may be a tile of its own
        assert torch.equal(rows.run(split.begin(1), apart), together[apart])
        assert torch.equal(rows.run(loop.begin(1), apart), together[apart])
        for part in ([10, 3, 6, 2, 8],) if small else (slice(3, 4), slice(5, 10), [10, 3, 6, 2, 8]):
            assert torch.equal(rows.run(split, part), together[part])
            assert torch.equal(rows.run(loop, part), together[part])


def check_attention_adds_up_many_chunks(device: torch.device, dtype: torch.dtype) -> None:
    """More than are added up at once: 19 and 18 of 16 keys."""
    rows = place(attention.make_pass(attention.Shape(), [300, 280, 3, 0], [0, 1, 2, 0], dtype), device)
    step = 32 if dtype == torch.float32 else 16  # which that type halves
    split = TritonAttention(Tiling(chunk=16, step=step, some=Cut(runs=1000)))
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
