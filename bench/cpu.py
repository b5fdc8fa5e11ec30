"""CPU figures: a pass by rows and by parts, speculation, exactness, start-up.

Compared runs take turns, and each figure is the median of its repeats, because a shared machine's speed drifts.
Times in seconds unless a name says otherwise.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import figures, internals, passes, workload
from draftproof.bench.harness import PLAIN, Benchmark, Measured, Variant, medians

Row = dict[str, Any]
NUM_NEW, NUM_PROMPT, CONTEXT = 96, 200, 300
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PARTS = {
    "products": ("dp_product",),
    "attention": ("dp_attention", "dp_rope_store"),
    "other_operators": ("dp_norm", "dp_gate_mul", "dp_gather"),
}


@dataclass(frozen=True)
class Setup:
    """Which model is measured, and how often."""

    root: Path
    model: str
    repeats: int

    def path(self, suffix: str = "") -> str:
        return str(self.root / f"{self.model}{suffix}")

    def has_head(self) -> bool:
        return Path(self.path("-eagle3")).is_dir()

    def benchmark(self, **settings: Any) -> Benchmark:
        shared = {"enable_prefix_caching": False, "dtype": "bfloat16", **settings}

        def make(variant: Variant) -> LLM:
            return LLM(self.path(), **{**shared, **variant.settings}, speculative_config=variant.config)

        return Benchmark(make)

    def measure(
        self, bench: Benchmark, variants: Sequence[Variant], prompts: list[list[int]], most_at_once: int
    ) -> list[Measured]:
        """Measure all variants on all prompts, `repeats` times after a warm-up."""
        jobs, cell = workload.jobs(prompts, range(len(prompts)), PARAMS), object()
        for variant in variants:
            bench.run_once(variant, jobs, most_at_once)
        bench.measure(cell, variants, [jobs] * self.repeats, most_at_once)
        return [bench.measured[cell, variant] for variant in variants]


def speed(measured: Measured) -> float:
    """Tokens per second, prompts included."""
    return statistics.median(run.num_tokens / run.seconds for run in measured.runs)


def code_prompts(llm: LLM, count: int, length: int | None = None) -> list[list[int]]:
    """Prompts of code that the models were not trained on; `length`: number of ids of each."""
    texts = [json.loads(line).get("prompt") for line in assets.path(assets.PROMPTS).read_text().splitlines()]
    ids = [llm.tokenizer.encode(text) for text in texts if text]
    if length is None:
        return [ids[i % len(ids)] for i in range(count)]
    long = [token for prompt in ids for token in prompt] * 3
    return [long[37 * i : 37 * i + length] for i in range(count)]


def speculation(setup: Setup) -> Iterator[Row]:
    """Greedy decoding at batch 1 with a drafter, compared with plain decoding in the same rounds."""
    bench = setup.benchmark()
    code = code_prompts(bench.engine(PLAIN), 10)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(5, 8000, (100,), generator=generator).tolist() for _ in range(10)]
    cases: list[tuple[str, dict[str, Any], list[list[int]]]] = []
    if setup.has_head():
        head = {"model": setup.path("-eagle3")}
        configs: list[dict[str, Any]] = [
            {**head, "num_speculative_tokens": k, "policy": "fixed"} for k in range(1, 6)
        ]
        cases += [("eagle3 on code", config, code) for config in [*configs, {**head, "policy": "adaptive"}]]
    for policy in ("fixed", "adaptive"):
        ngram = {"method": "ngram", "num_speculative_tokens": 4, "policy": policy}
        cases += [("ngram on code", ngram, code), ("ngram on random text", ngram, noise)]
    for what, config, prompts in cases:
        variant = Variant(what, config)
        bench.reference.clear()  # prompts have the same numbers in every case
        without, with_drafts = setup.measure(bench, [PLAIN, variant], prompts, 1)
        bench.release([variant])
        assert not with_drafts.differences, f"{what}: {with_drafts.differences[0]}"
        yield {
            "what": what,
            "k": config.get("num_speculative_tokens", "checkpoint's"),
            "policy": config["policy"],
            "tau": round(with_drafts.tally.speculation.acceptance_length, 3),
            "tok_s": speed(with_drafts),
            "plain_tok_s": speed(without),
            "ratio": speed(with_drafts) / speed(without),
        }


def exactness(setup: Setup) -> Iterator[Row]:
    """Cost of `exact=True` relative to `exact=False`."""
    bench, loose = setup.benchmark(), Variant("exact=False", settings={"exact": False})
    for batch in (1, 8):
        prompts = code_prompts(bench.engine(PLAIN), batch, NUM_PROMPT)
        bench.reference.clear()
        a, b = map(speed, setup.measure(bench, [PLAIN, loose], prompts, batch))
        yield {"batch": batch, "exact_tok_s": a, "loose_tok_s": b, "cost": b / a - 1}


def target_passes(setup: Setup) -> Iterator[Row]:
    """One target pass, logits included, by rows at context 300: time relative to one row, and by parts.

    The parts are measured by running only the calls of some operators of the recorded pass; the rest is Python and
    torch around it. Without the compiled operators nothing is recorded, and the parts are left out.
    """
    llm, counts = setup.benchmark().engine(PLAIN), (1, 2, 4, 6, 8)
    internals.fill_cache(llm, 1, CONTEXT + max(counts))
    whole = {rows: internals.TargetPass(llm, rows, CONTEXT) for rows in counts}

    def micros(calls: Sequence[Callable[[], object]]) -> list[float]:
        timed = [partial(passes.host_seconds, call, 20) for call in calls]
        return [1e6 * seconds for seconds in medians(timed, 8 * setup.repeats)]

    times = micros([whole[rows].repeat for rows in counts])
    for rows, us in zip(counts, times, strict=True):
        row = {"rows": rows, "us": us, "against_1_row": us / times[0]}
        pieces = whole[rows].calls_of(PARTS)
        if pieces:
            together, *split = micros([whole[rows].repeat, *pieces.values()])
            row |= {f"{name}_us": value for name, value in zip(pieces, split, strict=True)}
            row |= {"python_us": together - sum(split), "outside_products": 1 - split[0] / together}
        yield row


def steps(setup: Setup) -> Iterator[Row]:
    """Parts of a step's time in generation at batch 1: target, drafting and host, prompts included; and the part of a
    decoding step that overlaps with no pass."""
    variants = [PLAIN, Variant("ngram", {"method": "ngram", "policy": "fixed"})]
    if setup.has_head():
        head = {"model": setup.path("-eagle3"), "num_speculative_tokens": 3, "policy": "fixed"}
        variants.append(Variant("eagle3", head))
    bench = setup.benchmark()
    jobs = workload.jobs(code_prompts(bench.engine(PLAIN), 6), range(6), PARAMS)
    for variant in variants:
        bench.run_once(variant, jobs[:1], 1)
        run = bench.run_once(variant, jobs, 1)
        clock, micros = run.clock, 1e6 / run.clock.steps
        yield {
            "drafter": "none" if variant == PLAIN else variant.name,
            "step_us": run.seconds * micros,
            "target_and_verify_us": clock.target * micros,
            "draft_us": clock.draft * micros,
            "host_us": (run.seconds - clock.target - clock.draft) * micros,
            "unhidden_host_us": figures.unhidden_host([run]),
            **(figures.host_time([run]) or {}),
        }


def threads(setup: Setup) -> Iterator[Row]:
    """Eight threads with one request each, compared with one call with eight: both form one batch per step."""
    llm = setup.benchmark().engine(PLAIN)
    prompts = code_prompts(llm, 8, NUM_PROMPT)
    found: list[list[list[int]]] = []

    def ids(given: Sequence[list[int]]) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.generate(given, PARAMS, use_tqdm=False)]

    def batch() -> float:
        start = time.perf_counter()
        found.append(ids(prompts))
        return len(prompts) * NUM_NEW / (time.perf_counter() - start)

    def apart() -> float:
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            found.append([each for (each,) in pool.map(ids, ([prompt] for prompt in prompts))])
            return len(prompts) * NUM_NEW / (time.perf_counter() - start)

    one_call, eight_threads = medians([batch, apart], setup.repeats)
    assert all(outputs == found[0] for outputs in found)
    yield {"batch_tok_s": one_call, "threads_tok_s": eight_threads, "ratio": eight_threads / one_call}


def startup(setup: Setup) -> Iterator[Row]:
    """Time of a new process to its first token, with warm caches; and of importing the package after torch."""
    script = (
        "import time; t = time.perf_counter(); import torch; a = time.perf_counter(); import draftproof;"
        f"from draftproof import LLM, SamplingParams; b = time.perf_counter(); llm = LLM({setup.path()!r});"
        "next(iter(llm.stream('def', SamplingParams(temperature=0, max_tokens=4)))); c = time.perf_counter();"
        "print(a - t, b - a, c - t)"
    )

    def measure() -> list[float]:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return [float(x) for x in done.stdout.split()]

    measure()
    torch_import, own_import, first = (
        statistics.median(c) for c in zip(*(measure() for _ in range(3)), strict=True)
    )
    yield {"import_torch_s": torch_import, "import_draftproof_s": own_import, "first_token_s": first}


SECTIONS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "passes": target_passes,
    "steps": steps,
    "speculation": speculation,
    "exactness": exactness,
    "threads": threads,
    "startup": startup,
}
