"""N-gram drafting as an operator: a worked example, and each version against a plain search."""

from __future__ import annotations

import random

import pytest
import torch

from draftproof import LLM
from draftproof.kernels.lookup import Lookup
from draftproof.kernels.lookup.compiled import LookupCompiled
from draftproof.kernels.lookup.reference import lookup_torch
from draftproof.runtime import native

LIBRARY = native.load()
VERSIONS = [pytest.param(lookup_torch, id="torch")]
VERSIONS += [] if LIBRARY is None else [pytest.param(LookupCompiled(LIBRARY), id="compiled")]


def find(look: Lookup, text: list[int], k: int, shortest: int = 2, longest: int = 5) -> list[int]:
    """Drafts for one request, in the second of three slots."""
    tokens_SL = torch.full((3, len(text) + 3), 1, dtype=torch.int32)
    tokens_SL[1, : len(text)] = torch.tensor(text, dtype=torch.int32)
    length_S = torch.tensor([0, len(text), 1])
    tokens_RK, count_R, matched_R = look(
        tokens_SL, length_S, torch.tensor([1]), torch.tensor([k]), k + 1, shortest, longest, longest + 3
    )
    count = int(count_R)
    assert matched(text, shortest, longest, longest + 3) == int(matched_R)
    assert tokens_RK.dtype == torch.int64 and not tokens_RK[0, count:].any()
    return [int(t) for t in tokens_RK[0, :count]]


def matched(text: list[int], shortest: int, longest: int, most: int) -> int:
    """Number of tokens that match before the most recent occurrence of the longest suffix that has one, if it is not
    too short; else that suffix's length."""
    lengths = range(min(longest, len(text) - 1), 0, -1)
    places = ((n, i + n) for n in lengths for i in reversed(range(len(text) - n)))
    length, end = next(((n, end) for n, end in places if text[end - n : end] == text[-n:]), (0, 0))
    if length < shortest:
        return length
    while length < most and length < end and text[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


def naive(text: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == suffix:
                return text[start + length : start + length + k]
    return []


@pytest.mark.parametrize("look", VERSIONS)
def test_what_followed_the_longest_match_is_copied(look: Lookup) -> None:
    assert find(look, [1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [9, 2]


@pytest.mark.parametrize("look", VERSIONS)
def test_the_most_recent_of_equal_matches_wins(look: Lookup) -> None:
    assert find(look, [1, 2, 3, 1, 2, 4, 1, 2], 1) == [4]


@pytest.mark.parametrize("look", VERSIONS)
@pytest.mark.parametrize(
    "text",
    [[], [7], [1, 2, 3, 4, 5], pytest.param([1, 5, 2, 5], id="one token agrees, two are asked for")],
)
def test_no_match_means_no_draft(look: Lookup, text: list[int]) -> None:
    assert find(look, text, 4) == []


@pytest.mark.parametrize("look", VERSIONS)
def test_a_match_near_the_end_gives_fewer_tokens_and_never_fills(look: Lookup) -> None:
    assert find(look, [1, 2, 1, 2], 5) == [1, 2]


@pytest.mark.parametrize("look", VERSIONS)
@pytest.mark.parametrize(("most", "expected"), [(2, 2), (3, 3), (9, 4)])
def test_a_match_is_counted_beyond_what_was_looked_for(look: Lookup, most: int, expected: int) -> None:
    text = [9, 5, 7, 1, 2, 8, 6, 5, 7, 1, 2]  # two are looked for, and four match
    tokens_SL, length_S, first = torch.tensor([text]).int(), torch.tensor([len(text)]), torch.tensor([0])
    tokens_RK, count_R, matched_R = look(tokens_SL, length_S, first, torch.tensor([1]), 1, 2, 2, most)
    assert (int(matched_R), int(count_R), int(tokens_RK)) == (expected, 1, 8)


@pytest.mark.parametrize("look", VERSIONS)
@pytest.mark.parametrize("seed", range(300))
def test_it_agrees_with_the_plain_search(look: Lookup, seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(rng.randrange(1, 31))]
    k, shortest = rng.randrange(7), rng.randrange(1, 4)
    longest = shortest + rng.randrange(4)
    assert find(look, text, k, shortest, longest) == naive(text, k, shortest, longest)


def test_a_drafter_looks_for_no_suffix_that_cannot_be() -> None:
    config = {"method": "ngram", "prompt_lookup_max": 10**12, "num_speculative_tokens": 3}
    with LLM(native=False, dtype="float32", max_model_len=64, speculative_config=config) as llm:
        assert llm.draft([7, 8, 9, 7, 8], 3, next_token=9) == [7, 8, 9]


@pytest.mark.parametrize("look", VERSIONS)
def test_each_request_has_its_own_slot_and_number(look: Lookup) -> None:
    tokens_SL = torch.tensor([[1, 2, 3, 1, 2, 0], [5, 5, 5, 5, 5, 5], [4, 4, 4, 9, 9, 9]], dtype=torch.int32)
    length_S, slots_R = torch.tensor([5, 0, 3]), torch.tensor([2, 0, 1, 0])
    k_R = torch.tensor([9, 2, 3, 0])
    tokens_RK, count_R, matched_R = look(tokens_SL, length_S, slots_R, k_R, 3, 1, 4, 4)
    assert count_R.tolist() == [1, 2, 0, 0]
    assert matched_R.tolist() == [2, 2, 0, 2]
    assert tokens_RK.tolist() == [[4, 0, 0], [3, 1, 0], [0, 0, 0], [0, 0, 0]]
