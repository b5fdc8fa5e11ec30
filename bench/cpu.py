"""CPU figures: plain decoding beside transformers, a pass by rows and by parts, speculation, exactness, start-up.

Runs that are compared are interleaved, and each figure is the median of its repeats, because a shared machine's speed
drifts. Times in seconds unless a name says otherwise.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof import LLM, RequestOutput, SamplingParams, assets
from draftproof.kernels.graphs import Recorded

Row = dict[str, Any]
NUM_NEW, NUM_PROMPT = 96, 200


@dataclass(frozen=True)
class Setup:
    """Which model is measured, and how often."""

    root: Path
    model: str
    repeats: int

    def path(self, suffix: str = "") -> str:
        return str(self.root / f"{self.model}{suffix}")

    def llm(self, **settings: Any) -> LLM:
        return LLM(self.path(), enable_prefix_caching=False, **{"dtype": "bfloat16", **settings})


def code_prompts(llm: LLM, count: int, length: int | None = None) -> list[list[int]]:
    """Code the models never saw; with `length`, ids of exactly that many tokens."""
    texts = [json.loads(line).get("prompt") for line in assets.path(assets.PROMPTS).read_text().splitlines()]
    ids = [llm.tokenizer.encode(text) for text in texts if text]
    if length is None:
        return [ids[i % len(ids)] for i in range(count)]
    long = [token for prompt in ids for token in prompt] * 3
    return [long[37 * i : 37 * i + length] for i in range(count)]


def interleaved(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Median of each run's own measure, all taking turns; the first round warms up."""
    measured = [[run() for run in runs] for _ in range(repeats + 1)][1:]
    return [statistics.median(column) for column in zip(*measured, strict=True)]


def speed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of one generate call, prefill included."""
    start = time.perf_counter()
    outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - start
    return sum(len(o.outputs[0].token_ids) for o in outputs) / took


def plain(setup: Setup) -> Iterator[Row]:
    """Greedy tokens/s beside `transformers.generate` in the same precision."""
    from transformers import AutoModelForCausalLM

    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    for dtype in ("bfloat16", "float32"):
        llm = setup.llm(dtype=dtype)
        hf = AutoModelForCausalLM.from_pretrained(setup.path(), dtype=getattr(torch, dtype)).eval()
        for batch in (1, 8):
            prompts = code_prompts(llm, batch, NUM_PROMPT)

            def theirs(prompts: list[list[int]] = prompts, hf: Any = hf) -> float:
                start = time.perf_counter()
                given = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
                with torch.inference_mode():
                    hf.generate(
                        torch.tensor(prompts), attention_mask=torch.ones(len(prompts), NUM_PROMPT), **given
                    )
                return len(prompts) * NUM_NEW / (time.perf_counter() - start)

            def ours(prompts: list[list[int]] = prompts, llm: LLM = llm) -> float:
                return speed(llm, prompts, params)

            us, them = interleaved([ours, theirs], setup.repeats)
            yield {
                "dtype": dtype,
                "batch": batch,
                "tok_s": us,
                "transformers_tok_s": them,
                "ratio": us / them,
            }


def speculation(setup: Setup) -> Iterator[Row]:
    """Greedy decoding at batch 1 with a drafter, beside plain decoding in the same rounds."""
    base = setup.llm()
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    code = code_prompts(base, 10)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(5, 8000, (100,), generator=generator).tolist() for _ in range(10)]

    def one_by_one(llm: LLM, prompts: list[list[int]]) -> Callable[[], float]:
        return lambda: statistics.harmonic_mean([speed(llm, [p], params) for p in prompts])

    cases: list[tuple[str, dict[str, Any], list[list[int]]]] = []
    if Path(setup.path("-eagle3")).is_dir():
        head = {"model": setup.path("-eagle3")}
        cases += [
            ("eagle3 on code", {**head, "num_speculative_tokens": k, "policy": "fixed"}, code)
            for k in range(1, 6)
        ]
        cases += [("eagle3 on code", {**head, "policy": "adaptive"}, code)]
    for policy in ("fixed", "adaptive"):
        ngram = {"method": "ngram", "num_speculative_tokens": 4, "policy": policy}
        cases += [("ngram on code", ngram, code), ("ngram on random text", ngram, noise)]
    for what, config, prompts in cases:
        llm = setup.llm(speculative_config=config)
        with_drafts, without = interleaved(
            [one_by_one(llm, prompts), one_by_one(base, prompts)], setup.repeats
        )
        yield {
            "what": what,
            "k": config.get("num_speculative_tokens", "checkpoint's"),
            "policy": config["policy"],
            "tau": round(llm.stats.speculation.acceptance_length, 3),
            "tok_s": with_drafts,
            "plain_tok_s": without,
            "ratio": with_drafts / without,
        }


def exactness(setup: Setup) -> Iterator[Row]:
    """What `exact=True` costs against `exact=False`."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    exact, loose = setup.llm(), setup.llm(exact=False)
    for batch in (1, 8):
        prompts = code_prompts(exact, batch, NUM_PROMPT)
        runs = [lambda llm=llm, p=prompts: speed(llm, p, params) for llm in (exact, loose)]
        a, b = interleaved(runs, setup.repeats)
        yield {"batch": batch, "exact_tok_s": a, "loose_tok_s": b, "cost": b / a - 1}


