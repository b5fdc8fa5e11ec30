"""Several heads of different methods in one process do not affect each other, in separate engines or in one chain."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof import LLM, RequestOutput, SamplingParams, assets
from draftproof.bench.compare import compare
from draftproof.drafters.chain import Record
from tests.conformance.cases import CASES, prompts
from tests.slow import slow

pytestmark = slow

HEADS = ("eagle3", "mtp", "dflash", "peagle")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.7, seed=5, max_tokens=24),
]


def build(speculative: dict[str, Any] | None) -> LLM:
    if speculative is not None:
        speculative = {**speculative, "num_speculative_tokens": 4, "policy": "fixed"}
    return LLM(str(assets.path("tiny")), dtype="float32", max_model_len=512, speculative_config=speculative)


def run(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompts()[:4], PARAMS * 2, use_tqdm=False)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[RequestOutput]]:
    found = {"plain": run(build(None))}
    return found | {name: run(build(CASES[name].config)) for name in HEADS}


def accepted(outputs: list[RequestOutput]) -> list[tuple[int, int]]:
    each = [o.metrics.speculation for o in outputs]
    return [(s.num_draft_tokens, s.num_accepted_tokens) for s in each]


def test_engines_next_to_each_other_do_as_alone(alone: dict[str, list[RequestOutput]]) -> None:
    engines = {name: build(CASES[name].config) for name in HEADS}
    for _ in range(2):
        for name, llm in engines.items():
            outputs = run(llm)
            assert not compare(alone["plain"], outputs)
            assert accepted(outputs) == accepted(alone[name])
            assert sum(hits for _, hits in accepted(outputs)) > 5


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_in_a_chain_as_it_does_alone(
    alone: dict[str, list[RequestOutput]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The chain's first member always proposes and counts as the best, so the others only keep their state current."""
    monkeypatch.setattr(Record, "expected", lambda record, slot: 1.0)
    others = (name, *(h for h in HEADS if h != name))
    members = [{**CASES[other].config, "num_speculative_tokens": 4} for other in others]
    outputs = run(build({"method": "chain", "drafters": members}))
    assert not compare(alone["plain"], outputs)
    assert accepted(outputs) == accepted(alone[name])
