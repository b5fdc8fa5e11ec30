"""Threads that share one `LLM` each get what they would have got alone."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from draftproof import LLM, Delta, DraftSpec, EngineConfig, Proposal, SamplingParams, Verified, assets
from draftproof.bench.compare import compare
from draftproof.engine.interface import PendingStep, StepInput
from draftproof.frontend.turns import Turns
from tests.conformance.cases import REPEATS, prompts
from tests.slow import few, slow

LONG = 120  # seconds after which a thread counts as stuck
EAGLE3 = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=1),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, logprobs=1),
    SamplingParams(temperature=0, max_tokens=24, logprobs=1, repetition_penalty=1.2),
]
PROMPTS = [*prompts()[:2], REPEATS]


@pytest.fixture(scope="module")
def drafting() -> LLM:
    """An engine with few blocks, so that requests of threads preempt one another."""
    return LLM(dtype="float32", max_model_len=256, num_kv_blocks=40, speculative_config=EAGLE3)


def together(works: list[Callable[[], Any]]) -> None:
    """Run `works` concurrently, each in a thread; an exception in one of them is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        try:
            start.wait(LONG)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


def generate(llm: LLM) -> Any:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def check(llm: LLM, expected: Any) -> None:
    assert not compare(expected, generate(llm))


def nothing_left(llm: LLM) -> bool:
    pages = llm.engine.scheduler.pages
    pages.check_integrity()
    return pages.num_free == pages.num_blocks - 1 and not llm.requests.running


@pytest.mark.parametrize("num_threads", few([2, 4], 2))
def test_threads_get_what_one_gets(drafting: LLM, num_threads: int) -> None:
    expected = generate(drafting)
    drafts = drafting.draft([5, 6, 7], 3, next_token=8)
    text = "".join(d.text for d in drafting.stream(PROMPTS[0], PARAMS[0]))
    before = drafting.stats.speculation.num_accepted_tokens

    def work() -> None:
        for _ in range(3):
            check(drafting, expected)
            assert "".join(d.text for d in drafting.stream(PROMPTS[0], PARAMS[0])) == text

    together([work] * num_threads)
    assert drafting.stats.speculation.num_accepted_tokens > before
    assert drafting.draft([5, 6, 7], 3, next_token=8) == drafts
    assert nothing_left(drafting)


def test_a_draft_waits_for_what_others_generate(drafting: LLM) -> None:
    drafts = drafting.draft([5, 6, 7], 3, next_token=8)
    expected = generate(drafting)

    def many() -> None:
        for _ in range(8):
            assert drafting.draft([5, 6, 7], 3, next_token=8) == drafts

    together([many, *[partial(check, drafting, expected)] * 2])


def test_an_open_stream_is_in_nobodys_way(drafting: LLM) -> None:
    """Its consumer is idle while another thread, and then its own, generates."""
    expected = generate(drafting)
    stream = drafting.stream(PROMPTS[0], PARAMS[0])
    first = next(stream)
    together([partial(check, drafting, expected)])
    check(drafting, expected)
    tokens = [*first.token_ids, *(t for d in stream for t in d.token_ids)]
    assert tokens == expected[0].outputs[0].token_ids