PARTS = {
    "products": ("dp_product",),
    "attention": ("dp_attention", "dp_rope_store"),
    "other_operators": ("dp_norm", "dp_gate_mul", "dp_gather"),
}


def passes(setup: Setup) -> Iterator[Row]:
    """One target pass, logits included, by rows at context 300: time against one row, and where it goes.

    The parts are measured by running only the calls of some operators of the recorded pass; what is left is Python
    and torch around it. Without the compiled operators nothing is recorded, and the parts are left out.
    """
    llm = setup.llm()
    engine = llm._frontend.loaded.engine
    parts = engine.parts
    parts.state.block_table_SB[0, :32] = torch.arange(1, 33)

    def run(rows: int, target: Callable[..., Any]) -> float:
        positions = torch.arange(300, 300 + rows)
        inputs = (positions, positions, torch.zeros_like(positions), positions + 1, torch.arange(rows))
        start = time.perf_counter()
        for _ in range(20):
            parts.graphs.run(("target", rows, rows), target, inputs)
        return (time.perf_counter() - start) / 20 * 1e6

    def part(program: Any) -> float:
        start = time.perf_counter()
        for _ in range(20):
            program()
        return (time.perf_counter() - start) / 20 * 1e6

    counts = (1, 2, 4, 6, 8)
    times = interleaved([lambda n=n: run(n, engine._target) for n in counts], 8 * setup.repeats)
    for rows, micros in zip(counts, times, strict=True):
        row = {"rows": rows, "us": micros, "against_1_row": micros / times[0]}
        program = parts.graphs.program(("target", rows, rows)) if isinstance(parts.graphs, Recorded) else None
        if program is not None:
            programs = [program.part(names) for names in PARTS.values()]
            pieces = [lambda p=p: part(p) for p in programs]
            whole, *split = interleaved([lambda n=rows: run(n, engine._target), *pieces], 8 * setup.repeats)
            row |= {f"{name}_us": value for name, value in zip(PARTS, split, strict=True)}
            row |= {"python_us": whole - sum(split), "outside_products": 1 - split[0] / whole}
        yield row


def steps(setup: Setup) -> Iterator[Row]:
    """Where a step's time goes in generation at batch 1: target, drafting, and the host's share around them."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    configs: list[dict[str, Any] | None] = [None, {"method": "ngram", "policy": "fixed"}]
    if Path(setup.path("-eagle3")).is_dir():
        configs.append({"model": setup.path("-eagle3"), "num_speculative_tokens": 3, "policy": "fixed"})
    for config in configs:
        llm = setup.llm(speculative_config=config)
        prompts = code_prompts(llm, 6)
        llm.generate(prompts[:1], params, use_tqdm=False)
        s, before = llm.stats, (llm.stats.num_steps, llm.stats.target_seconds, llm.stats.draft_seconds)
        start = time.perf_counter()
        for prompt in prompts:
            llm.generate([prompt], params, use_tqdm=False)
        took, num = time.perf_counter() - start, s.num_steps - before[0]
        target, draft = s.target_seconds - before[1], s.draft_seconds - before[2]
        yield {
            "drafter": "none" if config is None else config.get("method", "eagle3"),
            "step_us": took / num * 1e6,
            "target_and_verify_us": target / num * 1e6,
            "draft_us": draft / num * 1e6,
            "host_us": (took - target - draft) / num * 1e6,
        }


def startup(setup: Setup) -> Iterator[Row]:
    """A new process to its first token, caches warm; and what importing the package adds to importing torch."""
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
    "plain": plain,
    "passes": passes,
    "steps": steps,
    "speculation": speculation,
    "exactness": exactness,
    "startup": startup,
}
