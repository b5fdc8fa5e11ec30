"""Slowdown of decoding requests by concurrent prefill: mixed steps captured or recorded, and eager.

    PYTHONPATH=src:. python bench/mixed.py --device cuda --shape 8b --budgets 256,512,2048
    PYTHONPATH=src:. python bench/mixed.py --device cpu --model tiny --drafter '{"model": "EAGLE3 HEAD"}' --batch 4

--batch requests decode while one prompt is being computed and the next one waits, so that every step has rows of
prompts. A budget is the maximum of rows in a step (`max_num_batched_tokens`). Plain decoding and a drafter take turns,
each with steps with prompts as captured graphs or recorded programs (`on`) and eager (`off`). Prints the decoding
requests' tokens per second, the time of their steps, and the host's working time per step; exit status 1 if the tokens
of any two ways differ.

--shape: random weights, and the target's own tokens as drafts, right at --rate, at an EAGLE-3 head's cost.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.models import Shape
from draftproof import LLM, SamplingParams
from draftproof.bench import internals, workload
from draftproof.bench.figures import percentile
from draftproof.drafters import recordings

Ids = list[list[int]]
CONTEXT = 200  # prompt tokens of the decoding requests
WARM_STEPS = 6  # first steps of a turn, not measured: frequent shapes are captured in them


@dataclass
class Way:
    """An engine, whether its steps with prompts are captured, and its measurements."""

    name: str
    llm: LLM
    is_captured: bool
    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0  # output of the decoding requests
    host_seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        total = sum(self.seconds)
        ms = {f"p{share}": 1e3 * percentile(self.seconds, share) for share in (10, 50, 90, 99)}
        return {
            "way": self.name,
            "tokens_per_s": self.num_tokens / total,
            "ms": ms,
            "host_ms": 1e3 * self.host_seconds / len(self.seconds),
            "steps": len(self.seconds),
        }


class Turn:
    """Requests that decode while one prompt after the other is computed."""

    def __init__(self, way: Way, decoding: Ids, prompts: Ids, num_tokens: int) -> None:
        self._way, self._prompts, self._next = way, prompts, 0
        self._stepper = internals.Stepper(way.llm)
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._texts: dict[str, list[int]] = {self._stepper.add(ids, params): [] for ids in decoding}
        self._others: list[str] = []

    def __enter__(self) -> Turn:
        while not all(self._texts.values()):
            self.step()
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in (*self._texts, *self._others):
            self._stepper.close(request_id)
        self._way.llm.core.drain()
        self._way.texts = list(self._texts.values())

    def step(self, num_waiting: int = 0) -> int:
        """Run a step with `num_waiting` prompts queued; returns the number of tokens of the decoding requests."""
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        while len(self._others) < num_waiting:
            ids = self._prompts[self._next % len(self._prompts)]
            self._next += 1
            self._others.append(self._stepper.add(ids, params))
        num_tokens = 0
        for delta in self._stepper.step():
            text = self._texts.get(delta.request_id)
            if text is not None:
                assert delta.finish_reason is None, "a request ended too early: raise --tokens"
                text += delta.token_ids
                num_tokens += len(delta.token_ids)
            elif delta.finish_reason is not None:
                self._others.remove(delta.request_id)
                self._stepper.close(delta.request_id)
        return num_tokens

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(2)

    def measure(self, num_steps: int) -> None:
        self.steps(WARM_STEPS)
        before = self._stepper.clock()
        for _ in range(num_steps):
            start = time.perf_counter()
            self._way.num_tokens += self.step(2)
            self._way.seconds.append(time.perf_counter() - start)
        took = self._stepper.clock() - before
        self._way.host_seconds += took.planning + took.launch + took.results


def cell(ways: list[Way], given: argparse.Namespace, budget: int, vocab_size: int) -> dict[str, Any]:
    """Measure all ways with at most `budget` rows per step."""
    decoding, prompts = requests(given, vocab_size)
    num_steps = max(12, given.rows // budget)
    same = True
    for number in range(given.turns + 1):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            with (
                internals.steps_of(way.llm, budget, is_captured=way.is_captured),
                Turn(way, decoding, prompts, given.tokens) as turn,
            ):
                turn.measure(num_steps)
            if not number:  # warm-up: frequent shapes are captured
                way.seconds, way.num_tokens, way.host_seconds = [], 0, 0.0
        same &= alike([way.texts for way in ways])
    return {"budget": budget, "same": same, "ways": [way.shown() for way in ways]}


def alike(texts: Sequence[Ids]) -> bool:
    """Whether each request's tokens are equal, up to the shorter length."""
    each = zip(*texts, strict=True)
    return all(a[: len(b)] == b[: len(a)] for first, *rest in each for a, b in ((first, x) for x in rest))


