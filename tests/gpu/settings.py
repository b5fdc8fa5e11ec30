"""What the scripts for a GPU share: their flags, models, prompts, stages and the report of what was checked."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.engine.engine import Parts
from tests.conformance.cases import CASES, TARGETS
from tests.drafters import golden

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
SHAPES = ROOT / "bench" / "shapes"
DUMMY = "8b"
SHAPES_OF = {
    DUMMY: "llama-3.1-8b",
    "qwen": "qwen3-8b",
    "moe": "glm-4-moe-2b",
}  # models that have random weights
NUM_DRAFTS = 5


def parser(doc: str | None, stages: Sequence[str]) -> argparse.ArgumentParser:
    """The flags of every script."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", default="cuda", help="cuda or cpu")
    found.add_argument("--quick", action="store_true", help="small sizes: tries the script, proves little")
    found.add_argument("--models", type=Path, help="folder with small, small-eagle3 and so on")
    found.add_argument("--stages", default=",".join(stages), help=f"of {','.join(stages)}; default: all")
    return found


@dataclass
class Report:
    """One line a check, as soon as it is known."""

    num_passed: int = 0
    failed: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        print(f"       {text}", flush=True)

    def check(self, name: str, ok: bool, detail: str) -> None:
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {detail}", flush=True)
        if ok:
            self.num_passed += 1
        else:
            self.failed.append(name)

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """An exception inside is a failed check; what comes after goes on."""
        try:
            yield
        except Exception:
            self.check(name, False, f"raised\n{traceback.format_exc(limit=-6)}")

    def finish(self) -> int:
        """The summary; the exit status."""
        for name in self.failed:
            print(f"failed: {name}")
        print(f"{self.num_passed} checks passed, {len(self.failed)} failed", flush=True)
        return 1 if self.failed or not self.num_passed else 0


def run_stages(report: Report, wanted: str, stages: Mapping[str, Callable[[], object]]) -> int:
    """Every wanted stage, then the summary; ValueError for a name that is none."""
    names = wanted.split(",")
    unknown = [name for name in names if name not in stages]
    if unknown:
        raise ValueError(f"--stages: {unknown[0]!r}: choose from {', '.join(stages)}")
    for name in names:
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        with report.guard(name):
            stages[name]()
        release()
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return report.finish()


def run_apart(module: str, stages: Sequence[str], jobs: int) -> int:
    """Each stage by a process of its own, `jobs` at a time, with this one's other flags; the number that failed.

    They share the device: nothing that is measured means anything.
    """

    def run(stage: str) -> bool:
        # the last of two flags counts
        own = [sys.executable, "-m", module, *sys.argv[1:], "--stages", stage, "--jobs", "1"]
        done = subprocess.run(own, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, end="", flush=True)
        return done.returncode != 0

    with ThreadPoolExecutor(jobs) as pool:
        failed = [stage for stage, is_wrong in zip(stages, pool.map(run, stages), strict=True) if is_wrong]
    print(
        f"{len(stages) - len(failed)} of {len(stages)} stages passed{''.join(f', not {s}' for s in failed)}"
    )
    return len(failed)


def release() -> None:
    """Give back the memory of engines that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Models:
    """Where models and heads are, as keywords of `LLM`. `scratch` takes files that only a run needs."""

    device: str
    quick: bool
    folder: Path | None
    scratch: Path

    def target(self, name: str) -> dict[str, Any]:
        """Of tiny, small, gemma4 or one with random weights."""
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
        """Of a model or head; ValueError where it is not at hand."""
        base, _, head = name.partition("-")
        if base in SHAPES_OF:
            source = SHAPES / "-".join([SHAPES_OF[base], *[head][: bool(head)]])
            return shrunk(source, self.scratch / source.name) if self.quick else source
        if name == "draft":
            return DATA / "draft"
        if name in TARGETS:
            return Path(TARGETS[name]())
        found = golden.find(name, self.folder)
        if found is None:
            raise ValueError(f"--models: {name!r} is not in {self.folder}; give the folder that holds it")
        return found


def shrunk(source: Path, into: Path) -> Path:
    """The folder `into` with a model or head of the same make, small enough to try a script on a CPU."""
    sizes = {
        **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 4096},
    }
    raw = json.loads((source / "config.json").read_text())
    if "transformer_layer_config" in raw:
        raw["transformer_layer_config"] |= sizes
        raw |= {"draft_vocab_size": 512, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    else:
        raw |= {**sizes, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2}
        raw |= {"moe_intermediate_size": 128} if "moe_intermediate_size" in raw else {}
    into.mkdir(exist_ok=True)
    (into / "config.json").write_text(json.dumps(raw))
    return into


def parts(llm: LLM) -> Parts:
    """What the engine is made of."""
    return llm._frontend.loaded.engine.parts


def num_graphs(llm: LLM) -> int:
    """Passes that were captured (on a CPU: recorded) and can be run again."""
    return len(getattr(parts(llm).graphs, "_entries", ()))


def token_prompts(llm: LLM, count: int, longest: int) -> list[list[int]]:
    """`count` prompts as ids, all different, 20 to `longest` tokens, the same in every run.

    Pieces of the test prompts; random where the model has no tokenizer.
    """
    lengths = [20 + 29 * i % (longest - 19) for i in range(count)]
    if llm._frontend.tokenizer is None:
        return random_prompts(llm, lengths)
    lines = [json.loads(line) for line in assets.path(assets.PROMPTS).read_text().splitlines()]
    texts = [p.get("prompt") or p["messages"][0]["content"] for p in lines]
    ids = [llm.tokenizer.encode(text) for text in texts]
    stream = [token for text in ids for token in text] * 2
    step = len(stream) // 2 // count
    return [stream[step * i : step * i + length] for i, length in enumerate(lengths)]


def random_prompts(llm: LLM, lengths: Sequence[int]) -> list[list[int]]:
    """Random ids, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = llm._frontend.loaded.model.vocab_size
    return [torch.randint(10, vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Decoding:
    """Requests of an engine that are driven step by step; closes them at the end."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self._frontend = llm._frontend
        self._requests = [self._frontend.add({"prompt_token_ids": p}, params) for p in prompts]

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        for request in self._requests:
            self._frontend.close(request.request_id)

    @property
    def num_tokens(self) -> int:
        """Output tokens that the host has seen."""
        return sum(s.num_outputs for request in self._requests for s in request.sequences)

    def prefill(self) -> None:
        """Until every request has its first token."""
        while not all(s.num_outputs for request in self._requests for s in request.sequences):
            self.steps(1)

    def steps(self, count: int) -> None:
        """None of the requests may end meanwhile: a batch that shrinks is not steady."""
        for _ in range(count):
            self._frontend.step()
            for request in self._requests:
                request.pending.clear()
        assert not any(request.finished for request in self._requests), "a request ended too early"


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def describe(device: str) -> str:
    """The machine, for the head of a report."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}"
