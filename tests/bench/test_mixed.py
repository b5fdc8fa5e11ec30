"""The script that measures steps with prompts: ways take turns, outputs are compared, and the engine is as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mixed
from draftproof import LLM, assets
from draftproof.bench.internals import drafter_of, steps_of
from draftproof.drafters.head import HeadDrafter
from draftproof.runtime.graphs import EAGER


def test_all_ways_take_turns_and_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--shape", "8b", "--small", str(tmp_path), "--device", "cpu", "--batch", "2", "--prompt", "40"]
    sizes = ["--budgets", "24", "--rows", "1", "--turns", "1", "--tokens", "150"]
    monkeypatch.setattr("sys.argv", ["mixed", *flags, *sizes])
    assert mixed.main() == 0
    out = capsys.readouterr().out
    assert "24 rows a step" in out and "same: True" in out
    assert all(f"{name} {way}" in out for name in ("plain", "drafts") for way in ("on", "off"))


def test_texts_are_the_same_as_far_as_they_go() -> None:
    ours, theirs = [[1, 2, 3], [4]], [[1, 2], [4, 5]]
    assert mixed.alike([ours, theirs, ours])
    assert not mixed.alike([ours, theirs, [[1, 2, 3], [6]]])


def test_an_engine_is_as_before_once_its_steps_were_others() -> None:
    config = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
    with LLM(max_model_len=128, speculative_config=config) as llm:
        head, runner, scheduler = drafter_of(llm), llm.engine.runner, llm.engine.scheduler
        assert isinstance(head, HeadDrafter) and head.runtime is not None
        runner.shapes.mixed = (16, 32)  # type: ignore[attr-defined]
        graphs = head.runtime.graphs
        with steps_of(llm, 20, is_captured=True):
            assert runner.shapes.mixed == (16, 20) and scheduler.max_num_batched_tokens == 20  # type: ignore[attr-defined]
            assert head.runtime.graphs is graphs
        with steps_of(llm, 20, is_captured=False):
            assert runner.shapes.mixed == () and head.runtime.graphs is EAGER  # type: ignore[attr-defined]
        assert runner.shapes.mixed == (16, 32) and scheduler.max_num_batched_tokens == 2048  # type: ignore[attr-defined]
        assert head.runtime.graphs is graphs is not EAGER