def requests(given: argparse.Namespace, vocab_size: int) -> tuple[Ids, Ids]:
    """(prompts of the decoding requests, prompts that are computed meanwhile)."""
    decoding = workload.random_ids([CONTEXT] * given.batch, vocab_size, random.Random(0))
    return decoding, workload.random_prompts(16, given.prompt, given.spread, vocab_size, seed=1)


def engines(given: argparse.Namespace, budget: int) -> tuple[LLM, LLM | None]:
    """A plain engine, and one with the drafter."""
    settings: dict[str, Any] = {
        "max_num_seqs": given.batch + 3,
        "max_model_len": max(CONTEXT + given.tokens, 2 * given.prompt) + 64,
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": False,
    }
    if not given.shape:
        settings |= {"model": given.model, "device": given.device, "dtype": given.dtype}
        drafting = {"policy": "fixed", **given.drafter} if given.drafter else None
        return LLM(**settings), LLM(**settings, speculative_config=drafting) if drafting else None
    shape = Shape(given.shape, given.device, given.small)
    plain = LLM(**shape.target(), **settings)
    decoding, _ = requests(given, plain.model_config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, detokenize=False)
    outputs = plain.generate([{"prompt_token_ids": ids} for ids in decoding], params, use_tqdm=False)
    file = Path(tempfile.mkdtemp()) / "recordings.json"
    recordings.save(file, outputs)
    head = shape.drafter()
    common = {key: head.pop(key) for key in ("num_speculative_tokens", "policy")}
    replay = {"method": "replay", "recordings": str(file), "acceptance": given.rate, "drafters": [head]}
    return plain, LLM(**shape.target(), **settings, speculative_config={**replay, **common})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="[default: the one that comes with draftproof]")
    parser.add_argument("--drafter", type=json.loads, help="a speculative_config")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shape", help="random weights of this shape instead, with replayed drafts")
    parser.add_argument("--small", type=Path, help="a folder to make a small model of that shape in")
    parser.add_argument("--rate", type=float, default=0.7, help="how often a replayed draft is right")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32, help="requests that decode")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt that comes")
    parser.add_argument("--spread", type=float, default=0.0, help="by which share prompts differ in length")
    parser.add_argument("--budgets", default="256,512,2048", help="rows of a step")
    parser.add_argument("--rows", type=int, default=10240, help="of a turn, so that turns take as long")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600, help="the most that are decoded in a turn")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    given = parse()
    budgets = sorted(map(int, given.budgets.split(",")), reverse=True)
    plain, drafting = engines(given, budgets[0])
    rows = []
    for budget in budgets:
        pairs = [("plain", plain), *([("drafts", drafting)] if drafting else [])]
        ways = [
            Way(f"{name} {'on' if is_captured else 'off'}", llm, is_captured)
            for name, llm in pairs
            for is_captured in (True, False)
        ]
        row = cell(ways, given, budget, plain.model_config.vocab_size)
        rows.append(row)
        print(f"{budget} rows a step, {given.batch} requests, prompts of {given.prompt}: same: {row['same']}")
        for way in row["ways"]:
            ms = "  ".join(f"{name} {value:.2f}" for name, value in way["ms"].items())
            print(
                f"    {way['way']:11} {way['tokens_per_s']:7.0f} tok/s  ms a step: {ms}  "
                f"host {way['host_ms']:.2f}  ({way['steps']} steps)",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
