"""Shared by the GPU checks: models and prompts, and running stages in separate processes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import NUM_DRAFTS, SHAPES_OF, Shape
from draftproof import LLM, assets
from draftproof.bench import internals, workload
from draftproof.runtime.graphs import Eager
from tests.conformance.cases import CASES, TARGETS
from tests.drafters import golden

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def run_apart(module: str, stages: Sequence[str], jobs: int) -> int:
    """Run the stages in `jobs` processes with this process's other flags; returns how many processes failed.

    Each takes stages that follow one another, which mostly have the same target and so one reference. They share the
    device, so timings mean nothing.
    """
    number = -(-len(stages) // jobs)
    shares = [stages[first : first + number] for first in range(0, len(stages), number)]

    def run(share: Sequence[str]) -> int:
        # argparse takes the last value of a repeated flag
        own = [sys.executable, "-m", module, *sys.argv[1:], "--stages", ",".join(share), "--jobs", "1"]
        with subprocess.Popen(
            own, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"[{share[0]}] {line}", end="", flush=True)
        return process.returncode

    with ThreadPoolExecutor(jobs) as pool:
        failed = [share for share, code in zip(shares, pool.map(run, shares), strict=True) if code]
    told = "".join(f", not all of {','.join(share)}" for share in failed)
    print(f"{len(shares) - len(failed)} of {len(shares)} processes passed{told}")
    return len(failed)


@dataclass(frozen=True)
class Models:
    """Models and heads, as keywords of `LLM`. `scratch`: folder for temporary files of a run."""

    device: str
    quick: bool
    folder: Path | None
    scratch: Path

    def target(self, name: str) -> dict[str, Any]:
        """Keywords of the target: tiny, small, gemma4 or one with random weights."""
        found: dict[str, Any] = {"model": str(self.path(name)), "device": self.device, "dtype": "bfloat16"}
        return {**found, "load_format": "dummy"} if name in SHAPES_OF else found

    def drafter(self, target: str, method: str) -> dict[str, Any]:
        """`speculative_config` of a method for a target, `NUM_DRAFTS` drafts if it can; for tiny, any with a case."""
        if method in CASES and CASES[method].own_target:
            return dict(CASES[method].llm(NUM_DRAFTS)["speculative_config"])
        draft = {"small": "tiny", "tiny": "draft"}.get(target, "")
        heads: dict[str, Callable[[], dict[str, Any]]] = {
            "ngram": lambda: {"method": "ngram", "prompt_lookup_min": 1},
            "draft_model": lambda: {"model": str(self.path(draft))},
            "eagle3": lambda: {"model": str(self.path(f"{target}-eagle3"))},
            "chain": lambda: {
                "method": "chain",
                "drafters": [heads[name]() for name in ("ngram", "eagle3", "draft_model")],
            },
        }
        found = heads[method]() if method in heads else CASES[method].config
        return {**found, "num_speculative_tokens": NUM_DRAFTS, "policy": "fixed"}

    def path(self, name: str) -> Path:
        """The folder of a model or head; ValueError if it is not available."""
        base, _, head = name.partition("-")
        if base in SHAPES_OF:
            small = self.scratch if self.quick else None
            return Shape(base, self.device, small).folder(f"-{head}" if head else "")
        if name == "draft":
            return DATA / "draft"
        if name in TARGETS:
            return Path(TARGETS[name]())
        found = golden.find(name, self.folder)
        if found is None:
            raise ValueError(f"--models: {name!r} is not in {self.folder}; give the folder that holds it")
        return found


def num_graphs(llm: LLM) -> int:
    """Number of captured graphs (on a CPU: recorded programs)."""
    graphs = llm.engine.runner.graphs
    return 0 if isinstance(graphs, Eager) else len(graphs.recorded_keys())


def token_prompts(llm: LLM, count: int, longest: int) -> list[list[int]]:
    """`count` prompts as ids, all different, 20 to `longest` tokens, the same in every run.

    Pieces of the test prompts; random where the model has no tokenizer.
    """
    lengths = [20 + 29 * i % (longest - 19) for i in range(count)]
    if not llm.has_tokenizer:
        return random_prompts(llm, lengths)
    lines = [json.loads(line) for line in assets.path(assets.PROMPTS).read_text().splitlines()]
    texts = [p.get("prompt") or p["messages"][0]["content"] for p in lines]
    ids = [llm.tokenizer.encode(text) for text in texts]
    stream = [token for text in ids for token in text] * 2
    step = len(stream) // 2 // count
    return [stream[step * i : step * i + length] for i, length in enumerate(lengths)]


def random_prompts(llm: LLM, lengths: Sequence[int]) -> list[list[int]]:
    """Random ids, the same in every run."""
    return workload.random_ids(lengths, internals.model_of(llm).vocab_size, random.Random(0))
