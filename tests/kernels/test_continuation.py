"""Continuations of texts: worked examples, places against exhaustive search, and compiled against the twin."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from draftproof.kernels.continuation.compiled import CompiledContinuation
from draftproof.kernels.continuation.index import END, SlotTexts, TextIndex
from draftproof.kernels.continuation.reference import TORCH_CONTINUATION, find
from draftproof.kernels.continuation.spec import MOST_PLACES, ContinuationOps, Limits
from draftproof.runtime import native

LIBRARY = native.load()
VERSIONS = [pytest.param(TORCH_CONTINUATION, id="torch")]
VERSIONS += [] if LIBRARY is None else [pytest.param(CompiledContinuation(LIBRARY), id="compiled")]
LIMITS = Limits(longest=24, each=1.0, least=0.1)
each_version = pytest.mark.parametrize("ops", VERSIONS)


class Texts:
    """Slots with known texts, and one operator with their indexes."""

    def __init__(self, ops: ContinuationOps, num_slots: int = 3, capacity: int = 256) -> None:
        self.ops = ops
        self.own = SlotTexts(num_slots)
        self.tokens_SL = torch.zeros((num_slots, 512), dtype=torch.int32)
        self.length_S = torch.zeros(num_slots, dtype=torch.int64)
        for slot in range(num_slots):
            self.own.put(slot, TextIndex(capacity))

    def know(self, slot: int, tokens: list[int]) -> None:
        start = int(self.length_S[slot])
        self.tokens_SL[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length_S[slot] += len(tokens)

    def propose(
        self,
        slots: list[int],
        wanted: list[int],
        num_drafts: int,
        limits: Limits = LIMITS,
        shared: TextIndex | None = None,
    ) -> list[list[int]]:
        slots_R, k_R = torch.tensor(slots, dtype=torch.int64), torch.tensor(wanted)
        row_R = torch.arange(len(slots)).flip(0)  # the requests' tokens in other rows than their slots
        tokens_RL, length_R = self.tokens_SL[slots_R.flip(0)], self.length_S[slots_R.flip(0)]
        tokens_RK, count_R = self.ops.propose(
            self.own, shared, slots_R, tokens_RL, length_R, row_R, k_R, num_drafts, limits
        )
        assert tokens_RK.dtype == count_R.dtype == torch.int64 and tokens_RK.shape == (len(slots), num_drafts)
        return [row[:n] for row, n in zip(tokens_RK.tolist(), count_R.tolist(), strict=True)]


def added(ops: ContinuationOps, text: TextIndex, tokens: list[int]) -> TextIndex:
    """Append a separate text, with its end."""
    text.begin_text()
    ops.add(text, [*tokens, END])
    return text


def found(text: TextIndex, suffix: list[int], k: int) -> list[tuple[int, list[int]]]:
    lengths_M, follow_MK = find(text, np.array(suffix), k)
    pairs = zip(lengths_M.tolist(), follow_MK.tolist(), strict=True)
    return [pair for pair in pairs if pair[0] > 1]


def searched(tokens: list[int], suffix: list[int], k: int) -> list[tuple[int, list[int]]]:
    """(length, following tokens) of matches by exhaustive search, newest first; none ends at the end of the text."""
    places: list[tuple[int, list[int]]] = []
    for place in range(len(tokens) - 2, 0, -1):
        length = 0
        while length < min(len(suffix), place + 1) and tokens[place - length] == suffix[-1 - length]:
            length += 1
        if length > 1:
            follow = tokens[place + 1 : place + 1 + k]
            places.append((length, follow + [END] * (k - len(follow))))
    return places


@each_version
@pytest.mark.parametrize("seed", range(20))
def test_all_places_are_found_where_memory_suffices(ops: ContinuationOps, seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(4) for _ in range(draw.randrange(2, 120))]
    text = TextIndex(capacity=128)
    for start in range(0, len(tokens), 7):
        ops.add(text, tokens[start : start + 7])
    suffix = tokens[-draw.randrange(2, 9) :]
    expected = searched(tokens, suffix, 3)
    assert found(text, suffix, 3) == expected[:MOST_PLACES]


@each_version
@pytest.mark.parametrize("seed", range(20))
def test_a_full_text_knows_exactly_its_newest_tokens(ops: ContinuationOps, seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(300)]
    text = TextIndex(capacity=50)
    ops.add(text, tokens)
    assert text.tail(0) == tokens[-50:]
    suffix = tokens[-4:]
    assert found(text, suffix, 3) == searched(tokens[-50:], suffix, 3)


@each_version
def test_nothing_is_found_across_the_ends_of_texts(ops: ContinuationOps) -> None:
    text = TextIndex(64, most_texts=8)
    added(ops, text, [1, 2, 3])
    added(ops, text, [4, 5, 1, 2])
    assert found(text, [3, 4], 2) == []
    assert found(text, [1, 2], 2) == [(2, [END, END]), (2, [3, END])]


@each_version
def test_only_the_newest_texts_are_kept(ops: ContinuationOps) -> None:
    text = TextIndex(64, most_texts=2)
    for first in (10, 20, 30):
        added(ops, text, [first, first + 1, first + 2])
    assert [bool(found(text, [first, first + 1], 1)) for first in (10, 20, 30)] == [False, True, True]
    texts = Texts(ops)
    for slot, first in enumerate((10, 20, 30)):
        texts.know(slot, [first, first + 1])
    assert texts.propose([0, 1, 2], [4] * 3, 4, shared=text) == [[], [22], [32]]


@each_version
def test_memory_is_fixed_from_the_start(ops: ContinuationOps) -> None:
    text = TextIndex(100, most_texts=1000)
    arrays = (text.tokens_C, text.previous_C, text.newest_B)
    for start in range(0, 3000, 30):
        added(ops, text, list(range(start, start + 30)))
    assert all(a is b for a, b in zip(arrays, (text.tokens_C, text.previous_C, text.newest_B), strict=True))
    assert len(text.tokens_C) == len(text.previous_C) == 100
    ops.add(text, [*range(500), END])
    assert text.tail(0) == [*range(401, 500), END]


def proposal(
    ops: ContinuationOps,
    text: list[int],
    limits: Limits = LIMITS,
    k: int = 8,
    shared: list[int] | None = None,
) -> list[int]:
    texts = Texts(ops)
    texts.know(1, text)
    others = None if shared is None else added(ops, TextIndex(64, most_texts=8), shared)
    (drafts,) = texts.propose([1], [k], 8, limits, others)
    return drafts


@each_version
def test_the_proposal_is_as_long_as_the_match(ops: ContinuationOps) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 3, 4]
    assert proposal(ops, text) == [5, 6, 7]
    twice = LIMITS._replace(each=2)
    assert proposal(ops, text, twice) == [5, 6, 7, 8, 9, 0]
    assert proposal(ops, text, twice, k=4) == [5, 6, 7, 8]
    assert proposal(ops, text, twice._replace(longest=2)) == [5, 6, 7, 8]
    assert proposal(ops, text, LIMITS._replace(each=0.4)) == [5], "a part of a token is none"
    assert proposal(ops, text, LIMITS._replace(each=0.3)) == proposal(ops, text, k=0) == []


@each_version
def test_the_commonest_continuation_is_taken_and_rare_ones_end_it(ops: ContinuationOps) -> None:
    text = [1, 2, 7, 5, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2]
    assert proposal(ops, text, Limits(2, 1.0, 0.1)) == [7, 6]  # 2 of 3, then the newer of two
    assert proposal(ops, text, Limits(2, 1.0, 0.5)) == [7]
    assert proposal(ops, text, Limits(2, 1.0, 0.7)) == []


@each_version
def test_no_match_gives_no_draft(ops: ContinuationOps) -> None:
    for text in ([1, 2, 3, 4], [1], [3, 3]):
        assert proposal(ops, text) == []


@each_version
def test_a_shared_text_is_taken_only_if_it_promises_more(ops: ContinuationOps) -> None:
    assert proposal(ops, [1, 2, 3], shared=[2, 3, 4, 5]) == [4, 5]
    both = [2, 3, 8, 9, 2, 3]
    assert proposal(ops, both, shared=[2, 3, 4, 5]) == [8, 9], "of equals its own"
    assert proposal(ops, both, shared=[9, 2, 3, 4, 5, 6]) == [4, 5, 6]


@each_version
def test_each_request_continues_its_own_text(ops: ContinuationOps) -> None:
    texts = Texts(ops)
    texts.know(0, [1, 2, 5, 1, 2])
    texts.know(2, [1, 2, 6, 7, 8, 1, 2])
    assert texts.propose([2, 0], [8, 1], 4) == [[6, 7], [5]]
    texts.know(2, [6, 7])
    assert texts.propose([0, 1, 2], [0, 4, 4], 4) == [[], [], [8, 1, 2, 6]]
    texts.own.put(2, None)
    texts.know(2, [8])
    assert texts.propose([2, 0], [4, 4], 4) == [[], [5, 1]], "a slot without a text"
    assert texts.propose([], [], 4) == []


@pytest.mark.skipif(LIBRARY is None, reason="no compiled operators here")
@pytest.mark.parametrize("seed", range(30))
def test_compiled_equals_the_twin(seed: int) -> None:
    """Texts that repeat, grow and leave a small memory, with others that come and go; the indexes are equal, too."""
    assert LIBRARY is not None
    draw = random.Random(seed)
    num_tokens, capacity = draw.choice([2, 3, 6, 2**31]), draw.choice([4, 40, 256])
    limits = Limits(draw.randrange(2, 30), draw.choice([0.5, 1.0, 3.0, 64.0]), draw.choice([0.0, 0.1, 0.5]))
    both = [Texts(ops, capacity=capacity) for ops in (TORCH_CONTINUATION, CompiledContinuation(LIBRARY))]
    most_tokens, most_texts = draw.choice([2, 300]), draw.choice([1, 4])
    shared = [TextIndex(most_tokens, most_texts) for _ in both]
    drawn = [draw.randrange(num_tokens) for _ in range(40)]
    for _ in range(40):
        slot = draw.randrange(3)
        start = draw.randrange(40)
        more = drawn[start : start + draw.randrange(1, 12)]
        ask = ([0, 1, 2], [draw.randrange(9) for _ in range(3)], draw.choice([0, 1, 8]))
        proposals = []
        for texts, text in zip(both, shared, strict=True):
            if int(texts.length_S[slot]) < 480:
                texts.know(slot, more)
            proposals.append(texts.propose(*ask, limits, text))
            if start % 4 == 0:
                added(texts.ops, text, more)
        assert proposals[0] == proposals[1]
    indexes = [[*texts.own.indexes, text] for texts, text in zip(both, shared, strict=True)]
    for twin, compiled in zip(*indexes, strict=True):
        assert twin is not None and compiled is not None
        assert (twin.end, twin.start) == (compiled.end, compiled.start)
        for name in ("tokens_C", "previous_C", "newest_B"):
            assert np.array_equal(getattr(twin, name), getattr(compiled, name)), name
