"""Every Triton kernel on a GPU against its torch twin, at the sizes of real models too, and inside CUDA graphs.

Shapes: T rows, D head size, S slots, B blocks per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from draftproof.attention import registry
from draftproof.kernels import ops
from draftproof.runtime import gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
if torch.cuda.is_available() and gpu.available(torch.device("cuda")):
    from draftproof.attention.triton.paged import LaunchConfig, Tiling, TritonAttention
    from tests.attention import test_attention as attention
    from tests.gpu import attention_checks, checks

    CHECKS = checks.CHECKS
else:
    CHECKS = ()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_kernel_does_what_its_twin_does(
    check: Callable[[torch.device, torch.dtype], None], cuda: torch.device, dtype: torch.dtype
) -> None:
    check(cuda, dtype)


def test_a_gpu_gets_these_kernels(cuda: torch.device) -> None:
    assert ops.select(cuda, None).name == "triton"
    assert next(iter(registry.versions(cuda, None))) == "triton"


class Llama:
    """Attention of the 8B shape: S slots with scattered blocks, contexts of any length up to `longest`."""

    heads, kv_heads, dim, block_size = 32, 8, 128, 16

    def __init__(self, device: torch.device, slots: int = 6, longest: int = 4096) -> None:
        generator = torch.Generator(device).manual_seed(0)
        per_slot = longest // self.block_size
        size = (slots * per_slot + 1, self.kv_heads, self.block_size, self.dim)
        self.device, self.longest = device, longest
        self.k, self.v = (torch.randn(size, generator=generator, device=device).bfloat16() for _ in range(2))
        order = torch.randperm(slots * per_slot, generator=generator, device=device) + 1
        self.table = order.view(slots, per_slot).int()
        self.generator = generator

    def queries(self, rows: int) -> Tensor:
        size = (rows, self.heads, self.dim)
        return 2 * torch.randn(size, generator=self.generator, device=self.device).bfloat16()

    def run(self, backend: object, q: Tensor, slots: Tensor, ends: Tensor, window: int = 0) -> Tensor:
        return backend(q, self.k, self.v, self.table, slots, ends, window, self.dim**-0.5)  # type: ignore[operator]


@pytest.mark.parametrize("window", [0, 1000])
def test_prefill_verify_and_decode_rows_agree(cuda: torch.device, window: int) -> None:
    """Bit for bit: a prompt's rows in one pass, in chunks, six and one at a time, among rows of other requests."""
    model, backend = Llama(cuda), TritonAttention()
    rows = 700
    q = model.queries(rows)
    ends = torch.arange(1, rows + 1, device=cuda) + 1700
    slots = torch.full((rows,), 3, device=cuda)
    whole = model.run(backend, q, slots, ends, window)
    for size in (1, 6, 7, 64, 100, 129, 300):
        for first in range(0, rows, 233):
            part = slice(first, first + size)
            found = model.run(backend, q[part], slots[part], ends[part], window)
            assert torch.equal(found, whole[part]), size
    others = torch.randint(0, 6, (90,), device=cuda)
    mixed_q = torch.cat([model.queries(40), q[100:106], model.queries(44), q[:200]])
    mixed_slots = torch.cat([others[:40], slots[:6], others[40:84], slots[:200]])
    mixed_ends = torch.cat([others[:40] * 700, ends[100:106], others[40:84] * 3 + 1, ends[:200]])
    mixed = model.run(backend, mixed_q, mixed_slots, mixed_ends, window)
    assert torch.equal(mixed[40:46], whole[100:106]) and torch.equal(mixed[90:], whole[:200])
    assert (mixed[:40][mixed_ends[:40] == 0] == 0).all()


