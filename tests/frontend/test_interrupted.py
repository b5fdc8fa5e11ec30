"""After any interrupted call the engine stays usable, and other requests' output is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.engine.core import EngineCore

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "def add(a, b):\n    return"


def make(**settings: Any) -> LLM:
    config = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
    return LLM(dtype="float32", max_model_len=256, speculative_config=config, **settings)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return make()


@pytest.fixture(scope="module")
def eager() -> LLM:
    """An engine that calls all of its parts in every step; recorded programs would call them only while recording."""
    return make(enforce_eager=True)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> Any:
    return llm.generate(prompts, params, use_tqdm=False)


LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("engine", "part"),
    [
        *[("eager", part) for part in ("verifier.verify", "state.commit", "state.load", "state.fill")],
        *[(engine, part) for engine in ("eager", "drafting") for part in ("scorer.outputs", "results")],
        ("drafting", "graphs.run"),
    ],
)
def test_after_a_step_that_broke_off_everything_goes_on(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, engine: str, part: str
) -> None:
    """Ctrl-C in `generate` while a stream is open does not change the stream's text."""
    drafting: LLM = request.getfixturevalue(engine)
    expected = generate(drafting, [PROMPT, "import os"], LONG)
    stream = drafting.stream(PROMPT, LONG)
    text = next(stream).text
    runner, (*names, verb) = drafting.engine.runner, part.split(".")
    owner: Any = type(getattr(runner, names[0])) if names else EngineCore
    verb = verb if names else "_apply"
    original, calls = getattr(owner, verb), []

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        found = original(*args, **kwargs) if names else None
        if len(calls) == 3 or not names:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, verb, breaks)
        generate(drafting, "import os", LONG)
    assert list(drafting.requests.running) and len(drafting.requests.running) == 1
    assert generate(drafting, "import os", LONG)[0].outputs[0].token_ids == expected[1].outputs[0].token_ids
    text += "".join(d.text for d in stream)
    assert text == expected[0].outputs[0].text
    pages = drafting.engine.scheduler.pages
    pages.check_integrity()
    assert pages.num_free == pages.num_blocks - 1 and not drafting.requests.running


def test_a_break_while_prompts_are_taken_in_leaves_none_behind(
    drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = drafting.requests.new, []

    def new(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(drafting.requests, "new", new)
        generate(drafting, [PROMPT] * 3)
    assert not drafting.requests.running and not drafting.engine.has_work


def test_draft_does_not_get_in_the_way_of_a_stream(drafting: LLM) -> None:
    stream = drafting.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="other requests are running"):
        drafting.draft([1, 2, 3], 2)
    assert list(stream)[-1].finish_reason is not None


def test_inference_mode_may_come_and_go(drafting: LLM) -> None:
    expected = generate(drafting, PROMPT)[0].outputs[0].token_ids
    with torch.inference_mode():
        fresh = LLM(dtype="float32", max_model_len=256, speculative_config={"method": "ngram"})
        assert generate(fresh, PROMPT)[0].outputs[0].token_ids == expected
        assert generate(drafting, [PROMPT, "import os"])[0].outputs[0].token_ids == expected
    assert generate(fresh, PROMPT)[0].outputs[0].token_ids == expected
    assert generate(drafting, [PROMPT, "import os"])[0].outputs[0].token_ids == expected
