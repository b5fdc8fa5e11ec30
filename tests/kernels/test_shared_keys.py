"""Operators of latent attention: regrouping parts of rows, and keys that are stored once and also read as values."""

from __future__ import annotations

import pytest
import torch

from draftproof.attention import registry
from draftproof.attention.exactness import AttentionShape
from draftproof.attention.reference import reference_attention
from draftproof.cache.pool import PagedKV, allocate
from draftproof.kernels import ops
from draftproof.matmul.grouped import EqualGroups
from draftproof.runtime import gpu, native

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "parts", "width"), [(1, 1, 3), (4, 3, 5), (7, 2, 16), (0, 2, 4)])
def test_parts_are_swapped_to_groups_and_back(
    table: ops.Ops, rows: int, parts: int, width: int, dtype: torch.dtype
) -> None:
    x = torch.arange(rows * parts * width).view(rows, parts * width).to(dtype)
    groups = table.swap(x, parts)
    assert groups.shape == (parts * rows, width)
    for part in range(parts):
        expected = x[:, part * width : (part + 1) * width]
        assert torch.equal(groups[part * rows : (part + 1) * rows], expected)
    if rows:
        assert torch.equal(table.swap(groups.view(parts, rows * width), rows).view(rows, -1), x)


def test_equal_groups_begin_where_the_one_before_ends() -> None:
    starts = EqualGroups(3, 8, CPU)
    assert [starts(rows).tolist() for rows in (0, 1, 8)] == [[0, 0, 0, 0], [0, 1, 2, 3], [0, 8, 16, 24]]
    assert starts(11).tolist() == [0, 11, 22, 33]  # more than the table held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(4, 32, 8), (2, 576, 64)])
def test_keys_are_stored_without_values_and_attended_to_as_both(
    table: ops.Ops, heads: int, dim: int, rotary: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, positions = 5, torch.tensor([0, 1, 2, -1, 3])
    qk = torch.randn(rows, (heads + 1) * dim, generator=generator).to(dtype)
    cos_sin = torch.randn(16, rotary, generator=generator)
    blocks = torch.tensor([[2, 1]], dtype=torch.int32)
    (layer,) = allocate([PagedKV(heads=1, head_dim=dim, shared=True)], blocks, 3, 2, dtype, CPU).layers
    slots = torch.zeros(rows, dtype=torch.int64)
    q = table.rope_store(qk, positions, slots, cos_sin, None, None, 1e-6, layer.k, None, blocks)
    both = torch.cat((qk, qk[:, -dim:]), 1)  # keys and values, for the cache that does not share them
    keys, values = torch.zeros_like(layer.k), torch.zeros_like(layer.k)
    expected = table.rope_store(both, positions, slots, cos_sin, None, None, 1e-6, keys, values, blocks)
    assert torch.equal(q, expected) and torch.equal(layer.k, keys) and layer.v is layer.k
    library = native.load() if table is not ops.TORCH else None
    out = registry.select(CPU, library)(q, layer.k, layer.v, blocks, slots, positions + 1, 0, 0.05)
    wanted = reference_attention(q, keys, keys, blocks, slots, positions + 1, 0, 0.05)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=1e-2)


def test_shared_keys_take_half_the_memory() -> None:
    shape = PagedKV(heads=1, head_dim=24)
    shared = PagedKV(heads=1, head_dim=24, shared=True)
    assert shape.bytes_per_token(torch.bfloat16) == 2 * shared.bytes_per_token(torch.bfloat16) == 96


def test_heads_too_large_for_a_gpu_are_refused_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda device: device.type == "cuda")
    cuda = torch.device("cuda")

    def shape(num_heads: int, head_dim: int) -> AttentionShape:
        return AttentionShape(num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, shared=True)

    registry.check_sizes(cuda, None, [shape(64, 256)])
    with pytest.raises(ValueError, match=r"group of 16 heads of size 576.*device='cpu'"):
        registry.check_sizes(cuda, None, [shape(16, 256), shape(16, 576)])
    with pytest.raises(ValueError, match="group of 128 heads of size 256"):
        registry.check_sizes(cuda, None, [shape(128, 256)])
    registry.check_sizes(CPU, None, [shape(128, 576)])