@pytest.mark.parametrize(
    ("form", "cut"),
    [
        ({"most": 16}, {}),
        ({"most": 64, "num_warps": 8}, {}),
        ({"num_stages": 2}, {}),
        ({"registers": 128}, {}),
        ({"runs": 1}, {}),
        ({"runs": 16}, {}),
        ({}, {"split_rows": 1}),
        ({"most": 64}, {"split_rows": 1, "prompt_rows": 1}),
    ],
    ids=str,
)
def test_tiling_changes_no_bit(cuda: torch.device, form: dict[str, int], cut: dict[str, int]) -> None:
    model = Llama(cuda)
    slots = torch.arange(5, device=cuda).repeat_interleave(6)
    ends = torch.tensor([1, 255, 1024, 3000, 4090], device=cuda).repeat_interleave(6) + torch.arange(
        6, device=cuda
    ).repeat(5)
    q = model.queries(30)
    expected = model.run(TritonAttention(), q, slots, ends)
    of_all = dict.fromkeys(("some", "decode", "prompt"), LaunchConfig(**form))  # type: ignore[arg-type]
    backend = TritonAttention(Tiling(**of_all, **cut))  # type: ignore[arg-type]
    assert torch.equal(model.run(backend, q, slots, ends), expected)
    apart = list(range(0, 30, 6))  # rows of different requests, which one program may finish
    found = model.run(backend.begin(1), q[apart], slots[apart], ends[apart])
    assert torch.equal(found, expected[apart])


@pytest.mark.parametrize("dim", [64, 256, 512])
def test_prompts_of_any_head_size_fit(cuda: torch.device, dim: int) -> None:
    """Rows have the same bits in a long pass and alone."""
    shape = attention.Shape(heads=8, kv_heads=2, dim=dim)
    ends = [1 + i % attention.LONGEST for i in range(600)]
    rows = attention_checks.place(
        attention.make_pass(shape, ends, [i // 300 for i in range(600)], torch.bfloat16), cuda
    )
    part = slice(250, 270)
    assert torch.equal(rows.run(TritonAttention(), part), rows.run(TritonAttention())[part])


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [8, 200])
def test_a_graph_reads_lengths_on_the_device(cuda: torch.device, rows: int) -> None:
    """Captured once and replayed with other rows, it gives the eager call's bits: each replay makes the plan anew."""
    model, backend = Llama(cuda), TritonAttention()
    q, slots = model.queries(rows), torch.zeros(rows, dtype=torch.int64, device=cuda)
    ends = torch.ones(rows, dtype=torch.int64, device=cuda)

    def two_layers() -> Tensor:
        attend = backend.begin()
        return model.run(attend, q, slots, ends) + model.run(attend, q, slots, ends)

    two_layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = two_layers()
    for new_slots, new_ends in (
        (torch.arange(rows) // 3 % 6, 50 + 17 * torch.arange(rows)),
        (torch.full((rows,), 4), 2000 + torch.arange(rows)),
        (torch.arange(rows) % 2, torch.where(torch.arange(rows) < rows // 2, 4096, 0)),
    ):
        slots.copy_(new_slots)
        ends.copy_(new_ends)
        with no_synchronisation():
            graph.replay()
            expected = two_layers()
        assert torch.equal(out, expected)


def test_sampling_does_not_wait_for_the_device(cuda: torch.device) -> None:
    table = ops.select(cuda, None)
    logits = torch.randn(4, 5000, device=cuda)
    given = checks.draw_inputs(4, cuda, top_k=20, top_p=0.9)
    table.sample(logits, *given, None)
    with no_synchronisation():
        table.sample(logits, *given, None)
        table.log_normalizer(logits)


def test_an_attention_chunk_taken_from_the_batch_is_caught(cuda: torch.device) -> None:
    rows = attention_checks.place(attention.mixed(attention.Shape(), torch.float32), cuda)

    def wrong(q: Tensor, *others: object) -> Tensor:
        """Wrong: sums keys in chunks whose size depends on the number of rows."""
        backend = TritonAttention(Tiling(chunk=64 if len(q) > 8 else 256))
        return backend(q, *others)  # type: ignore[arg-type]

    with pytest.raises(AssertionError):
        attention.check_rows_are_independent(wrong, rows)  # type: ignore[arg-type]
    attention.check_rows_are_independent(TritonAttention(), rows)


def test_layers_of_a_pass_share_a_plan(cuda: torch.device) -> None:
    model, attend = Llama(cuda), TritonAttention().begin()
    slots, ends = torch.arange(3, device=cuda), torch.tensor([5, 300, 2000], device=cuda)
    for layer in range(2):
        q = model.queries(3) + layer
        assert torch.equal(model.run(attend, q, slots, ends), model.run(TritonAttention(), q, slots, ends))
    assert len(attend._plans) == 1
