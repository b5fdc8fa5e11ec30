"""The last layer skips prompt rows that are not sampled, without changing any output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.attention.base import PagedAttention
from draftproof.bench.compare import compare
from draftproof.drafters.head import Recurrent
from draftproof.engine.runner import ModelRunner
from draftproof.models.config import ModelConfig

PROMPTS = [[(i * 37 + 5 * n) % 900 + 20 for i in range(length)] for n, length in enumerate((150, 90, 7))]
PARAMS = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3) for _ in PROMPTS]
HEAD = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed", "num_speculative_tokens": 3}


def outputs(monkeypatch: pytest.MonkeyPatch, params: Any = PARAMS, **settings: Any) -> tuple[list[Any], int]:
    """(outputs, number of passes in which the last layer skipped rows)."""
    numbers, only = [], PagedAttention.only

    def counted(self: PagedAttention, rows_M: torch.Tensor) -> PagedAttention:
        numbers.append(len(rows_M))
        return only(self, rows_M)

    with monkeypatch.context() as patch, LLM(max_model_len=256, device="cpu", **settings) as llm:
        patch.setattr(PagedAttention, "only", counted)
        return llm.generate(PROMPTS, params, use_tqdm=False), len(numbers)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32", "speculative_config": HEAD},
        {"dtype": "float32", "native": False},
    ],
    ids=["plain", "EAGLE-3", "torch"],
)
def test_leaving_rows_out_changes_no_bit(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    settings = {**settings, "max_num_batched_tokens": 120}
    found, number = outputs(monkeypatch, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_leaves_rows", lambda *_: False)
        patch.setattr(ModelConfig, "may_leave_rows", False)
        expected, none = outputs(monkeypatch, **settings)
    assert number > 0 and none == 0
    assert not compare(expected, found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head", [assets.path("tiny-eagle3"), "tests/data/tiny-mtp"])
def test_a_head_that_leaves_rows_out_drafts_the_same(
    monkeypatch: pytest.MonkeyPatch, head: Any, dtype: str
) -> None:
    """With prompts in chunks, and beside requests that decode."""
    drafts: list[list[int]] = []
    draw = Recurrent.draft

    def noted(*given: Any) -> tuple[torch.Tensor, ...]:
        drawn = draw(*given)
        drafts.append(torch.stack(drawn).flatten().tolist())
        return drawn

    config = {"model": str(head), "num_speculative_tokens": 3}
    settings = {
        "dtype": dtype,
        "max_num_batched_tokens": 120,
        "enforce_eager": True,
        "speculative_config": config,
    }
    monkeypatch.setattr(Recurrent, "draft", noted)
    monkeypatch.setattr(ModelRunner, "_leaves_rows", lambda *_: False)
    found, number = outputs(monkeypatch, **settings)
    ours = drafts.copy()
    drafts.clear()
    monkeypatch.setattr(ModelConfig, "may_leave_rows", False)
    expected, none = outputs(monkeypatch, **settings)
    assert number > 0 and none == 0 and len(drafts) > 5
    assert ours == drafts
    assert not compare(expected, found)


def test_where_prompts_are_scored_every_row_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1) for _ in PROMPTS]
    found, number = outputs(monkeypatch, params, dtype="float32")
    assert number == 0
    assert all(len(output.prompt_logprobs) == len(output.prompt_token_ids) for output in found)
