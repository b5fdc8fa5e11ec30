"""Adaptive speculation beside plain decoding, every fixed number of drafts and the rules that others ship.

    PYTHONPATH=src:. python bench/adaptive.py --model MODEL --drafter '{"model": "HEAD"}' --batches 1,4,16
    PYTHONPATH=src:. python bench/adaptive.py --model MODEL --drafter '{"model": "HEAD"}' --rates 0 --batches 1,4
    PYTHONPATH=src:. python bench/adaptive.py --model MODEL --drafter '{"method": "ngram"}' --changing --batches 1
    PYTHONPATH=src:. python bench/adaptive.py --shape 8b --rates 0.3,0.6,0.8,0.9 --batches 1,4,16,64

All of them take turns. A turn is as many requests as are decoded at once, times --waves: with one wave the slowest
request of each turn ends alone, with several its place is taken, as in a server. The best fixed number is chosen on
the even turns and compared on the odd ones. `new` is adaptive with everything forgotten before each turn, as in a new
engine. A cell fails where the upper end of the 90 % interval of a ratio lies below its bound: 0.95 of the best fixed
number, 0.97 of plain decoding. Exit status 1 if a cell fails or an output differs.

Predictions are of steps in which all decode, after every prompt was decoded once with the most drafts; they are
compared with the same steps, with as many drafts as predicted (or none) and with `auto`.

--rates: the drafter takes its time, and what it proposes are the target's own tokens, right as often as that.
--changing: a third of the turns are the prompts, a third noise, the last third the prompts again. There every fixed
number has to be beaten, by all turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.models import Shape
from bench.rules import AverageAcceptance, BatchTable
from draftproof import LLM, SamplingParams, assets
from draftproof.bench import internals, workload
from draftproof.cli.prompts import read_file
from draftproof.drafters import recordings
from draftproof.drafters.replay import ReplayDrafter
from draftproof.engine.costs import StepOutcome
from draftproof.engine.policy import AutoPolicy, FixedPolicy, Policy

PLAIN_BOUND, FIXED_BOUND, RULES_BOUND = 0.97, 0.95, 1.0
RESAMPLES = 2000
Ids = list[list[int]]


@dataclass
class Watched:
    """A policy, and the decoding steps that it hears of."""

    policy: Policy
    steps: list[StepOutcome]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def finished(self, step: StepOutcome) -> None:
        self.steps.append(step)
        self.policy.finished(step)


@dataclass
class Way:
    """One way of choosing, and what it took: seconds and tokens of each turn."""

    name: str
    llm: LLM
    policy: Callable[[], Policy] | None = None  # made before each turn; None: the engine's own stays
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[StepOutcome] = field(default_factory=list)

    def run(self, prompts: Ids, params: list[SamplingParams]) -> None:
        if self.policy is not None:
            self.llm.engine.policy = Watched(self.policy(), self.steps)
        start = time.perf_counter()
        found = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        self.seconds.append(time.perf_counter() - start)
        ids = [tuple(choice.token_ids) for output in found for choice in output.outputs]
        self.tokens.append(sum(map(len, ids)))
        self.outputs += ids

    def decoding_speed(self, batch: int) -> float:
        """Tokens per second of steps in which so many requests decode, and nobody's prompt is computed."""
        steps = [step for step in self.steps if step.num_requests == batch]
        return sum(step.num_tokens for step in steps) / sum(step.seconds for step in steps)

    def speed(self, turns: Sequence[int]) -> float:
        return sum(self.tokens[i] for i in turns) / sum(self.seconds[i] for i in turns)


