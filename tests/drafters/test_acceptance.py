"""Acceptance of trained heads equals that of an independent reference implementation: a convention that is off shows
here, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, assets
from tests.drafters.derived import eagle_from_mtp

DATA = Path(__file__).parent.parent / "data"
GOLDEN: dict[str, dict[str, Any]] = {g["head"]: g for g in json.loads((DATA / "golden.json").read_text())}
# More models than the repository holds: DRAFTPROOF_TEST_MODELS=folder with `small`, `small-eagle3`, ...
EXTRA = os.environ.get("DRAFTPROOF_TEST_MODELS")
EMBEDDED = {"tiny-eagle3": assets.path("tiny-eagle3")}
EMBEDDED |= {name: DATA / name for name in ("tiny-mtp", "tiny-dflash")}
SUPPORTED = [
    *EMBEDDED,
    "tiny-peagle",
    "tiny-dspark",
    "tiny-dflash2",
    "small-eagle3",
    "small-mtp",
    "small-dflash",
]


def acceptance(llm: LLM, num_drafts: int, max_new: int) -> dict[str, Any]:
    """The reference's way of counting: rounds begun before `max_new` tokens, accepted tokens cut there."""
    lines = [json.loads(line) for line in (DATA / "prompts.jsonl").read_text().splitlines()]
    prompts = [p["prompt"] if "prompt" in p else llm.tokenizer.chat(p["messages"]) for p in lines]
    done: dict[str, int] = {}
    rounds = accepted = 0
    at_least = [0] * num_drafts
    params = SamplingParams(temperature=0, max_tokens=max_new + num_drafts + 2)
    for delta in llm.stream(prompts, params):
        before = done.get(delta.request_id, 0)
        if 0 < before < max_new:
            hits = min(sum(delta.accepted), max_new - before)
            rounds, accepted = rounds + 1, accepted + hits
            for i in range(hits):
                at_least[i] += 1
        done[delta.request_id] = before + len(delta.token_ids)
    return {
        "rounds": rounds,
        "tau_accepted": round(1 + accepted / rounds, 4),
        "accepted_per_position": [round(n / rounds, 4) for n in at_least],
    }


@pytest.mark.parametrize("name", SUPPORTED)
def test_acceptance_equals_the_reference(name: str) -> None:
    if name in EMBEDDED:
        target, head = str(assets.path("tiny")), str(EMBEDDED[name])
    elif EXTRA:
        target, head = str(Path(EXTRA) / name.split("-")[0]), str(Path(EXTRA) / name)
    else:
        pytest.skip("set DRAFTPROOF_TEST_MODELS to the folder that holds this model")
    golden = GOLDEN[name]
    measured = acceptance(drafting(target, head, golden["k"]), golden["k"], golden["max_new"])
    assert measured == {key: golden[key] for key in measured}


def test_the_same_head_in_another_form_is_accepted_as_often(tmp_path: Path) -> None:
    """An MTP head as an EAGLE head: another tap and another format, but for the first draft the same numbers."""
    target, head = assets.path("tiny"), EMBEDDED["tiny-mtp"]
    other = eagle_from_mtp(head, target, tmp_path)
    first, second = (acceptance(drafting(str(target), str(h), 1), 1, 24) for h in (head, other))
    assert first == second
    assert first["tau_accepted"] > 1.3


def drafting(target: str, head: str, k: int) -> LLM:
    config = {"model": head, "num_speculative_tokens": k, "policy": "fixed"}
    return LLM(target, dtype="float32", speculative_config=config)
