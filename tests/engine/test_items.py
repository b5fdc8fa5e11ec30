"""Items of prompts: what tells them apart, which embeddings are kept, and where rows behind them stand."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from draftproof.attention.turns import Turns
from draftproof.engine.interface import Item
from draftproof.engine.items import ItemInput, ItemStore, Places, SlotItems, num_ahead

CPU = torch.device("cpu")


def store(max_bytes: int = 1 << 20) -> ItemStore:
    """A store of embeddings of two numbers, 8 bytes a row."""
    made = ItemStore(2, CPU, torch.float32, max_bytes)
    made.encoders["image"] = lambda tensors: tensors["a"]
    return made


def image(number: float, num_rows: int = 2) -> ItemInput:
    return ItemInput.of("image", {"a": torch.full((num_rows, 2), number)}, num_rows)


def grid(*axes: list[int], advance: int) -> Places:
    return Places(np.array(axes, dtype=np.int64), advance)


def test_whatever_embeddings_are_made_of_tells_items_apart() -> None:
    """Equal bytes under different names, shapes, types, kinds, numbers of rows and places."""
    zeros = torch.zeros(4)
    places = grid([0, 0], [0, 0], [0, 1], advance=2)
    forms: list[tuple[str, dict[str, Tensor], int, Places | None]] = [
        ("image", {"a": zeros}, 2, None),
        ("embeds", {"a": zeros}, 2, None),
        ("image", {"b": zeros}, 2, None),
        ("image", {"a": zeros.view(2, 2)}, 2, None),
        ("image", {"a": zeros.view(torch.int32)}, 2, None),
        ("image", {"a": zeros[:2], "b": zeros[2:]}, 2, None),
        ("image", {"a": zeros[:1], "b": zeros[1:]}, 2, None),
        ("image", {"a": zeros}, 3, None),
        ("image", {"a": zeros}, 2, places),
        ("image", {"a": zeros}, 2, places._replace(advance=3)),
        ("image", {"a": zeros}, 2, grid([0, 0], [0, 1], [0, 0], advance=2)),
        ("image", {"a": zeros + 1}, 2, None),
    ]
    contents = [ItemInput.of(*form).content for form in forms]
    assert len(set(contents)) == len(forms)
    assert contents == [ItemInput.of(*form).content for form in forms]
    turned = torch.arange(6.0).view(2, 3).t()
    assert (
        ItemInput.of("image", {"a": turned}, 2).content
        == ItemInput.of("image", {"a": turned.contiguous()}, 2).content
    )


def test_the_embeddings_used_last_are_kept_in_so_many_bytes() -> None:
    kept = store(max_bytes=32)  # two items of 16
    a, b, c, large = image(1), image(2), image(3), image(4, num_rows=9)
    made = []
    for given in (a, b, a, c, a, b, large, large, a):
        before = kept.num_encoded
        assert torch.equal(kept.rows(given), given.tensors["a"])
        made.append(kept.num_encoded > before)
        assert kept.num_bytes == sum(rows.nbytes for rows in kept._embeddings.values())
        assert kept.num_bytes <= 32 or len(kept._embeddings) == 1
    #               a     b     a      c     a      b     large large  a
    assert made == [True, True, False, True, False, True, True, False, True]


class Meeting(bytes):
    """A content that has been looked up and is about to be known: it waits for another thread to come as far."""

    barrier: threading.Barrier
    num_hashed = 0

    def __hash__(self) -> int:
        self.num_hashed += 1
        if self.num_hashed == 2:
            with contextlib.suppress(threading.BrokenBarrierError):  # nobody came: they are let in one by one
                self.barrier.wait(0.1)
        return super().__hash__()


def test_threads_that_hold_one_item_hold_the_same() -> None:
    """Else the one that is known may be forgotten while a request waits for the other."""
    kept, both = store(), list[ItemInput]()
    barrier = threading.Barrier(2)
    for _ in range(2):
        content = Meeting(image(1).content)
        content.barrier = barrier
        both.append(replace(image(1), content=content))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(kept.hold, both)
    assert first is second and kept.input(first.content) is first


def test_rows_behind_items_stand_where_the_items_end() -> None:
    """An item of 4 rows whose text goes on after 2, one of 2 rows whose text goes on after 5: places 2..5 and 7..8."""
    two = ItemInput.of(
        "image", {"a": torch.zeros(4, 2)}, 4, grid([0] * 4, [0, 0, 1, 1], [0, 1, 0, 1], advance=2)
    )
    far = ItemInput.of("image", {"a": torch.ones(2, 2)}, 2, grid([0, 4], [0, 0], [0, 0], advance=5))
    kept, turns = store(), Turns(torch.zeros(3, dtype=torch.int64))
    held = [kept.hold(two), kept.hold(far)]
    items = [Item(two.content, 2, 4), Item(far.content, 7, 2)]
    slots = SlotItems(kept, 3, 1, CPU, turns)
    for _ in range(2):  # a slot is given up, and taken by another
        slots.admit(1, items)
        assert turns.shift_S.tolist() == [0, -2 + 3, 0] and num_ahead(items, held) == 1
        axes = slots._axes[1].at(-1, 12)
        assert axes[0].tolist() == [-1, 0, 1, 2, 2, 2, 2, 4, 5, 9, 10, 11, 12]
        assert axes[1].tolist() == [-1, 0, 1, 2, 2, 3, 3, 4, 5, 5, 10, 11, 12]
        assert axes[2].tolist() == [-1, 0, 1, 2, 3, 2, 3, 4, 5, 5, 10, 11, 12]
        slots.release(1)
        assert turns.shift_S.tolist() == [0, 0, 0]