def ratio(ours: Way, theirs: Way, turns: Sequence[int]) -> tuple[float, float, float]:
    """Speed of `ours` over that of `theirs` in these turns, with its 90 % interval, by resampling turns."""
    generator, found = random.Random(0), []
    for _ in range(RESAMPLES):
        some = generator.choices(turns, k=len(turns))
        found.append(ours.speed(some) / theirs.speed(some))
    found.sort()
    return ours.speed(turns) / theirs.speed(turns), found[RESAMPLES // 20], found[-RESAMPLES // 20]


@dataclass
class Bench:
    """One pair of engines, which decode `batch` requests at once; a turn has `waves` times as many."""

    plain: LLM
    drafting: LLM
    batch: int
    waves: int
    num_tokens: int
    num_turns: int
    temperature: float
    new: Policy  # a copy of the drafting engine's, as it was at the start
    rows: list[dict[str, Any]] = field(default_factory=list)

    def cell(self, name: str, prompts: Ids, noise: Ids | None = None) -> dict[str, Any]:
        """All ways over the prompts; over `noise`, too, where the workload is to change."""
        engine = self.drafting.engine
        auto = engine.policy
        assert isinstance(auto, AutoPolicy)
        levels = auto.costs.levels
        most = levels[-1]
        fixed = [Way(f"K={k}", self.drafting, partial(FixedPolicy, k)) for k in levels[1:]]
        table = [(8, most), (32, max(1, most // 2)), (64, 1)]
        sglang = AverageAcceptance(most)
        ours = Way("auto", self.drafting, lambda: auto)
        asker = internals.asking_anyway(self.drafting)
        off = Way("off", self.drafting, partial(FixedPolicy, 0))
        Way("asking", self.drafting, lambda: asker).run(
            prompts, [self._params(i) for i in range(len(prompts))]
        )
        ways = [
            Way("plain", self.plain),
            off,
            *fixed,
            Way("vLLM's", self.drafting, lambda: BatchTable(table)),
            Way("SGLang's", self.drafting, lambda: sglang),
            ours,
            Way("new", self.drafting, lambda: copy.deepcopy(self.new)),
        ]
        num = self.batch * self.waves
        for number in range(self.num_turns):
            is_noise = noise is not None and number * 3 // self.num_turns == 1
            source = noise if noise is not None and is_noise else prompts
            given = workload.cycled(source[number * num % len(source) :] + source, num)
            params = [self._params(number * num + i) for i in range(num)]
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                way.run(given, params)
        engine.policy = auto
        row = {"cell": name, "batch": self.batch, **self._judge(ways, fixed, is_changing=noise is not None)}
        context = self.batch * (statistics.mean(map(len, prompts)) + self.num_tokens / 2)
        prediction = asker.predict(self.batch, int(context))
        meant = dict(zip(levels, [off, *fixed], strict=True))[prediction.num_drafts]
        row["predicted_k"], row["predicted"] = prediction.num_drafts, prediction.speedup
        row["measured"] = meant.decoding_speed(self.batch) / off.decoding_speed(self.batch)
        row["auto_measured"] = ours.decoding_speed(self.batch) / off.decoding_speed(self.batch)
        self.rows.append(row)
        return row

    def _params(self, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=seed,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            detokenize=False,
        )

    def _judge(self, ways: Sequence[Way], fixed: Sequence[Way], *, is_changing: bool) -> dict[str, Any]:
        by_name = {way.name: way for way in ways}
        plain, auto, new = by_name["plain"], by_name["auto"], by_name["new"]
        every, even, odd = (
            range(self.num_turns),
            range(0, self.num_turns, 2),
            range(1, self.num_turns, 2),
        )
        chosen_on, compared_on = (every, every) if is_changing else (even, odd or every)
        best = max([plain, *fixed], key=lambda way: way.speed(chosen_on))
        bounds = {
            "auto/plain": (auto, plain, every, PLAIN_BOUND),
            "new/plain": (new, plain, every, PLAIN_BOUND),
            f"auto/best ({best.name})": (auto, best, compared_on, 1.0 if is_changing else FIXED_BOUND),
            "auto/vLLM's": (auto, by_name["vLLM's"], every, RULES_BOUND),
            "auto/SGLang's": (auto, by_name["SGLang's"], every, RULES_BOUND),
        }
        judged = {}
        for name, (ours, theirs, turns, bound) in bounds.items():
            middle, low, high = ratio(ours, theirs, turns)
            judged[name] = {"ratio": middle, "low": low, "high": high, "bound": bound, "ok": high >= bound}
        return {
            "speed": {way.name: way.speed(every) for way in ways},
            "ratios": judged,
            "same": all(way.outputs == plain.outputs for way in ways),
        }


def benches(given: argparse.Namespace) -> Iterator[tuple[str, Bench, Ids]]:
    """What is asked for, one after the other: name, engines, prompts."""
    for batch in map(int, given.batches.split(",")):
        for config in given.drafter:
            yield Path(config.get("model", config.get("method", ""))).name, *real(given, config, batch)
        if given.shape:
            yield given.shape, *replayed(given, batch)


def shown(row: dict[str, Any]) -> str:
    plain = row["speed"]["plain"]
    speeds = "  ".join(f"{name} {speed / plain:.3f}" for name, speed in row["speed"].items())
    judged = "  ".join(
        f"{name} {r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]{'' if r['ok'] else ' FAILS'}"
        for name, r in row["ratios"].items()
    )
    return (
        f"{row['cell']}, batch {row['batch']}: plain {plain:.0f} tok/s; {speeds}\n    {judged}\n"
        f"    decoding alone: predicted {row['predicted']:.2f}x with K={row['predicted_k']}, measured "
        f"{row['measured']:.2f}x, auto {row['auto_measured']:.2f}x; same: {row['same']}"
    )


def real_prompts(llm: LLM, file: Path | None) -> Ids:
    read = read_file(file or assets.path(assets.PROMPTS))
    return [prompt.token_ids(llm.tokenizer, chat=False) for prompt in read]


def bench_of(given: argparse.Namespace, plain: LLM, drafting: LLM, batch: int) -> Bench:
    return Bench(
        plain=plain,
        drafting=drafting,
        batch=batch,
        waves=given.waves,
        num_tokens=given.tokens,
        num_turns=given.num_turns,
        temperature=given.temperature,
        new=copy.deepcopy(drafting.engine.policy),
    )


def real(given: argparse.Namespace, config: dict[str, Any], batch: int) -> tuple[Bench, Ids]:
    """A model and a drafter as they are, or with the drafter's time and the target's own tokens."""
    settings: dict[str, Any] = {
        "max_num_seqs": batch,
        "enable_prefix_caching": False,
        "device": given.device,
    }
    plain = LLM(given.model, **settings)
    prompts = real_prompts(plain, given.prompts)
    if given.rates:
        config = recorded(plain, prompts, given, config)
    drafting = LLM(given.model, **settings, speculative_config=config)
    return bench_of(given, plain, drafting, batch), prompts


def recorded(plain: LLM, prompts: Ids, given: argparse.Namespace, head: dict[str, Any]) -> dict[str, Any]:
    """The settings of a drafter that proposes what `plain` answers, at the cost of another."""
    params = [
        SamplingParams(temperature=0, seed=i, max_tokens=given.tokens, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    outputs = plain.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    file = Path(tempfile.mkdtemp()) / "recordings.json"
    recordings.save(file, outputs)
    return {"method": "replay", "recordings": str(file), "acceptance": 0.5, "drafters": [head]}


def replayed(given: argparse.Namespace, batch: int) -> tuple[Bench, Ids]:
    """A published shape with random weights, whose own plain output is proposed at the cost of an EAGLE-3 head."""
    shape = Shape(given.shape, given.device, given.small)
    settings: dict[str, Any] = {
        "max_num_seqs": batch,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }
    plain = LLM(**shape.target(), **settings)
    prompts = workload.random_prompts(batch * 2, 200, 0.2, plain.model_config.vocab_size, seed=0)
    config = recorded(plain, prompts, given, {"model": shape.drafter()["model"]})
    drafting = LLM(**shape.target(), **settings, speculative_config=config)
    return bench_of(given, plain, drafting, batch), prompts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="[default: the one that comes with draftproof]")
    parser.add_argument(
        "--drafter", type=json.loads, action="append", default=[], help="a speculative_config"
    )
    parser.add_argument("--prompts", type=Path, help="as for generate")
    parser.add_argument("--shape", help="random weights of this shape instead, with replayed drafts")
    parser.add_argument(
        "--small", type=Path, help="a folder to make a small model of that shape in: a smoke test"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rates", help="replay drafts that are right so often, one after the other")
    parser.add_argument("--changing", action="store_true", help="prompts, noise, prompts again")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--num-turns", type=int, default=12, help="of each cell")
    parser.add_argument(
        "--waves", type=int, default=3, help="requests of a turn for each that is decoded at once"
    )
    parser.add_argument("--tokens", type=int, default=100, help="of each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    given = parse()
    rows: list[dict[str, Any]] = []

    for name, bench, prompts in benches(given):
        noise = None
        if given.changing:
            noise = workload.random_prompts(
                len(prompts), 200, 0.2, bench.plain.model_config.vocab_size, seed=1
            )
        for rate in given.rates.split(",") if given.rates else [""]:
            if rate:
                drafter = internals.drafter_of(bench.drafting)
                assert isinstance(drafter, ReplayDrafter)
                drafter.set_acceptance([float(rate)])
            row = bench.cell(f"{name}, right at {rate}" if rate else name, prompts, noise)
            rows.append(row)
            print(shown(row), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    failed = [row for row in rows if not row["same"] or not all(r["ok"] for r in row["ratios"].values())]
    print(f"{len(rows) - len(failed)} of {len(rows)} cells hold")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
