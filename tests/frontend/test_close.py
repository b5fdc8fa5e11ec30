"""An `LLM` that is closed gives its memory back and says no politely."""

from __future__ import annotations

import gc
import weakref

import pytest

from draftproof import LLM, SamplingParams, assets
from draftproof.engine.runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_memory_is_given_back_while_the_object_lives() -> None:
    with LLM(
        dtype="float32", max_model_len=128, speculative_config={"model": str(assets.path("tiny-eagle3"))}
    ) as llm:
        llm.generate("def f(", GREEDY, use_tqdm=False)
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        tensors = (runner.target.embed_VH, runner.cache.layers[0].k, runner.state.slots.tokens_SL)
        held = [weakref.ref(tensor) for tensor in tensors]
        del tensors
    gc.collect()
    assert all(reference() is None for reference in held)


def test_after_closing_every_call_says_so() -> None:
    llm = LLM(dtype="float32", max_model_len=128)
    stream = llm.stream("def f(", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert list(stream)[-1].finish_reason == "abort"
    for call in (llm.generate, llm.stream):
        with pytest.raises(RuntimeError, match="LLM: is closed; make another"):
            call("x")
    llm.abort("request-0")
