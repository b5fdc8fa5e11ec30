"""Faults on a real engine: only the request at fault fails, and the others keep every bit; a device fault ends the
engine for all requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams, assets
from draftproof.bench.compare import compare
from draftproof.engine.interface import PendingStep, StepInput
from draftproof.engine.launched import LaunchedStep
from draftproof.engine.state import State
from draftproof.runtime.transfer import ArrivingRows
from tests.engine.poison import poison

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_batched_tokens": 24,
    "speculative_config": {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"},
}
PROMPTS = [
    "def add(a, b):\n    return",
    "import os\n",
    "a = [1, 2]\nb = [1, 2]\nc = [",
    "class A",
    "while True:",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=14, logprobs=1),
    SamplingParams(temperature=0, max_tokens=9, logprobs=0),
]
POISONED = 2


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with LLM(**SETTINGS) as llm:
        outputs = generate(llm)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    assert lengths.count(lengths[POISONED]) == 1, "it is known by the length of its prompt"
    return outputs


def fails_in(place: str, run: Callable[[StepInput], LaunchedStep], bad: Callable[[StepInput], None]) -> Any:
    """`run`, with `bad` called before the launch or after it, or its exception raised when results are read."""

    def before(step: StepInput) -> PendingStep:
        bad(step)
        return run(step)

    def after(step: StepInput) -> PendingStep:
        pending = run(step)
        bad(step)
        return pending

    def results(step: StepInput) -> PendingStep:
        pending = run(step)
        try:
            bad(step)
        except ZeroDivisionError:
            pending.result = Lost()  # type: ignore[assignment]
        return pending

    return {"before": before, "after": after, "results": results}[place]


class Lost:
    """Rows whose copy to the host fails."""

    def wait(self) -> Any:
        raise ZeroDivisionError("poisonous")


@pytest.mark.parametrize("at", [0, 30], ids=["from its prompt on", "while it decodes"])
@pytest.mark.parametrize("place", ["before", "after", "results"])
def test_a_request_whose_rows_fail_pays_alone_and_no_bit_of_the_others_moves(
    expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, place: str, at: int
) -> None:
    num_prompt = len(expected[POISONED].prompt_token_ids)
    with LLM(**SETTINGS) as llm:
        runner = llm.engine.runner
        monkeypatch.setattr(runner, "run", fails_in(place, runner.run, poison(num_prompt, at)))
        found = generate(llm)
        monkeypatch.undo()
        assert not compare(expected, generate(llm)), "and the engine is as good as new"
    failed = found[POISONED]
    assert failed.error == (
        "computing this request failed, and others are not affected: ZeroDivisionError: poisonous"
    )
    assert failed.outputs[0].finish_reason == "error" and failed.finished
    num_new = len(failed.outputs[0].token_ids)
    assert (num_new > 0) == (at > 0), "what came before the fault stays"
    assert failed.outputs[0].token_ids == expected[POISONED].outputs[0].token_ids[:num_new]
    others = [index for index in range(len(PROMPTS)) if index != POISONED]
    assert not compare([expected[i] for i in others], [found[i] for i in others])
    assert all(found[i].outputs[0].logprobs for i in others)


@pytest.mark.parametrize("place", ["load", "wait"])
def test_an_accelerator_that_fails_ends_the_engine_with_one_error(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Faults at launch, and when results are read. `place`: the method that raises."""
    calls = []

    def dies(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nCUDA_LAUNCH_BLOCKING=1")
        return original(*given)

    with LLM(**SETTINGS) as llm:
        owner: Any = State if place == "load" else ArrivingRows
        original = getattr(owner, place)
        monkeypatch.setattr(owner, place, dies)
        reason = (
            "the engine has ended: the GPU failed (CUDA error: an illegal memory access); start a new process"
        )
        found = generate(llm)
        assert {output.error for output in found} == {reason}
        assert {output.outputs[0].finish_reason for output in found} == {"error"}
        assert len(calls) == 3, "nothing is tried again"
        with pytest.raises(RuntimeError, match=re.escape(reason)):
            llm.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)
        assert len(calls) == 3
