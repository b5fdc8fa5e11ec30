"""Attention computed text by text equals attention over the whole row with the mask of EAGLE-3's training.

Shapes: T row, P passes, H heads, K key heads, D head size.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.train.attention import Places, attend

HEADS, KEY_HEADS, SIZE = 6, 2, 8


def mask_of(lengths: list[int], num_rows: int, num_passes: int) -> Tensor:
    """The mask [T, P x T]: earlier tokens of the same text in the first pass, the token itself in each later pass."""
    texts = [n for n, length in enumerate(lengths) for _ in range(length)]
    text_T = torch.tensor((texts + list(range(-num_rows, 0)))[:num_rows])  # unused rows see only themselves
    first_TT = (text_T[:, None] == text_T[None]).tril()
    return torch.cat([first_TT] + [torch.eye(num_rows, dtype=torch.bool)] * (num_passes - 1), 1)


@pytest.mark.parametrize("num_passes", [1, 2, 4])
@pytest.mark.parametrize(("lengths", "num_rows"), [([5, 9, 1], 15), ([5, 9, 4], 20), ([6, 9, 4, 3], 17)])
def test_texts_side_by_side_are_the_row_under_its_mask(
    lengths: list[int], num_rows: int, num_passes: int
) -> None:
    """A full row, one with unused positions, and one that cuts a text and has no room for another."""
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, num_rows, SIZE, requires_grad=True)
    key = torch.randn(1, KEY_HEADS, num_passes * num_rows, SIZE, requires_grad=True)
    value = torch.randn(1, KEY_HEADS, num_passes * num_rows, SIZE, requires_grad=True)
    places = Places.of(lengths, num_rows, torch.device("cpu"))
    found, _ = attend(None, query, key, value, None, scaling=0.3, places=places)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask_of(lengths, num_rows, num_passes), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    num_used = min(sum(lengths), num_rows)
    torch.testing.assert_close(found[:, :num_used], wanted[:, :num_used])

    weight = torch.randn_like(wanted[:, :num_used])
    slopes = [
        torch.autograd.grad((out[:, :num_used] * weight).sum(), [query, key, value])
        for out in (found, wanted)
    ]
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs)
