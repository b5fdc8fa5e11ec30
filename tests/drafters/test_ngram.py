from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.drafters.ngram import NgramOptions, lookup


def find(history: list[int], k: int, shortest: int = 2, longest: int = 5) -> list[int]:
    options = NgramOptions(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    return lookup(np.array(history, dtype=np.int32), options, k).tolist()


def naive(history: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for length in range(min(longest, len(history) - 1), shortest - 1, -1):
        suffix = history[-length:]
        for start in range(len(history) - length - 1, -1, -1):
            if history[start : start + length] == suffix:
                return history[start + length : start + length + k]
    return []


def test_what_followed_the_longest_match_is_copied() -> None:
    assert find([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [9, 2]


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert find([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4]


def test_no_match_means_no_draft() -> None:
    assert find([1, 2, 3, 4, 5], 4) == []
    assert find([7], 4) == []
    assert find([1, 5, 2, 5], 4) == []  # one token agrees, two are asked for


def test_a_match_near_the_end_gives_fewer_tokens_and_never_fills() -> None:
    assert find([1, 2, 1, 2], 5) == [1, 2]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_it_agrees_with_the_plain_search(history: list[int], k: int, shortest: int, more: int) -> None:
    assert find(history, k, shortest, shortest + more) == naive(history, k, shortest, shortest + more)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min=4, prompt_lookup_max=3"):
        NgramOptions(prompt_lookup_min=4, prompt_lookup_max=3)
