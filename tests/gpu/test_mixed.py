"""Steps with prompt rows on a GPU: padded to captured sizes, with the same bits as steps without graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

from bench.mixed import Turn, Way
from draftproof import LLM, SamplingParams, assets
from draftproof.bench.compare import compare
from draftproof.bench.internals import drafter_of, steps_of
from draftproof.engine.runner import ModelRunner
from draftproof.runtime.graphs import Captured
from tests.gpu.settings import random_prompts
from tests.gpu.steady import waiting_calls
from tests.helpers import one_by_one

EAGLE3: dict[str, Any] = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
SETTINGS: dict[str, Any] = {
    "model": str(assets.path("tiny")),
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
}
LENGTHS = [5, 300, 64, 1, 130, 33, 7, 500, 16, 90]


@pytest.fixture(scope="module")
def plain(cuda: torch.device) -> Iterator[LLM]:
    with LLM(**SETTINGS, enforce_eager=True) as llm:
        yield llm


@pytest.fixture(scope="module", params=[None, EAGLE3], ids=["plain", "eagle3"])
def captured(cuda: torch.device, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**SETTINGS, speculative_config=request.param) as llm:
        yield llm


def params_of(count: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0, "presence_penalty": 0.4, "logprobs": 0, "prompt_logprobs": 1},
    ]
    return [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=i, **kinds[i % len(kinds)]) for i in range(count)
    ]


def keys_of(llm: LLM, kind: Hashable) -> list[Any]:
    """Keys of the graphs of one kind that were captured during steps."""
    graphs = llm.engine.runner.graphs  # type: ignore[attr-defined]
    assert isinstance(graphs, Captured)
    return [key for key in graphs.recorded_keys() if key[0] == kind]


@pytest.mark.parametrize("most_rows", [1, 7, 64, 300])
def test_requests_that_come_one_by_one_get_what_they_get_without_graphs(
    plain: LLM, captured: LLM, most_rows: int
) -> None:
    runner = captured.engine.runner
    assert isinstance(runner, ModelRunner)
    prompts = random_prompts(plain, LENGTHS if most_rows > 1 else LENGTHS[:1] * 3)
    params = params_of(len(prompts))
    expected = plain.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    with steps_of(captured, most_rows, is_captured=True):
        for _ in range(2):  # the second time with graphs, for sizes that recur
            assert not compare(expected, one_by_one(captured, prompts, params))
        sizes = runner.shapes.mixed
    targets = keys_of(captured, "target")
    assert most_rows in sizes and most_rows in {key[1] for key in targets}
    # few graphs were captured: one of the layers for each size, and one for each number of drafting requests
    assert len(targets) <= 20 and all(num_rows == most for _, num_rows, most, _ in targets)
    if captured.num_speculative_tokens:
        fed, drafted = (keys_of(captured, (part, drafter_of(captured))) for part in ("feed", "draft"))
        assert 0 < len(fed) <= 20 and 0 < len(drafted) <= 9
    assert captured.stats.num_drafter_faults == 0


def test_the_host_does_not_wait_in_a_step_with_prompts(captured: LLM) -> None:
    decoding, prompts = random_prompts(captured, [20] * 4), random_prompts(captured, [1000])
    with (
        steps_of(captured, 64, is_captured=True),
        Turn(Way("", captured, is_captured=True), decoding, prompts, num_tokens=600) as turn,
    ):
        turn.steps(6)  # sizes that recur are captured
        graphs, running = captured.engine.runner.graphs, captured.engine.scheduler.running  # type: ignore[attr-defined]
        before = graphs.recorded_keys()
        assert len(running) == len(decoding) + 1
        where = waiting_calls(turn, 6, "cuda")  # type: ignore[arg-type]
        assert len(running) == len(decoding) + 1, "it is the same prompt"
    assert not where and graphs.recorded_keys() == before
