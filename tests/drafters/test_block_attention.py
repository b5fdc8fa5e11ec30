"""Attention of a draft block's rows: to the context within the window, and to their block as far as the layer allows.

Shapes: R blocks of J rows, N = R * J rows, L positions, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftproof.attention import registry
from draftproof.attention.base import AttentionSpec, BlockRows, Rows
from draftproof.cache.pool import PagedKV
from draftproof.models.rope import RopeConfig, cos_sin_table
from draftproof.runtime import native
from tests.helpers import CPU, Paged

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 5
ANCHORS = [7, 1, 30, 21]
TABLE = cos_sin_table(RopeConfig(theta=10000.0, rotary_dim=DIM), 64, CPU)
SPEC = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, cos_sin_PD=TABLE)


def paged(backend: str) -> Paged:
    entry = registry.BACKENDS[backend]
    if "cpu" not in entry.devices:
        pytest.skip("not for this device")
    library = native.load() if entry.needs_library else None
    if entry.needs_library and library is None:
        pytest.skip("no C++ compiler")
    shape = PagedKV(heads=KV_HEADS, head_dim=DIM)
    return Paged([shape], num_slots=len(ANCHORS), block_size=4, library=library, backend=entry.build(library))


def block_rows(dead: int | None = None) -> Rows:
    """A block at each anchor, slot by slot; `dead`: index of the block that is padding."""
    positions_RJ = torch.tensor(ANCHORS)[:, None] + torch.arange(SIZE)
    if dead is not None:
        positions_RJ[dead] = -1
    ends_RJ = positions_RJ + 1
    rows_RJ = torch.arange(positions_RJ.numel()).view(-1, SIZE)
    block = BlockRows(ends_RJ[:, -1:].expand_as(ends_RJ).contiguous().view(-1), rows_RJ.t().contiguous())
    return Rows(positions_RJ.view(-1), rows_RJ.view(-1) // SIZE, ends_RJ.view(-1), block)


def visible(anchor: int, row: int, window: int, causal: bool) -> list[int]:
    context = range(max(0, anchor - window) if window else 0, anchor)
    return [*context, *range(anchor, anchor + (row + 1 if causal else SIZE))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 6, 40])
@pytest.mark.parametrize("backend", registry.BACKENDS)
def test_rows_see_their_context_and_their_block(backend: str, window: int, causal: bool) -> None:
    cache = paged(backend)
    spec = replace(SPEC, window=window, causal=causal)
    generator = torch.Generator().manual_seed(1)
    width = (HEADS + 2 * KV_HEADS) * DIM
    # every position before the anchors, and garbage after them, as rejected drafts leave it
    context = [(slot, i) for slot, a in enumerate(ANCHORS) for i in range(min(a + 9, 64))]
    slots_T, positions_T = (torch.tensor([row[i] for row in context]) for i in (0, 1))
    kv_TX = torch.randn(len(context), 2 * KV_HEADS * DIM, generator=generator)
    assert cache.attention(positions_T, slots_T).store(0, kv_TX, spec).shape == (len(context), 0, DIM)
    attn = cache.attention(positions_T[:1], slots_T[:1])
    attn.rows = rows = block_rows()
    qkv_NX = torch.randn(len(rows.slots_T), width, generator=generator)
    ours_NX = attn(0, qkv_NX, spec)
    q_NHD = rotated(qkv_NX.view(-1, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS], rows.positions_T)
    kv = cache.cache.layers[0]
    cached = [x if x.shape[1] == KV_HEADS else x.transpose(1, 2) for x in (kv.k, kv.v)]
    table_SB = cache.cache.block_table_SB.long()
    for n, (slot, position) in enumerate(zip(rows.slots_T.tolist(), rows.positions_T.tolist(), strict=True)):
        anchor = ANCHORS[slot]
        seen = torch.tensor(visible(anchor, position - anchor, window, causal))
        keys, values = (x[table_SB[slot, seen // 4], :, seen % 4].repeat_interleave(2, 1) for x in cached)
        weights_HL = torch.einsum("hd,lhd->hl", q_NHD[n], keys).mul(spec.scale).softmax(-1)
        expected = torch.einsum("hl,lhd->hd", weights_HL, values).reshape(-1)
        torch.testing.assert_close(ours_NX[n], expected, rtol=1e-4, atol=1e-5)


def rotated(x_NHD: Tensor, positions_N: Tensor) -> Tensor:
    cos, sin = TABLE[positions_N][:, None].chunk(2, -1)
    low, high = x_NHD.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["compiled", "sdpa"])
def test_a_padded_block_writes_nothing_and_disturbs_nobody(backend: str, causal: bool) -> None:
    spec = replace(SPEC, window=6, causal=causal)
    qkv_NX = torch.randn(len(ANCHORS) * SIZE, (HEADS + 2 * KV_HEADS) * DIM)
    outs = []
    for dead in (None, 2):
        cache = paged(backend)
        attn = cache.attention(torch.tensor([0]), torch.tensor([0]))
        attn.rows = block_rows(dead)
        outs.append(attn(0, qkv_NX, spec).view(-1, SIZE, HEADS * DIM))
        written = cache.cache.layers[0].k[cache.cache.block_table_SB[2].long()].count_nonzero()
        assert (written > 0) == (dead is None)
    assert torch.equal(outs[0][[0, 1, 3]], outs[1][[0, 1, 3]])
    assert not outs[1][2].any()
