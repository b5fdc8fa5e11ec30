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
from draftproof.engine.costs import Curve, StepOutcome
from draftproof.engine.policy import FixedPolicy
from draftproof.engine.progress import Progress

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


class ProbesOnce(FixedPolicy):
    """Its second and third step make no drafts, to find out what such steps take."""

    plain_every, is_probing, num_steps = 1, False, 0

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self.num_steps += 1
        self.is_probing = self.num_steps in (2, 3)  # the first of these verifies what there is
        return [0] * len(asked) if self.is_probing else super().choose(asked, num_others, num_joining)

    def finished(self, step: StepOutcome) -> None:
        self.is_probing = False


def test_a_drafter_sees_the_last_step_of_a_probe_too() -> None:
    policy, its = ProbesOnce(3), recording(8)
    turn = rehearse.Turn(policy, its, its.texts[:2], random.Random(0))
    for _ in range(5):
        turn.step()
    assert policy.num_steps == 5 and not any(request.has_hole for request in turn.running)


# Milliseconds of an 8B model's captured steps with an EAGLE-3 head on an H200, by requests and number of drafts, for
# sequences of 250 tokens, as the profile found them. Beside prompts a row takes 26 microseconds.
STEP_MS = {
    1: {0: 4.3, 1: 4.6, 3: 5.1, 5: 5.6},
    2: {0: 4.3, 1: 4.7, 3: 5.2, 5: 5.7},
    4: {0: 4.4, 1: 4.8, 3: 5.3, 5: 5.9},
    8: {0: 4.5, 1: 4.8, 3: 5.5, 5: 6.3},
    16: {0: 4.6, 1: 5.0, 3: 6.0, 5: 6.8},
    24: {0: 4.8, 1: 5.4, 3: 6.4, 5: 11.0},
    32: {0: 5.0, 1: 5.6, 3: 7.0, 5: 10.6},
    40: {0: 5.3, 1: 5.9, 3: 10.7, 5: 10.9},
    48: {0: 5.4, 1: 6.1, 3: 10.3},
    56: {0: 5.5, 1: 6.6, 3: 10.7},
    64: {0: 5.6, 1: 6.6, 3: 10.6},
}
PROMPT_ROWS, PROMPT_ROW_MS = 2048, 0.026


def captured(rate: float, num_texts: int) -> rehearse.Recording:
    """Texts in which each draft is right at this rate, where steps are captured and compute ten prompts at most."""
    rng = random.Random(0)

    def right() -> int:
        return next((n for n in range(5) if rng.random() >= rate), 5)

    target = Curve({num_requests: ms[0] / 1e3 for num_requests, ms in STEP_MS.items()})
    target.set(64 + PROMPT_ROWS, (STEP_MS[64][0] + PROMPT_ROWS * PROMPT_ROW_MS) / 1e3)
    draft = {
        str(r): {str(k): ms / 1e3 - target.at(r * (1 + k)) for k, ms in own.items() if k}
        for r, own in STEP_MS.items()
    }
    costs = COSTS | {"target": {str(rows): its for rows, its in target.points.items()}, "draft": draft}
    texts = [
        rehearse.Text(200, {at: rehearse.Found(5, right()) for at in range(100)}) for _ in range(num_texts)
    ]
    return rehearse.Recording(
        (0, 1, 3, 5),
        costs,
        0.0,
        is_compared=False,
        has_kv=True,
        texts=texts,
        buckets=tuple(STEP_MS),
        prompts_together=PROMPT_ROWS // 200,
    )


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("batch", [4, 16, 64])
def test_captured_steps_have_as_good_numbers_of_drafts_as_other_rules(rate: float, batch: int) -> None:
    found = rehearse.speeds(captured(rate, batch * rehearse.TURNS[batch]), batch)
    assert found["new"] >= 1.0
    assert found["auto"] >= 0.965 * found[rehearse.best_fixed(found)]
    assert found["auto"] >= 0.99 * max(found["vLLM's"], found["SGLang's"])


def test_a_command_prints_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "right.json"
    file.write_text(json.dumps(recording(8).as_json()))
    monkeypatch.setattr(sys, "argv", ["rehearse.py", str(file), "--batches", "1,2"])
    assert rehearse.main() == 0
    assert capsys.readouterr().out.count("of K=8") == 2
