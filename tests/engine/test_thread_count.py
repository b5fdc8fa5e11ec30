"""An engine runs with the number of threads of its certificates, whatever callers and drafters set."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
PROMPT = [7, 8, 9, 7, 8]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records torch's number of threads in each pass of a target."""
    counts: list[int] = []
    original = Decoder.__call__

    def call(self: Decoder, *args: object, **kwargs: object) -> object:
        counts.append(torch.get_num_threads())
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "__call__", call)
    return counts


class SetsThreads:
    """A user's drafter that proposes the last token again and changes torch's number of threads."""

    def __init__(self, build: object) -> None:
        from draftproof.drafters.base import DraftSpec

        self.spec = DraftSpec()

    def propose(self, verified: object, num_drafts: int) -> object:
        torch.set_num_threads(5)
        raise RuntimeError("no drafts today")


def test_passes_run_at_the_certified_number_and_the_callers_comes_back(seen: list[int]) -> None:
    torch.set_num_threads(2)
    llm = LLM(enforce_eager=True)
    expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    torch.set_num_threads(1)
    found = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    assert torch.get_num_threads() == 1
    assert len(seen) >= 16 and set(seen) == {2}
    assert found.token_ids == expected.token_ids and found.logprobs == expected.logprobs


def test_a_callers_autocast_changes_nothing() -> None:
    llm = LLM(dtype="float32")
    expected = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = LLM(dtype="float32", native=False).generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
        again = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    assert again.token_ids == expected.token_ids and again.logprobs == expected.logprobs
    assert found.token_ids == expected.token_ids


def test_another_thread_of_the_caller_has_no_say_either(seen: list[int]) -> None:
    torch.set_num_threads(1)
    llm = LLM(enforce_eager=True)

    def generate() -> None:
        torch.set_num_threads(3)  # OpenMP keeps this setting per thread
        llm.generate([PROMPT], GREEDY, use_tqdm=False)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    assert seen and set(seen) == {1}


def test_a_drafter_that_sets_the_number_changes_no_pass(seen: list[int]) -> None:
    torch.set_num_threads(2)
    drafter = {"method": f"{__name__}.SetsThreads", "num_speculative_tokens": 2}
    llm = LLM(enforce_eager=True, speculative_config=drafter)
    llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False)
    assert seen and set(seen) == {2}
    assert llm.stats.num_drafter_faults > 0
    assert torch.get_num_threads() == 2
