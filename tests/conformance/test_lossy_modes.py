"""verification="rejection" and "block" in the engine. tests/sampling proves that they keep the distribution."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from tests.conformance.cases import CASES, KINDS, REPEATS, Requests, prompts, run
from tests.slow import few, slow, some

GREEDY = Requests([*prompts()[:3], REPEATS], [SamplingParams(temperature=0, max_tokens=24, logprobs=1)] * 4)
SAMPLED = Requests(
    [*prompts()[:5], REPEATS], [SamplingParams(temperature=1, seed=s, max_tokens=40) for s in range(6)]
)


def settings(mode: str, method: str) -> dict[str, Any]:
    return {"dtype": "float32", "verification": mode, **CASES[method].llm(4)}


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize("method", few(some(CASES, KINDS), "eagle3"))
def test_greedy_requests_get_the_exact_tokens(mode: str, method: str) -> None:
    expected, _ = run(GREEDY, dtype="float32", model=CASES[method].target)
    outputs, llm = run(GREEDY, **settings(mode, method))
    assert not compare(expected, outputs)
    assert llm.stats.speculation.num_accepted_tokens > 0 and llm.stats.num_drafter_faults == 0


@slow
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_sampled_requests_are_reproducible_and_other_than_plain_decoding(mode: str) -> None:
    outputs, llm = run(SAMPLED, **settings(mode, "eagle3"))
    again = llm.generate(SAMPLED.prompts, SAMPLED.params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in again]
    plain, _ = run(SAMPLED, dtype="float32")
    assert any(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True))
    assert llm.stats.speculation.num_accepted_tokens > 0


def test_the_default_is_exact() -> None:
    assert LLM(dtype="float32").config.verification == "exact"
