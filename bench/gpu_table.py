"""Speed of the Llama-3.1-8B shape with random weights, in bf16 at a context of 1000, each figure with its roofline.

    PYTHONPATH=src:. python bench/gpu_table.py --json table.json --stages plain,passes,unchecked

`plain`: tokens/s. `passes`: target passes by requests and rows, the draft pass, a prompt, each inside a CUDA graph.
`unchecked`: the same with exact=False. `long`: at 8k and 32k tokens. `replay`: tokens/s with drafts that are right at
given rates, at the cost of an EAGLE-3 head. `idle`: idle time of steady steps. `products`: compared with cuBLAS; these
two always use the Llama-3.1-8B shape. `transformers`: the same weights in transformers.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.models import DUMMY, NUM_DRAFTS, SHAPES_OF, Shape
from draftproof import LLM, SamplingParams
from draftproof.bench import internals, passes, report, rooflines, timeline, workload
from draftproof.bench.drive import Decoding
from draftproof.bench.harness import PLAIN, Benchmark, free_memory
from draftproof.bench.peers.engine import Spec
from draftproof.bench.stages import CheckLog, describe, parser, run_stages, synchronize
from draftproof.models import cost

CONTEXT, BATCHES = 1000, (1, 8, 64)
PASSES = (*((1, rows) for rows in (1, 2, 4, 6, 8)), (16, 1), (16, 6), (64, 1))
RATES = "0.6,0.8"
WARM, PROFILED = 6, 33  # steps before a clock starts, steps under the profiler
PROMPT = 64  # tokens of the shortest request whose idle time is measured


@dataclass
class Table:
    """Collects and prints figures. A roof is the best possible value, in the figure's unit."""

    log: CheckLog
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, unit: str, figure: float, roof: float | None, note: str = "") -> None:
        row = {"what": what, "unit": unit, "figure": figure, "roof": roof, "note": note}
        self.rows.append(row)
        cells = self.shown(row)
        detail = [cells["figure"], cells["roof"], cells["reached"], note]
        self.log.check(what, figure > 0, " ".join(detail))

    def shown(self, row: dict[str, Any]) -> dict[str, str]:
        figure, roof = row["figure"], row["roof"]
        found = {"what": row["what"], "figure": f"{figure:.4g} {row['unit']}", "note": row["note"]}
        if roof is None:
            return found | {"roof": "", "reached": ""}
        reached = figure / roof if row["unit"] == "tokens/s" else roof / figure
        return found | {"roof": f"{roof:.4g}", "reached": f"{reached:.0%}"}

    def markdown(self) -> str:
        columns = [("what", "what", ""), ("figure", "figure", ""), ("roofline", "roof", "")]
        columns += [("of it reached", "reached", ""), ("", "note", "")]
        return "\n".join(report.table(columns, [self.shown(row) for row in self.rows]))


@dataclass(frozen=True)
class Speed:
    """Measured speed. `tau`: tokens per request and step; `context`: mean length of the requests meanwhile."""

    tokens_per_second: float
    tau: float
    context: int


