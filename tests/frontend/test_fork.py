"""After a fork the child lacks the threads that compute; calls raise an error instead of waiting for them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from draftproof import LLM, SamplingParams
from tests.slow import slow

LONG = 120  # seconds after which a child is taken for stuck
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    made = LLM(dtype="float32", max_model_len=128, speculative_config={"method": "ngram"})
    made.generate("x = [", GREEDY, use_tqdm=False)
    return made


def in_a_forked_child(work: Callable[[], Any]) -> str:
    """The result or exception of `work` in a forked child, as text."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            said = f"gave {work()!r}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        theirs.send(said)

    child = context.Process(target=run, daemon=True)
    child.start()
    try:
        assert ours.poll(LONG), "the child is stuck"
        said = str(ours.recv())
        child.join(LONG)
        assert not child.is_alive(), "the child does not end"
        return said
    finally:
        child.kill()
        child.join(LONG)


def call(llm: LLM, name: str) -> Any:
    given: dict[str, tuple[Any, ...]] = {
        "generate": ("x = [", GREEDY, False),
        "chat": ([{"role": "user", "content": "x"}], GREEDY, False),
        "stream": ("x = [", GREEDY),
        "draft": ([5, 6, 7], 2, 8),
        "abort": ("request-0",),
    }
    return getattr(llm, name)(*given[name])


@pytest.mark.parametrize("name", ["generate", "chat", "stream", "draft", "abort"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_an_earlier_llm_says_that_it_cannot_be_used(llm: LLM, name: str) -> None:
    said = in_a_forked_child(lambda: call(llm, name))
    assert f"RuntimeError: LLM: was made in process {os.getpid()}" in said and "'spawn'" in said


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_an_open_stream_says_so_too_and_goes_on_in_its_own_process(llm: LLM) -> None:
    expected = llm.generate("x = [", GREEDY, use_tqdm=False)[0].outputs[0].text
    stream = llm.stream("x = [", GREEDY)
    text = next(stream).text
    said = in_a_forked_child(lambda: next(stream))
    assert "RuntimeError: LLM: was made in process" in said and "'spawn'" in said
    assert text + "".join(d.text for d in stream) == expected


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_new_llm_in_the_child_is_refused(llm: LLM) -> None:
    said = in_a_forked_child(lambda: LLM(dtype="float32", max_model_len=128))
    assert "RuntimeError: LLM: this process was forked from one in which an LLM was made" in said
    assert "'spawn'" in said


SCRIPT = """
import os
from draftproof import LLM, SamplingParams
child = os.fork()
if child:
    status = os.waitpid(child, 0)[1]
    raise SystemExit(os.waitstatus_to_exitcode(status))
llm = LLM(dtype="float32", max_model_len=128)
print(llm.generate("x = [", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids)
"""


@slow
def test_a_child_of_a_process_that_made_none_works(llm: LLM) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=LONG, check=True
    )
    expected = llm.generate("x = [", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert found.stdout.strip() == str(expected)
