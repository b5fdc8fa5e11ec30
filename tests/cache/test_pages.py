from __future__ import annotations

import random

import pytest

from draftproof.cache.pages import ROOT, PageAllocator, PrefixMatch


def register_all(pages: PageAllocator, blocks: list[int], tokens: list[int]) -> None:
    node = ROOT
    for page, block in enumerate(blocks):
        if pages.can_register(len(tokens), page):
            node = pages.register(block, node, tokens, page)


def test_block_zero_is_never_handed_out() -> None:
    pages = PageAllocator(4, 2, sharing=True, lookahead=0)
    assert pages.allocate(3) == [1, 2, 3]
    assert pages.allocate(1) is None


def test_a_prefix_is_found_again_and_leaves_a_token_to_compute() -> None:
    pages = PageAllocator(8, 2, sharing=True, lookahead=0)
    tokens = [5, 6, 7, 8, 9]
    blocks = pages.allocate(3)
    assert blocks is not None
    register_all(pages, blocks, tokens)
    assert pages.match([5, 6, 7, 8, 1]).blocks == blocks[:2]
    assert pages.match([5, 6, 7, 8]).blocks == blocks[:1]
    assert pages.match([5, 6, 0, 8, 1]).blocks == blocks[:1]
    assert pages.match([6, 5, 7, 8, 1]).blocks == []
    pages.check_integrity()


def test_equal_pages_after_different_prefixes_are_not_confused() -> None:
    pages = PageAllocator(9, 2, sharing=True, lookahead=0)
    first, second = pages.allocate(2), pages.allocate(2)
    assert first is not None and second is not None
    register_all(pages, first, [1, 1, 7, 7])
    register_all(pages, second, [2, 2, 7, 7])
    assert pages.match([2, 2, 7, 7, 0]).blocks == second
    assert pages.match([3, 3, 7, 7, 0]).blocks == []


def test_with_lookahead_the_next_token_must_agree_too() -> None:
    pages = PageAllocator(8, 2, sharing=True, lookahead=1)
    blocks = pages.allocate(2)
    assert blocks is not None
    assert not pages.can_register(4, 1) and pages.can_register(5, 1)
    register_all(pages, blocks, [1, 2, 3, 4, 5])
    assert pages.match([1, 2, 3, 4, 5]).blocks == blocks
    assert pages.match([1, 2, 3, 4, 6]).blocks == blocks[:1]
    assert pages.match([1, 2, 9, 4, 5]).blocks == []


def test_a_shared_page_survives_its_first_owner_and_is_evicted_when_needed() -> None:
    pages = PageAllocator(4, 2, sharing=True, lookahead=0)
    blocks = pages.allocate(2)
    assert blocks is not None
    register_all(pages, blocks, [1, 2, 3, 4])
    found = pages.match([1, 2, 3, 4, 5])
    pages.release(blocks)
    assert pages.num_free == 1
    pages.release(found.blocks)
    assert pages.num_free == 3
    assert pages.match([1, 2, 3]).blocks == blocks[:1]
    assert pages.allocate(2) is not None  # the tail of the prefix goes before its head
    assert pages.match([1, 2, 3, 4, 5]).blocks == blocks[:1]
    pages.check_integrity()


def test_without_sharing_nothing_is_found() -> None:
    pages = PageAllocator(4, 2, sharing=False, lookahead=0)
    blocks = pages.allocate(1)
    assert blocks is not None
    assert not pages.can_register(2, 0)
    assert pages.match([1, 2, 3]).blocks == []


def test_the_check_sees_a_broken_count() -> None:
    pages = PageAllocator(4, 2, sharing=True, lookahead=0)
    pages.allocate(1)
    pages._pool._ref_count[1] = 0
    with pytest.raises(AssertionError, match="block 1"):
        pages.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_random_use_keeps_the_invariants_and_never_finds_a_wrong_page(lookahead: int) -> None:
    """Model: what each block really holds, kept beside the allocator."""
    rng = random.Random(0)
    pages = PageAllocator(12, 2, sharing=True, lookahead=lookahead)
    holds: dict[int, list[int]] = {}
    live: list[list[int]] = []
    for _ in range(3000):
        if live and (rng.random() < 0.5 or pages.num_free < 3):
            pages.release(live.pop(rng.randrange(len(live))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 8))]
            found = pages.match(tokens)
            for i, block in enumerate(found.blocks):
                assert holds[block] == tokens[: (i + 1) * 2 + lookahead]
            fresh = pages.allocate(-(-len(tokens) // 2) - len(found.blocks))
            if fresh is None:
                pages.release(found.blocks)
                continue
            blocks, node = found.blocks + fresh, found.node
            for i in range(len(found.blocks), len(blocks)):
                if pages.can_register(len(tokens), i):
                    node = pages.register(blocks[i], node, tokens, i)
                    holds[blocks[i]] = tokens[: (i + 1) * 2 + lookahead]
            live.append(blocks)
        pages.check_integrity()


def test_a_page_that_the_drafter_knows_takes_the_place_of_one_that_it_does_not() -> None:
    pages = PageAllocator(5, 2, sharing=True, lookahead=0)
    tokens = [1, 2, 3, 4, 5]
    first = pages.allocate(2)
    second = pages.allocate(2)
    assert first is not None and second is not None
    node = pages.register(first[0], ROOT, tokens, 0)
    end = pages.register(first[1], node, tokens, 1, has_drafts=False)
    assert pages.match(tokens) == PrefixMatch(first, [node, end], draft_hole=2)
    assert pages.register(second[1], node, tokens, 1, has_drafts=False) == end, "no better than the known one"
    assert pages.match(tokens).blocks == first
    assert pages.register(second[1], node, tokens, 1) == end
    assert pages.match(tokens) == PrefixMatch([first[0], second[1]], [node, end])
    pages.check_integrity()