@dataclass
class Stages:
    """One model, measured in stages. `scratch`: folder for temporary files."""

    shape: Shape
    table: Table
    rates: Sequence[float]
    scratch: Path
    profiled: bool = False
    plain_speeds: dict[int, float] = field(default_factory=dict)
    exact_ms: dict[tuple[int, int], float] = field(default_factory=dict)  # by requests and rows

    @property
    def quick(self) -> bool:
        return self.shape.small is not None

    @property
    def batches(self) -> Sequence[int]:
        return (1, 4) if self.quick else BATCHES

    @property
    def context(self) -> int:
        return 50 if self.quick else CONTEXT

    @property
    def cases(self) -> Sequence[tuple[int, int]]:
        """(requests, rows per request) of each pass."""
        return ((1, 1), (1, 6), (2, 1)) if self.quick else PASSES

    @property
    def prompt(self) -> int:
        return 40 if self.quick else 2048

    @property
    def steps(self) -> int:
        return 8 if self.quick else 64

    def engine(self, **settings: Any) -> LLM:
        shared: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 2304}
        return LLM(**{**self.shape.target(), **shared, **settings})

    def eager(self, **settings: Any) -> LLM:
        """An engine without graphs, to measure single passes: captures cannot be nested."""
        return self.engine(enforce_eager=True, **settings)

    def prompts(self, llm: LLM, lengths: Sequence[int]) -> list[list[int]]:
        return workload.random_ids(lengths, internals.model_of(llm).vocab_size, random.Random(0))

    def params(self) -> SamplingParams:
        """Parameters with enough tokens that no request ends: the first decode while the last are prefilled."""
        reading = 2 * max(self.batches) * self.context // 2048
        most = (NUM_DRAFTS + 1) * (max(self.steps, PROFILED) + WARM + reading)
        return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)

    def decoding(self, llm: LLM, lengths: Sequence[int]) -> Decoding:
        return Decoding(internals.Stepper(llm), self.prompts(llm, lengths), self.params())

    def speed(self, llm: LLM, batch: int, repeats: int = 3) -> Speed:
        """Speed of decoding after all prompts; median of repeats."""
        found = []
        for _ in range(repeats):
            with self.decoding(llm, [self.context] * batch) as decoding:
                decoding.prefill()
                decoding.steps(WARM)
                synchronize(self.shape.device)
                start, before = time.perf_counter(), decoding.num_tokens
                decoding.steps(self.steps)
                synchronize(self.shape.device)
                took, after = time.perf_counter() - start, decoding.num_tokens
                context = self.context + (before + after) // (2 * batch)
                found.append(Speed((after - before) / took, (after - before) / batch / self.steps, context))
        return sorted(found, key=lambda s: s.tokens_per_second)[len(found) // 2]

    def plain(self) -> None:
        llm = self.engine()
        for batch in self.batches:
            s = self.speed(llm, batch)
            self.plain_speeds[batch] = s.tokens_per_second
            least = passes.round_seconds(llm, batch, s.context, 0)
            assert least is not None
            self.table.add(f"plain, batch {batch}", "tokens/s", s.tokens_per_second, batch / least)

    def passes(self) -> None:
        """Measure target and draft passes, each with its roofline, some with a ratio."""
        llm = self.eager(speculative_config=self.shape.drafter())
        for requests, rows in self.cases:
            one_row = self.exact_ms.get((requests, 1))
            self.exact_ms[requests, rows] = self.one_pass(llm, requests, rows, self.context, one_row)
        self.draft(llm, "")
        self.exact_ms[0, self.prompt] = self.prompt_pass(llm, "")
        del llm
        free_memory()
        head = {**self.shape.drafter(), "quantization": "fp8"}
        self.draft(self.eager(speculative_config=head), ", head in fp8")

    def draft(self, llm: LLM, title: str) -> None:
        """Measure the draft pass of one request; note its sum with a verify pass relative to a plain pass."""
        call = internals.draft_pass(llm, self.context, NUM_DRAFTS)
        ms, least = self.milliseconds(call), passes.draft_cost(llm, 1, self.context, NUM_DRAFTS)
        assert least is not None
        plain, verify = self.exact_ms[1, 1], self.exact_ms[1, NUM_DRAFTS + 1]
        note = f"with {verify:.3g} ms of verifying {(ms + verify) / plain:.3f} of a plain pass"
        self.table.add(f"draft pass, K = {NUM_DRAFTS}{title}", "ms", ms, rooflines.seconds(least) * 1e3, note)
        self.profile(call)

    def unchecked(self) -> None:
        """Measure the cost of exactness; `passes` must have run before."""
        llm = self.eager(exact=False)
        for requests, rows in self.cases:
            self.one_pass(llm, requests, rows, self.context, self.exact_ms.get((requests, rows)))
        self.prompt_pass(llm, ", exact=False", self.exact_ms.get((0, self.prompt)))

    def long(self) -> None:
        llm = self.eager(max_model_len=256 if self.quick else 33024)
        for context in (100, 200) if self.quick else (8192, 32768):
            first = self.one_pass(llm, 1, 1, context)
            self.one_pass(llm, 1, NUM_DRAFTS + 1, context, first)

    def one_pass(
        self, llm: LLM, requests: int, rows: int, context: int, against: float | None = None
    ) -> float:
        """Milliseconds of a target pass. `against`: those of the pass it is compared with."""
        internals.fill_cache(llm, requests, context + rows)
        call = internals.TargetPass(llm, rows, context, requests)
        ms = self.milliseconds(call)
        work = cost.target_pass(internals.model_of(llm), requests, rows, context)
        checked = "" if llm.config.exact else ", exact=False"
        note = f"{ms / against:.3f} of {'exact' if checked else '1 row'}" if against else ""
        what = f"target pass{checked}, {requests} x {rows} rows at {context}"
        self.table.add(what, "ms", ms, rooflines.seconds(work) * 1e3, note)
        self.profile(call)
        return ms

    def prompt_pass(self, llm: LLM, title: str, exact: float | None = None) -> float:
        internals.fill_cache(llm, 1, self.prompt)
        call = internals.TargetPass(llm, self.prompt, 0, last_only=True)
        ms = self.milliseconds(call)
        work = cost.prompt_pass(internals.model_of(llm), self.prompt)
        note = f"{work.flops / ms / 1e9:.0f} TFLOP/s"
        note += "" if exact is None else f", {exact / ms:.3f} of exact"
        self.table.add(f"prompt of {self.prompt}{title}", "ms", ms, rooflines.seconds(work) * 1e3, note)
        self.profile(call)
        return ms

    def milliseconds(self, call: Callable[[], object]) -> float:
        with torch.no_grad():
            return 1e3 * passes.seconds_alone(call, self.shape.device)

    def profile(self, call: Callable[[], object]) -> None:
        if self.profiled:
            with torch.no_grad():
                for line in passes.kernels_of(call, self.shape.device):
                    self.table.log.note(line)

    def idle(self) -> None:
        shape = dataclasses.replace(self.shape, name=DUMMY)
        for name, drafter in ((f"{DUMMY}-plain", None), (DUMMY, shape.drafter())):
            llm = self.engine(**shape.target(), speculative_config=drafter)
            for batch in (1, 4) if self.quick else (1, 64):
                with self.decoding(llm, [PROMPT + i for i in range(batch)]) as decoding:
                    decoding.prefill()
                    decoding.steps(2 * WARM)
                    run = partial(decoding.steps, 6 if self.quick else PROFILED)
                    share = timeline.idle(run, self.shape.device)
                self.table.add(f"GPU idle, {name}, batch {batch}", "%", 100 * share, None)
            del llm
            free_memory()

    def transformers(self) -> None:
        from draftproof.bench.peers.hf import Transformers

        num_new, batches = self.steps // 2, (1, 4)
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        bench = Benchmark(lambda variant: self.engine())
        bench.describe()
        prompts = self.prompts(bench.engine(PLAIN), [self.context] * max(batches))
        jobs = workload.jobs(prompts, range(len(prompts)), params)
        for batch in batches:
            bench.run_once(PLAIN, jobs[:batch], batch)
            bench.measure(batch, [PLAIN], [jobs], batch)
        speeds = {batch: bench.measured[batch, PLAIN].speed for batch in batches}
        for batch, speed in speeds.items():
            self.table.add(f"generate, batch {batch}, prompts included", "tokens/s", speed, None)
        bench.release([PLAIN])
        spec = Spec(
            where="draftproof.bench.peers.hf:Transformers",
            model=str(self.shape.folder()),
            dtype=str(bench.dtype).removeprefix("torch."),
            device=str(bench.device),
            dummy=True,
        )
        peer = Transformers(spec)
        for batch in batches:
            for way in ("", *(w for w, reach in peer.ways.items() if (reach == "single") == (batch == 1))):
                peer.generate(prompts[:batch], num_new, way)  # warm-up
                found, seconds = peer.generate(prompts[:batch], num_new, way)
                expected = [list(bench.reference[i].outputs[0].token_ids) for i in range(batch)]
                equal = sum(a == b for a, b in zip(found, expected, strict=True))
                speed = sum(map(len, found)) / seconds
                note = f"ours {speeds[batch] / speed:.2f} times as fast; ids of {equal} of {batch} outputs are ours"
                name = f"transformers {peer.version}{', ' if way else ''}{way}, batch {batch}"
                self.table.add(name, "tokens/s", speed, None, note)

    def products(self) -> None:
        if self.shape.device == "cpu":
            self.table.log.note("products: against cuBLAS, on a GPU only")
            return
        from bench import gpu_kernels

        with torch.inference_mode():
            found, num_bytes = gpu_kernels.products()
        roof = num_bytes / rooflines.H200.bytes * 1e3
        for rows, ms in found["exact"].items():
            cublas = found["cublas"][rows]
            note = f"cuBLAS {cublas:.3g} ms, exact / cuBLAS {ms / cublas:.3f}"
            self.table.add(f"all products of a pass, {rows} rows", "ms", ms, roof, note)

    def replay(self) -> None:
        from draftproof.drafters import recordings

        file = self.scratch / "recordings.json"
        llm = self.engine()
        prompts = self.prompts(llm, [self.context] * max(self.batches))
        recordings.save(file, llm.generate(prompts, self.params(), use_tqdm=False))
        if not self.plain_speeds:  # measured in the same run as what it is compared with
            self.plain_speeds = {b: self.speed(llm, b, 1).tokens_per_second for b in self.batches}
        del llm
        drafter = self.shape.drafter()
        for rate in self.rates:
            free_memory()
            settings = {"num_speculative_tokens": NUM_DRAFTS, "policy": "fixed", "recordings": str(file)}
            inner = {"method": "replay", "acceptance": rate, "drafters": [{"model": drafter["model"]}]}
            self.replay_at(rate, self.engine(speculative_config={**settings, **inner}))

    def replay_at(self, rate: float, llm: LLM) -> None:
        for batch in self.batches:
            s = self.speed(llm, batch)
            least = passes.round_seconds(llm, batch, s.context, NUM_DRAFTS)
            assert least is not None
            note = f"tau {s.tau:.2f}, {s.tokens_per_second / self.plain_speeds[batch]:.2f} of plain"
            what = f"K = {NUM_DRAFTS}, drafts right at {rate:g}, batch {batch}"
            self.table.add(what, "tokens/s", s.tokens_per_second, s.tau * batch / least, note)
        assert llm.stats.num_drafter_faults == 0, f"{llm.stats.num_drafter_faults} faults of the drafter"


def main() -> int:
    names = ("plain", "passes", "unchecked", "long", "idle", "replay", "products", "transformers")
    flags = parser(__doc__, names)
    flags.add_argument("--shape", default=DUMMY, choices=SHAPES_OF, help="the model; default: Llama-3.1-8B")
    flags.add_argument("--profile", action="store_true", help="the kernels of each pass, too")
    flags.add_argument(
        "--json", type=Path, help="write the figures there; figures of other stages in it are kept"
    )
    flags.add_argument("--rates", default=RATES, help="how often a draft of `replay` is right")
    given = flags.parse_args()
    print(describe(given.device), flush=True)
    table = Table(CheckLog())
    with tempfile.TemporaryDirectory() as folder:
        shape = Shape(given.shape, given.device, Path(folder) if given.quick else None)
        rates = [float(rate) for rate in given.rates.split(",")]
        stages = Stages(shape, table, rates, Path(folder), given.profile)
        status = run_stages(table.log, given.stages, {name: getattr(stages, name) for name in names})
    if given.json:
        before = json.loads(given.json.read_text()) if given.json.is_file() else []
        measured = {row["what"] for row in table.rows}
        table.rows = [row for row in before if row["what"] not in measured] + table.rows
        given.json.write_text(json.dumps(table.rows, indent=1))
    print(table.markdown())
    return status


if __name__ == "__main__":
    sys.exit(main())