def test_another_thread_may_abort(drafting: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    deltas: list[Delta] = []
    begun = threading.Event()

    def consume() -> None:
        for delta in drafting.stream(PROMPTS[0], endless):
            deltas.append(delta)
            begun.set()
            if len(deltas) == 3:
                aborted.wait(LONG)

    aborted = threading.Event()

    def abort() -> None:
        assert begun.wait(LONG)
        drafting.abort(deltas[0].request_id)
        aborted.set()

    together([consume, abort])
    assert deltas[-1].finish_reason == "abort" and nothing_left(drafting)


def test_requests_of_threads_are_one_batch(drafting: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    before = drafting.stats.num_steps
    drafting.generate(["ab"] * 6, params, use_tqdm=False)
    alone, before = drafting.stats.num_steps - before, drafting.stats.num_steps
    together([partial(drafting.generate, "ab", params, use_tqdm=False)] * 6)
    assert drafting.stats.num_steps - before < 3 * alone, "six threads in turns would take six times as many"


def test_who_waits_is_stepped_for_and_takes_over_when_the_other_has_enough() -> None:
    turns, steps, waiting = Turns(), list[int](), threading.Event()

    def step() -> None:
        steps.append(threading.get_ident())
        if len(steps) == 1:
            waiting.set()
            limit = time.monotonic() + LONG
            while not turns._waiters[1:]:
                assert time.monotonic() < limit, "the other thread does not wait"

    def second() -> None:
        waiting.wait(LONG)
        turns.until(lambda: len(steps) >= 7, step)

    together([partial(turns.until, lambda: len(steps) >= 4, step), second])
    assert len(steps) == 7 and len(set(steps)) == 2 and len(set(steps[:4])) == len(set(steps[4:])) == 1


def test_a_step_that_is_interrupted_leaves_the_turn_to_others() -> None:
    turns, steps = Turns(), list[int]()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.until(lambda: False, interrupted)
    turns.until(lambda: len(steps) == 2, lambda: steps.append(1))
    assert len(steps) == 2


class _Watched:
    """A lock that calls `before` just before it is released; with `denies` it never reports that it is held."""

    def __init__(self, before: Callable[[], object] = lambda: None, denies: bool = False) -> None:
        self._lock, self._before, self._denies = threading.Lock(), before, denies

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._before()
        self._lock.release()

    def locked(self) -> bool:
        return not self._denies and self._lock.locked()


def test_what_is_put_off_never_waits_for_a_turn() -> None:
    """Also if the turn is taken between the check and the acquisition."""
    turns, done = Turns(), list[int]()
    turns._turn = _Watched(denies=True)  # type: ignore[assignment]

    def work() -> None:
        with turns.take():
            turns.soon(partial(done.append, 1))
            assert not done

    together([work])
    assert done == [1]


def test_what_is_put_off_at_the_very_end_of_a_turn_is_done_after_it() -> None:
    turns, done, late = Turns(), list[int](), [7]

    def last_moment() -> None:
        if late:
            turns.soon(partial(done.append, late.pop()))

    turns._turn = _Watched(last_moment)  # type: ignore[assignment]
    with turns.take():
        pass
    assert done == [7]


class AsksItsOwnEngine:
    """A drafter that calls the engine that is calling it."""

    spec = DraftSpec()
    llm: LLM | None = None
    said: str = ""

    def __init__(self, config: EngineConfig) -> None:
        pass

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        assert self.llm is not None
        try:
            self.llm.generate("x", use_tqdm=False)
        except RuntimeError as error:
            type(self).said = str(error)
        self.llm.abort("request-77")  # deferred; no such request exists
        return Proposal(verified.next_R[:, None], torch.zeros_like(verified.k_R))


def test_a_call_from_within_a_step_is_refused() -> None:
    config = {"method": "tests.frontend.test_threads.AsksItsOwnEngine", "policy": "fixed"}
    llm = LLM(dtype="float32", max_model_len=256, speculative_config=config)
    AsksItsOwnEngine.llm = llm
    together([partial(generate, llm)])
    assert "from within one of its own steps" in AsksItsOwnEngine.said


class _Cycle:
    """An object in a reference cycle, which only the garbage collector frees."""

    def __init__(self, stream: Iterator[Delta]) -> None:
        self.stream, self.me = stream, self


@slow
def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_closed_after_it(
    drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(drafting)
    stream = drafting.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    _Cycle(stream)
    del stream
    engine = drafting.engine
    run = engine.runner.run

    def collects(step: StepInput) -> PendingStep:
        gc.collect()  # the abandoned stream has rows in the step that is being launched
        return run(step)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", collects)
        check(drafting, expected)
    assert nothing_left(drafting)
