"""Suffix drafting: settings, and sharing between requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.attention.reference import REFERENCE
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import DraftRuntime, KnownTokens
from draftproof.drafters.suffix import SuffixDrafter, SuffixOptions
from draftproof.kernels.ops import TORCH
from draftproof.runtime.graphs import EAGER
from tests.drafters.test_replay import verified


def proposal(text: list[int], shared: list[int] | None = None, **options: Any) -> list[int]:
    """What is proposed after `text`, whose last token is new; `shared`: another request's output, after a prompt of one
    token."""
    options = {f"suffix_decoding_{name}": value for name, value in options.items()}
    drafter = SuffixDrafter(SuffixOptions(**options), 256, waits=False)
    known = KnownTokens(torch.zeros((2, 64), dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
    cache = PagedCache([], torch.zeros(2, 1, dtype=torch.int32))
    drafter.bind(DraftRuntime(ops=TORCH, backend=REFERENCE, cache=cache, graphs=EAGER, known=known))

    def ask(slot: int, tokens: list[int]) -> list[int]:
        known.tokens_SL[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        known.length_S[slot] = len(tokens)
        proposal = drafter.propose(verified([[len(tokens) - 2]], [slot], [1], [8]), 8)
        return proposal.tokens_RK[0, : int(proposal.count_R[0])].tolist()

    if shared is not None:
        drafter.admit(1, [9], 0)
        ask(1, [9, *shared])
        drafter.release(1)
    drafter.admit(0, text[:-1], 0)
    return ask(0, text)


def test_settings_bound_the_proposal() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 2, 3, 4]
    assert proposal(text) == [5, 6, 7]
    assert proposal(text, max_spec_factor=2) == [5, 6, 7, 8, 9, 0]
    assert proposal(text, max_spec_factor=2, max_tree_depth=2) == [5, 6, 7, 8]
    repeated = [1, 2, 7, 5, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2]
    assert proposal(repeated, max_tree_depth=2) == [7, 6]
    assert proposal(repeated, max_tree_depth=2, min_token_prob=0.5) == [7]


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
