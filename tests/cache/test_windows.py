"""Blocks of layers that see a window: what no row can see is given back, and is never served as a prefix's."""

from __future__ import annotations

import random

import pytest

from draftproof.cache.pages import ROOT, PageAllocator
from draftproof.cache.windows import MARGIN, WindowPages, usable_by_all


def test_pages_go_once_no_row_can_see_them() -> None:
    pages = WindowPages(9, 4, 10)
    for position in range(200):
        first = pages.first_page(position)
        lowest = position - (10 - 1) - MARGIN  # a borrower stands one lower and sees one more
        assert first * 4 <= max(0, lowest) < (first + 1) * 4
    assert pages.first_page(32) == 5


def test_a_prefix_is_usable_where_all_that_is_seen_is_here() -> None:
    pages = WindowPages(9, 4, 5)  # a row sees 5 positions, so at a page's start two pages, MARGIN included
    nodes = [11, 12, 13, 14, 15]
    assert pages.usable(nodes) == 0
    blocks = pages.allocate(4)
    assert blocks is not None
    for block, node in zip(blocks, (11, 12, 14, 15), strict=True):
        pages.register(block, node)
    assert [pages.usable(nodes[:n]) for n in range(6)] == [0, 1, 2, 2, 2, 5]
    pages.release(blocks)
    assert pages.hold(nodes) == [0, 0, 0, *blocks[2:]]
    assert pages.num_free == 8 - 2
    pages.check_integrity()


def test_a_prefix_must_be_usable_in_all_windows_at_once() -> None:
    """One has the pages 1, 2, 4, 5 of five, the other the first four: after 4 the one lacks page 3, after 2 none
    lacks anything."""
    nodes = [11, 12, 13, 14, 15]
    windows = [WindowPages(9, 4, 5), WindowPages(9, 4, 5)]
    for pages, kept in zip(windows, ((11, 12, 14, 15), (11, 12, 13, 14)), strict=True):
        for block, node in zip(pages.allocate(4) or [], kept, strict=True):
            pages.register(block, node)
    assert [pages.usable(nodes) for pages in windows] == [5, 4]
    assert usable_by_all(windows, nodes) == 2
    assert usable_by_all([], nodes) == 5


def test_a_block_that_was_handed_out_again_is_known_no_more() -> None:
    pages = WindowPages(3, 4, 4)
    blocks = pages.allocate(2)
    assert blocks is not None
    pages.register(blocks[0], 7)
    pages.release(blocks)
    assert pages.usable([7]) == 1
    assert pages.allocate(2) is not None and pages.allocate(1) is None
    assert pages.usable([7]) == 0
    pages.check_integrity()


@pytest.mark.parametrize("window", [1, 3, 8])
def test_random_use_never_finds_a_wrong_page(window: int) -> None:
    """Model: what each block really holds, kept beside the allocators."""
    rng = random.Random(window)
    size = 2
    pages = PageAllocator(40, size, sharing=True, lookahead=0)
    windows = WindowPages(12, size, window)
    holds: dict[int, tuple[int, ...]] = {}
    live: list[tuple[list[int], list[int]]] = []
    hits = 0
    for _ in range(3000):
        if live and (rng.random() < 0.4 or len(live) > 2):
            blocks, held = live.pop(rng.randrange(len(live)))
            pages.release(blocks)
            windows.release([block for block in held if block])
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 14))]
        found = pages.match(tokens)
        pages.shorten(found, windows.usable(found.nodes))
        count = len(found.nodes)
        held = windows.hold(found.nodes)
        hits += bool(count)
        for page in range(windows.first_page(count * size), count):
            assert holds[held[page]] == tuple(tokens[: (page + 1) * size]), (
                "what a row would see is the text's"
            )
        missing = -(-len(tokens) // size) - count
        fresh, own = pages.allocate(missing), windows.allocate(missing)
        if fresh is None or own is None:
            pages.release([*found.blocks, *(fresh or [])])
            windows.release([block for block in [*held, *(own or [])] if block])
            continue
        blocks, held = found.blocks + fresh, held + own
        node = found.node
        for page in range(count, len(tokens) // size):
            node = pages.register(blocks[page], node, tokens, page)
            holds[held[page]] = tuple(tokens[: (page + 1) * size])
            windows.register(held[page], node)
        gone = windows.first_page(len(tokens))
        windows.release([block for block in held[:gone] if block])
        live.append((blocks, [0] * min(gone, len(held)) + held[gone:]))
        pages.check_integrity()
        windows.check_integrity()
    assert hits > 300 and ROOT == 0
