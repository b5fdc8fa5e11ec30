"""Policies on recorded drafts: what the adaptive policy must reach, without a clock."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import rehearse
from draftproof import LLM, SamplingParams, assets
from draftproof.bench import internals
from draftproof.engine.policy import FixedPolicy

DATA = Path(__file__).parents[1] / "data" / "drafts"
COSTS = {
    "target": {"1": 2e-3, "9": 3.6e-3, "600": 120e-3},
    "draft": {"1": {"1": 2e-4, "8": 16e-4}, "64": {"1": 2e-3, "8": 16e-3}},
    "context": {"0": 0.0},
    "context_rows": {"0": 0.0},
    "spread": 1.0,
}


LOOKUP = {"1": {"1": 2e-5, "8": 3e-5}, "64": {"1": 2e-4, "8": 3e-4}}  # drafts of a drafter without a model


def recording(num_right: int, *, has_kv: bool = True) -> rehearse.Recording:
    """Eight texts in which there are eight drafts everywhere, of which so many are right."""
    costs = COSTS if has_kv else COSTS | {"draft": LOOKUP}
    texts = [rehearse.Text(20, {at: rehearse.Found(8, num_right) for at in range(1, 100)}) for _ in range(8)]
    return rehearse.Recording(
        (0, 1, 2, 3, 5, 8), costs, 2e-4, is_compared=not has_kv, has_kv=has_kv, texts=texts
    )


@pytest.mark.parametrize("config", [{"method": "ngram"}, {"model": str(assets.path("tiny-eagle3"))}])
def test_a_rehearsal_takes_as_many_steps_as_the_engine(tmp_path: Path, config: dict[str, Any]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ["def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"]
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    found = rehearse.record(str(assets.path("tiny")), config, prompts, changing=False)
    assert len(found.texts) == 2 and all(text.drafts for text in found.texts)
    assert found.has_kv == ("model" in config) and found.is_compared == ("method" in config)
    llm = LLM(assets.path("tiny"), max_num_seqs=1, enable_prefix_caching=False, speculative_config=config)
    for number, line in enumerate(lines):
        for num_drafts in (1, 3, 5):
            turn = rehearse.Turn(FixedPolicy(num_drafts), found, [found.texts[number]], random.Random(0))
            num_rehearsed = 0
            while turn.running:
                turn.step()
                num_rehearsed += 1
            before = llm.stats.num_steps
            with internals.asking_for(llm, num_drafts):
                llm.generate(
                    [line], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False
                )
            assert num_rehearsed == llm.stats.num_steps - before, (number, num_drafts)


def test_a_recording_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(recording(3).as_json()))
    assert rehearse.Recording.read(file) == recording(3)


@pytest.mark.parametrize("has_kv", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_drafts_that_are_never_right_cost_next_to_nothing(has_kv: bool, batch: int) -> None:
    found = rehearse.speeds(recording(0, has_kv=has_kv), batch)
    assert found["auto"] > 0.97 and found["new"] > 0.97
    assert found["K=8"] < 0.7, "the rehearsal knows that such drafts cost"


@pytest.mark.parametrize("has_kv", [False, True])
def test_drafts_that_are_always_right_are_all_used(has_kv: bool) -> None:
    found = rehearse.speeds(recording(8, has_kv=has_kv), 1)
    assert rehearse.best_fixed(found) == "K=8"
    assert found["auto"] > 0.95 * found["K=8"] > 2


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
@pytest.mark.parametrize("file", sorted(DATA.glob("*.json")), ids=lambda file: file.stem)
def test_recorded_drafts_are_used_as_well_as_by_the_best_fixed_number(file: Path, batch: int) -> None:
    """Costs and drafts of real drafters, recorded on a processor with two cores."""
    found = rehearse.speeds(rehearse.Recording.read(file), batch)
    assert found["auto"] >= rehearse.PLAIN_BOUND
    assert found["auto"] >= rehearse.FIXED_BOUND * found[rehearse.best_fixed(found)]
    assert found["new"] >= rehearse.PLAIN_BOUND - 0.01


def test_a_command_prints_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "right.json"
    file.write_text(json.dumps(recording(8).as_json()))
    monkeypatch.setattr(sys, "argv", ["rehearse.py", str(file), "--batches", "1,2"])
    assert rehearse.main() == 0
    assert capsys.readouterr().out.count("of K=8") == 2
