"""Suffix drafting: matches, length of proposals, sharing between requests, and memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from draftproof import LLM, SamplingParams
from draftproof.drafters.suffix import END, MOST_PLACES, SuffixDrafter, SuffixIndex, SuffixOptions


def found(text: SuffixIndex, suffix: list[int], k: int) -> list[tuple[int, list[int]]]:
    lengths_C, follow_CK = text.find(np.array(suffix), k)
    pairs = zip(lengths_C.tolist(), follow_CK.tolist(), strict=True)
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


@pytest.mark.parametrize("seed", range(20))
def test_all_places_are_found_where_memory_suffices(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(4) for _ in range(draw.randrange(2, 120))]
    text = SuffixIndex(capacity=128)
    for start in range(0, len(tokens), 7):
        text.add(tokens[start : start + 7])
    suffix = tokens[-draw.randrange(2, 9) :]
    expected = searched(tokens, suffix, 3)
    assert found(text, suffix, 3) == expected[:MOST_PLACES]


@pytest.mark.parametrize("seed", range(20))
def test_a_full_text_knows_exactly_its_newest_tokens(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(300)]
    text = SuffixIndex(capacity=50)
    text.add(tokens)
    assert text.tail(0) == tokens[-50:]
    suffix = tokens[-4:]
    assert found(text, suffix, 3) == searched(tokens[-50:], suffix, 3)


def test_nothing_is_found_across_the_ends_of_texts() -> None:
    text = SuffixIndex(64, most_texts=8)
    text.add_whole([1, 2, 3])
    text.add_whole([4, 5, 1, 2])
    assert found(text, [3, 4], 2) == []
    assert found(text, [1, 2], 2) == [(2, [END, END]), (2, [3, END])]


def test_only_the_newest_texts_are_kept() -> None:
    text = SuffixIndex(64, most_texts=2)
    for first in (10, 20, 30):
        text.add_whole([first, first + 1, first + 2])
    assert [bool(found(text, [first, first + 1], 1)) for first in (10, 20, 30)] == [False, True, True]


def test_memory_is_fixed_from_the_start() -> None:
    text = SuffixIndex(100, most_texts=1000)
    sizes = [a.nbytes for a in (text._tokens, text._previous, text._newest)]
    for start in range(0, 3000, 30):
        text.add_whole(list(range(start, start + 30)))
    assert sizes == [a.nbytes for a in (text._tokens, text._previous, text._newest)]
    text.add_whole(list(range(500)))
    assert text.tail(0) == [*range(401, 500), END]


def proposal(text: list[int], k: int = 8, shared: list[int] | None = None, **options: Any) -> list[int]:
    options = {f"suffix_decoding_{name}": value for name, value in options.items()}
    drafter = SuffixDrafter(SuffixOptions(**options), 256)
    if shared is not None:
        drafter.admit(5, [9], 0)
        drafter._requests[5][0].add(shared)
        drafter.release(5)
    drafter.admit(0, text, 0)
    return drafter._continue(drafter._requests[0][0], np.array(text), k)


def test_the_proposal_is_as_long_as_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 3, 4]
    assert proposal(text) == [5, 6, 7]
    assert proposal(text, max_spec_factor=2) == [5, 6, 7, 8, 9, 0]
    assert proposal(text, max_spec_factor=2, k=4) == [5, 6, 7, 8]
    assert proposal(text, max_spec_factor=2, max_tree_depth=2) == [5, 6, 7, 8]


def test_the_commonest_continuation_is_taken_and_rare_ones_end_it() -> None:
    text = [1, 2, 7, 5, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2]
    assert proposal(text, max_tree_depth=2) == [7, 6]  # 2 of 3, then the newer of two
    assert proposal(text, max_tree_depth=2, min_token_prob=0.5) == [7]
    assert proposal(text, max_tree_depth=2, min_token_prob=0.7) == []


def test_no_match_gives_no_draft() -> None:
    assert proposal([1, 2, 3, 4]) == proposal([1]) == proposal([3, 3]) == []


def test_answers_of_other_requests_are_used_and_their_prompts_are_not() -> None:
    assert proposal([1, 2, 3], shared=[2, 3, 4, 5]) == [4, 5]
    assert proposal([8, 9, 2], shared=[2, 3, 4, 5]) == []  # 9 was given
    assert proposal([1, 2, 3], shared=[2, 3, 4, 5], max_cached_requests=0) == []


def test_the_same_question_again_is_answered_from_memory() -> None:
    """Its answer has the same tokens; without sharing, the second time is like the first."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    rounds: dict[int, list[int]] = {}
    for most in (0, 100):
        config = {"method": "suffix", "suffix_decoding_max_cached_requests": most, "policy": "fixed"}
        llm = LLM(dtype="float32", speculative_config=config)
        outputs = [llm.generate("def area(radius):", params, use_tqdm=False)[0] for _ in range(2)]
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        rounds[most] = [o.metrics.speculation.num_rounds for o in outputs]
    assert rounds[0][0] == rounds[0][1] == rounds[100][0]
    assert rounds[100][1] < rounds[0][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 1}, "max_tree_depth=1: must be an integer from 2 to 1048576"),
        ({"suffix_decoding_min_token_prob": "0.1"}, "min_token_prob='0.1'"),
        ({"suffix_decoding_max_cached_tokens": 1e6}, "max_cached_tokens=1000000.0.*integer"),
        (
            {"suffix_decoding_max_cached_tokens": 10**13},
            "max_cached_tokens=10000000000000: .* to 67108864",
        ),
        ({"suffix_decoding_max_cached_requests": 10**13}, "max_cached_requests=10000000000000"),
        ({"suffix_decoding_max_tree_depth": 10**13}, "max_tree_depth=10000000000000"),
        ({"suffix_decoding_max_spec_factor": float("inf")}, "max_spec_factor=inf: .* at most 64"),
        ({"suffix_decoding_max_spec_factor": float("nan")}, "max_spec_factor=nan"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5: .* at most 1$"),
        ({"suffix_decoding_max_spec_facto": 1}, "did you mean 'suffix_decoding_max_spec_factor'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(speculative_config={"method": "suffix", **options})
