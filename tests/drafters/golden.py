"""Acceptance of trained heads, measured by an independent reference implementation and counted in its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftproof import LLM, SamplingParams, assets

DATA = Path(__file__).parent.parent / "data"
GOLDEN: dict[str, dict[str, Any]] = {g["head"]: g for g in json.loads((DATA / "golden.json").read_text())}
SUPPORTED = list(GOLDEN)


def find(name: str, extra: Path | None) -> Path | None:
    """The folder of a model or head, in the package, the tests' data or `extra`; None if it is in none of them."""
    places = [assets.path(assets.TARGET).parent, DATA, DATA / "heads", *([extra] if extra else [])]
    return next((root / name for root in places if (root / name).is_dir()), None)


def folders(head: str, extra: Path | None) -> tuple[Path, Path] | None:
    """(target, head); None if one is not available."""
    target, own = find(head.split("-")[0], extra), find(head, extra)
    return None if target is None or own is None else (target, own)


def acceptance(llm: LLM, num_drafts: int, max_new: int) -> dict[str, Any]:
    """Acceptance counted like the reference: rounds that begin before `max_new` tokens, accepted tokens up to there."""
    lines = [json.loads(line) for line in assets.path(assets.PROMPTS).read_text().splitlines()]
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


def drafting(
    target: Path, head: Path, num_drafts: int, *, quantization: str | None = None, **settings: Any
) -> LLM:
    config = {"model": str(head), "num_speculative_tokens": num_drafts, "policy": "fixed"}
    config = {**config, "quantization": quantization}
    return LLM(str(target), dtype="float32", speculative_config=config, **settings)


def measure(target: Path, head: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(measured, golden) results of one head in fp32, with the same keys."""
    golden = GOLDEN[head.name]
    measured = acceptance(drafting(target, head, golden["k"], **settings), golden["k"], golden["max_new"])
    return measured, {key: golden[key] for key in measured}
