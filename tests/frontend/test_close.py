"""A closed `LLM` has freed its memory and refuses calls with a clear error."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from draftproof import LLM, SamplingParams, assets
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import DeviceFaultError, PendingStep, StepInput
from draftproof.engine.runner import ModelRunner
from tests.frontend.test_threads import LONG

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


@pytest.mark.parametrize("work", ["generate", "stream", "draft"])
def test_closing_cuts_off_what_another_thread_generates(monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """The `LLM` is closed during the third step."""
    settings = {"method": "ngram", "num_speculative_tokens": 1, "policy": "fixed"}
    llm = LLM(dtype="float32", max_model_len=512, speculative_config=settings)
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    step, soon, told = llm.engine.step, llm._turns.soon, threading.Event()
    closer = threading.Thread(target=llm.close, daemon=True)
    num_steps = 0

    def closed_meanwhile() -> list[TokenDelta]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            monkeypatch.setattr(llm._turns, "soon", lambda action: (soon(action), told.set()))
            closer.start()
            assert told.wait(LONG)
        return step()

    stream = llm.stream("def f(", endless)
    monkeypatch.setattr(llm.engine, "step", closed_meanwhile)
    if work == "generate":
        choice = llm.generate("def f(", endless, use_tqdm=False)[0].outputs[0]
        assert choice.finish_reason == "abort" and 0 < len(choice.token_ids) < 10
    elif work == "stream":
        deltas = list(stream)
        assert deltas[-1].finish_reason == "abort" and 0 < len(deltas) < 10
    else:
        request = llm._start(llm.requests.prepare("def f(", endless))  # another thread's; `close` waits
        with pytest.raises(RuntimeError, match="LLM: is closed; make another"):
            llm.draft([5, 6, 7], 1, next_token=8)
        closer.join(LONG)  # whichever thread runs the next step aborts it
        assert request.choices[0].finish_reason == "abort"
    closer.join(LONG)
    assert not closer.is_alive() and num_steps == 3


def test_once_the_engine_has_ended_every_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(dtype="float32", max_model_len=128)

    def fails(step: StepInput) -> PendingStep:
        raise DeviceFaultError("the GPU failed; start a new process")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", fails)
        outputs = llm.generate(["x", "y"], GREEDY, use_tqdm=False)
    assert [o.error for o in outputs] == ["the engine has ended: the GPU failed; start a new process"] * 2
    for call in (llm.generate, llm.stream):
        with pytest.raises(RuntimeError, match="LLM: the engine has ended: the GPU failed"):
            call(["x", "y"], GREEDY)
    llm.close()
