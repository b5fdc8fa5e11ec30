"""Requests that rule out every token: refused before anything runs if that can be known, else failed with an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.sampling.verifier import ExactVerifier

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module", params=["exact", "rejection", "block"])
def llm(request: pytest.FixtureRequest) -> LLM:
    config = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
    return LLM(dtype="float32", max_model_len=128, verification=request.param, speculative_config=config)


def word(llm: LLM) -> int:
    """A token that is a bad word on its own."""
    return llm.tokenizer.encode("self", add_special_tokens=False)[0]


KNOWN: list[tuple[dict[str, Any], str]] = [
    (
        {"allowed_token_ids": [7, 9], "stop_token_ids": [9, 7, 11], "min_tokens": 3},
        r"allowed_token_ids=\[7, 9\]: no token is left, since min_tokens=3 holds back stop ids \[7, 9, 11\]",
    ),
    (
        {"stop_token_ids": range(8192), "min_tokens": 1},
        "allowed_token_ids=None: no token is left.*min_tokens=1",
    ),
]


@pytest.mark.parametrize(("fields", "message"), KNOWN)
def test_what_is_known_before_is_said_before(llm: LLM, fields: dict[str, Any], message: str) -> None:
    steps = llm.stats.num_steps
    params = SamplingParams(**fields, ignore_eos=True)
    for start in (lambda: llm.generate(PROMPT, params, use_tqdm=False), lambda: llm.stream(PROMPT, params)):
        with pytest.raises(ValueError, match=message):
            start()
    assert llm.stats.num_steps == steps and not llm.requests.running


def test_the_end_of_text_is_a_stop_id_unless_it_is_ignored(llm: LLM) -> None:
    end = llm.requests.inputs.eos_ids[0]
    fields: dict[str, Any] = {"allowed_token_ids": [end], "min_tokens": 2, "max_tokens": 4}
    with pytest.raises(ValueError, match=rf"allowed_token_ids=\[{end}\]: no token is left"):
        llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    output = llm.generate(PROMPT, SamplingParams(**fields, ignore_eos=True), use_tqdm=False)[0]
    assert output.error is None and output.outputs[0].token_ids == [end] * 4


def test_bad_words_may_leave_nothing_at_once(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=[word(llm)], bad_words=["self"])
    with pytest.raises(ValueError, match=r"no token is left, since bad_words=\['self'\] are ruled out"):
        llm.generate(PROMPT, params, use_tqdm=False)


@pytest.mark.parametrize("temperature", [0, 1])
def test_what_shows_only_later_is_the_requests_error(llm: LLM, temperature: float) -> None:
    """The second token of a two-token bad word is the only allowed token."""
    pair = llm.tokenizer.encode("selfself", add_special_tokens=False)
    assert len(pair) == 2 and pair[0] == pair[1]
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=pair[:1], bad_words=["selfself"], ignore_eos=True
    )
    fine = SamplingParams(temperature=temperature, max_tokens=6, seed=1, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 2, [params, fine], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == pair[:1]
    assert outputs[0].outputs[0].finish_reason == "error"
    error = str(outputs[0].error)
    assert error.startswith("no token is possible after 1: allowed_token_ids, bad_words rule out all"), error
    assert outputs[1].error is None and len(outputs[1].outputs[0].token_ids) == 6


def test_logits_without_numbers_are_still_called_that(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for requests whose processing copies the logits."""
    verifier = llm.engine.runner.verifier
    original = type(verifier).verify

    def spoilt(self: ExactVerifier, logits_MV: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return original(self, torch.full_like(logits_MV, math.nan), *rest, **more)

    monkeypatch.setattr(type(verifier), "verify", spoilt)
    for params in (SamplingParams(), SamplingParams(logit_bias={5: 1.0})):
        output = llm.generate(PROMPT, params, use_tqdm=False)[0]
        assert output.error == "the target's logits held no number"


def test_an_infinite_bias_is_cut_and_rules_nothing_out(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, allowed_token_ids=[7], logit_bias={7: -math.inf}, ignore_eos=True
    )
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids == [7] * 4
