"""Prompts given as embeddings: the embeddings of a text's tokens give the same answers as the text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from draftproof.engine import step_vector
from draftproof.engine.interface import StepInput
from tests.conformance.cases import CASES, REPEATS
from tests.made.shared import prompts
from tests.slow import slow, some

TEXTS = [REPEATS, *prompts()[:3]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=56, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=48, logprobs=1),
    SamplingParams(temperature=0, max_tokens=48, presence_penalty=0.5, logprobs=1),
    SamplingParams(temperature=0, max_tokens=56, logprobs=0),
]


def embedded(llm: LLM, text: str) -> dict[str, Any]:
    """A prompt of the embeddings of the text's tokens."""
    return {"prompt_embeds": llm.engine.runner.target.embed(torch.tensor(llm.tokenizer.encode(text)))}


def answers(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Outputs without the fields of the prompt."""
    for output in outputs:
        output.prompt = None
        output.prompt_token_ids = []
    return outputs


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    with LLM(dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        return answers(llm.generate(TEXTS, PARAMS, use_tqdm=False))


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "preempted": {"num_kv_blocks": 41, "max_model_len": 320},
}
METHODS = [name for name, case in CASES.items() if case.own_target is None]  # methods on the common target
# Each method once, in any weight format; every setting for methods of different kinds.
CELLS = [
    *itertools.product([None, "eagle3"], SETTINGS),
    *itertools.product(["draft_model"], ["chunks of 64", "preempted"]),
    *[(name, "chunks of 7") for name in METHODS if "/" not in name and name != "eagle3"],
]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        cell if cell[0] in (None, "eagle3") else pytest.param(*cell, marks=slow)
        for cell in some(itertools.product([None, *METHODS], SETTINGS), CELLS)
    ],
)
def test_embeddings_of_tokens_give_what_the_tokens_give(
    plain: list[RequestOutput], method: str | None, settings: str
) -> None:
    drafting, rows = {} if method is None else CASES[method].llm(), SETTINGS[settings]
    with LLM(dtype="float32", **{**drafting, **rows}) as llm:
        mixed: list[Any] = [embedded(llm, text) for text in TEXTS]
        mixed[2] = TEXTS[2]  # beside a request of tokens
        outputs = llm.generate(mixed, PARAMS, use_tqdm=False)
        assert outputs[0].prompt_token_ids == [0] * len(mixed[0]["prompt_embeds"])
        assert not compare(plain, answers(outputs))
        assert (llm.stats.num_preemptions > 0) == (settings == "preempted")
        assert method is None or llm.stats.num_drafter_faults == 0
        if method in ("ngram", "eagle3", "draft_model") and settings != "chunks of 1":
            assert llm.stats.speculation.num_accepted_tokens > 0  # a pass of one row has no room for drafts


def test_a_head_drafts_from_embeddings_what_it_drafts_from_tokens() -> None:
    """A head's inputs at these rows affect acceptance only."""
    accepted = {}
    for inputs in ("embeddings", "tokens"):
        config = {**CASES["eagle3"].llm()["speculative_config"], "image_inputs": inputs}
        with LLM(dtype="float32", max_num_batched_tokens=7, max_num_seqs=4, speculative_config=config) as llm:
            counts = []
            for as_prompt in (lambda text: text, lambda text: embedded(llm, text)):
                before = llm.stats.speculation.num_accepted_tokens
                llm.generate([as_prompt(text) for text in TEXTS], PARAMS, use_tqdm=False)
                counts.append(llm.stats.speculation.num_accepted_tokens - before)
        accepted[inputs] = counts
    assert accepted["embeddings"][0] == accepted["embeddings"][1] == accepted["tokens"][0]
    assert accepted["tokens"][1] < accepted["tokens"][0]


def test_a_prefix_is_shared_by_content() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    with LLM(dtype="float32") as llm, LLM(dtype="float32", enable_prefix_caching=False) as fresh:
        one, other = embedded(llm, TEXTS[1] * 3), embedded(llm, TEXTS[2] * 3)
        size = min(len(p["prompt_embeds"]) for p in (one, other))
        one, other = ({"prompt_embeds": p["prompt_embeds"][:size]} for p in (one, other))
        expected = fresh.generate([one, other], params, use_tqdm=False)
        for prompt, wanted in zip((one, other), expected, strict=True):
            first = llm.generate(prompt, params, use_tqdm=False)[0]
            again = llm.generate(prompt, params, use_tqdm=False)[0]
            assert not compare([wanted, wanted], [first, again])
            assert first.metrics.num_cached_tokens == 0 and again.metrics.num_cached_tokens >= size - 16
        assert expected[0].outputs[0].token_ids != expected[1].outputs[0].token_ids
        text = llm.generate([[0] * size], params, use_tqdm=False)[0]
        assert text.metrics.num_cached_tokens == 0, "ids that stand for embeddings are no tokens"
        assert llm.requests.inputs._store.num_encoded == 2


def test_a_step_with_items_survives_as_integers() -> None:
    steps: list[StepInput] = []
    with LLM(dtype="float32") as llm:
        run = llm.engine.runner.run
        llm.engine.runner.run = lambda step: (steps.append(step), run(step))[1]  # type: ignore[method-assign]
        llm.generate(embedded(llm, TEXTS[1]), SamplingParams(max_tokens=1), use_tqdm=False)
    (admitted,) = [a for step in steps for a in step.admitted]
    assert len(admitted.items) == 1 and admitted.items[0].num_rows == admitted.num_prompt
    assert step_vector.unpack(step_vector.pack(steps[0])).admitted[0].items == admitted.items


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ({"prompt_embeds": torch.zeros(3, 5)}, {}, r"shape \(3, 5\).*rows, 256"),
        ({"prompt_embeds": torch.zeros(0, 256)}, {}, "shape"),
        ({"prompt_embeds": torch.zeros(3, 256, dtype=torch.int64)}, {}, "must be floats"),
        ({"prompt_embeds": torch.full((3, 256), torch.nan)}, {}, "finite"),
        ({"prompt_embeds": torch.zeros(3, 256), "prompt": "a"}, {}, "goes alone"),
        ({"prompt_embeds": torch.zeros(3, 256)}, {"prompt_logprobs": 1}, "no tokens to score"),
        ({"prompt_embeds": torch.zeros(3, 256)}, {"repetition_penalty": 1.2}, "counts the prompt's tokens"),
        ({"prompt_embeds": torch.zeros(600, 256)}, {}, "no room for an answer"),
    ],
)
def test_what_makes_no_sense_is_refused(prompt: Any, params: dict[str, Any], words: str) -> None:
    with LLM(dtype="float32", max_model_len=128) as llm, pytest.raises(ValueError, match=words):
        llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
