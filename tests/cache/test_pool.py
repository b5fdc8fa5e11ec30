"""The memory behind the paged cache."""

from __future__ import annotations

import pytest
import torch

from draftproof.cache.pool import LayerKV, PagedCache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_are_cleared_in_every_layer_and_nothing_else_is(dtype: torch.dtype) -> None:
    table_SB = torch.zeros(2, 4, dtype=torch.int32)
    shared = torch.ones(6, 3, 4, 5, dtype=dtype)
    layers = [
        LayerKV(torch.ones(6, 2, 4, 8, dtype=dtype), torch.ones(6, 2, 8, 4, dtype=dtype), table_SB),
        LayerKV(shared, shared, table_SB),
    ]
    PagedCache(layers, table_SB).zero([1, 4])
    for layer in layers:
        for kept in (layer.k, layer.v):
            assert [bool(kept[block].any()) for block in range(6)] == [True, False, True, True, False, True]
            assert bool((kept[[0, 2, 3, 5]] == 1).all())


def test_a_block_that_is_not_there_is_not_cleared() -> None:
    table_SB = torch.zeros(2, 4, dtype=torch.int32)
    cache = PagedCache([LayerKV(torch.ones(3, 2), torch.ones(3, 2), table_SB)], table_SB)
    with pytest.raises(AssertionError):
        cache.zero([3])
