"""Speed of the Llama-3.1-8B shape with random weights, in bf16 at a context of 1000, each figure beside its roofline.

    PYTHONPATH=src:. python bench/gpu_table.py --json table.json --stages plain,passes,unchecked

`plain`: tokens/s. `passes`: target passes by requests and rows, the draft pass, a prompt, each inside a CUDA graph.
`unchecked`: the same with exact=False. `long`: at 8k and 32k tokens. `replay`: tokens/s with drafts that are right at
given rates, at the cost of an EAGLE-3 head. `idle`: of steady steps. `products`: against cuBLAS; these two are of the
Llama-3.1-8B shape whatever `--shape` says. `transformers`: the same weights there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import gpu_passes
from draftproof import LLM, SamplingParams
from draftproof.bench import rooflines
from tests.gpu import steady
from tests.gpu.settings import (
    DUMMY,
    NUM_DRAFTS,
    SHAPES_OF,
    Decoding,
    Models,
    Report,
    describe,
    parser,
    random_prompts,
    release,
    run_stages,
    synchronize,
)

CONTEXT, BATCHES = 1000, (1, 8, 64)
PASSES = (*((1, rows) for rows in (1, 2, 4, 6, 8)), (16, 1), (16, 6), (64, 1))
RATES = "0.6,0.8"
WARM = 6  # steps before a clock starts


@dataclass
class Table:
    """Figures as they come. A roof is the best that could be, in the figure's unit."""

    report: Report
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, unit: str, figure: float, roof: float | None, note: str = "") -> None:
        row = {"what": what, "unit": unit, "figure": figure, "roof": roof, "note": note}
        self.rows.append(row)
        self.report.check(what, figure > 0, " ".join(self._cells(row)[1:]))

    def _cells(self, row: dict[str, Any]) -> list[str]:
        figure, roof = row["figure"], row["roof"]
        share = (
            "" if roof is None else f"{(figure / roof if row['unit'] == 'tokens/s' else roof / figure):.0%}"
        )
        return [
            row["what"],
            f"{figure:.4g} {row['unit']}",
            "" if roof is None else f"{roof:.4g}",
            share,
            row["note"],
        ]

    def markdown(self) -> str:
        lines = ["| what | figure | roofline | of it reached | |", "|---|---|---|---|---|"]
        return "\n".join([*lines, *(f"| {' | '.join(self._cells(row))} |" for row in self.rows)])


@dataclass(frozen=True)
class Speed:
    """`tau`: tokens a request and step; `context`: mean length of the requests meanwhile."""

    tokens_per_second: float
    tau: float
    context: int


@dataclass
class Bench:
    """One model, measured in stages."""

    models: Models
    table: Table
    rates: Sequence[float]
    shape: str = DUMMY
    profiled: bool = False
    plain_speeds: dict[int, float] = field(default_factory=dict)
    exact_ms: dict[tuple[int, int], float] = field(default_factory=dict)  # by requests and rows

    @property
    def batches(self) -> Sequence[int]:
        return (1, 4) if self.models.quick else BATCHES

    @property
    def context(self) -> int:
        return 50 if self.models.quick else CONTEXT

    @property
    def cases(self) -> Sequence[tuple[int, int]]:
        """Requests and rows of each."""
        return ((1, 1), (1, 6), (2, 1)) if self.models.quick else PASSES

    @property
    def prompt(self) -> int:
        return 40 if self.models.quick else 2048

    @property
    def steps(self) -> int:
        return 8 if self.models.quick else 64

    def engine(self, **settings: Any) -> LLM:
        shared: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 2304}
        return LLM(**{**self.models.target(self.shape), **shared, **settings})

    def prompts(self, llm: LLM, batch: int) -> list[list[int]]:
        return random_prompts(llm, [self.context] * batch)

    def params(self) -> SamplingParams:
        """Long enough that no request ends: while the last prompts are read, the first requests decode already."""
        reading = 2 * max(self.batches) * self.context // 2048
        most = (NUM_DRAFTS + 1) * (self.steps + WARM + reading)
        return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)

    def speed(self, llm: LLM, batch: int, repeats: int = 3) -> Speed:
        """Of decoding once all prompts are through; median of repeats."""
        found = []
        for _ in range(repeats):
            with Decoding(llm, self.prompts(llm, batch), self.params()) as decoding:
                decoding.prefill()
                decoding.steps(WARM)
                synchronize(self.models.device)
                start, before = time.perf_counter(), decoding.num_tokens
                decoding.steps(self.steps)
                synchronize(self.models.device)
                took, after = time.perf_counter() - start, decoding.num_tokens
                context = self.context + (before + after) // (2 * batch)
                found.append(Speed((after - before) / took, (after - before) / batch / self.steps, context))
        return sorted(found, key=lambda s: s.tokens_per_second)[len(found) // 2]

    def plain(self) -> None:
        llm = self.engine()
        for batch in self.batches:
            s = self.speed(llm, batch)
            self.plain_speeds[batch] = s.tokens_per_second
            work = rooflines.target_pass(gpu_passes.config_of(llm), batch, 1, s.context)
            self.table.add(f"plain, batch {batch}", "tokens/s", s.tokens_per_second, batch / work.seconds)

    def passes(self) -> None:
        """Beside each, its roofline; and of what it is compared with, the ratio."""
        llm = self.eager(speculative_config=self.models.drafter(self.shape, "eagle3"))
        for requests, rows in self.cases:
            one_row = self.exact_ms.get((requests, 1))
            self.exact_ms[requests, rows] = self.one_pass(llm, requests, rows, self.context, one_row)
        self.draft(llm, "")
        self.exact_ms[0, self.prompt] = self.prompt_pass(llm, "")
        del llm
        release()
        head = {**self.models.drafter(self.shape, "eagle3"), "quantization": "fp8"}
        self.draft(self.eager(speculative_config=head), ", head in fp8")

    def draft(self, llm: LLM, title: str) -> None:
        """The draft pass of one request; with a round's target pass against a plain one."""
        call = gpu_passes.draft_pass(llm, self.context)
        with torch.no_grad():
            ms = 1e3 * gpu_passes.seconds(call, self.models.device)
        roof = gpu_passes.draft_work(llm, 1, self.context).seconds * 1e3
        plain, verify = self.exact_ms[1, 1], self.exact_ms[1, NUM_DRAFTS + 1]
        note = f"with {verify:.3g} ms of verifying {(ms + verify) / plain:.3f} of a plain pass"
        self.table.add(f"draft pass, K = {NUM_DRAFTS}{title}", "ms", ms, roof, note)
        self.profile(call)

    def unchecked(self) -> None:
        """After `passes` in the same run: what exactness costs."""
        llm = self.eager(exact=False)
        for requests, rows in self.cases:
            self.one_pass(llm, requests, rows, self.context, self.exact_ms.get((requests, rows)))
        self.prompt_pass(llm, ", exact=False", self.exact_ms.get((0, self.prompt)))

    def idle(self) -> None:
        """The steady steps of tests/gpu/steady.py."""
        for name in ("8b-plain", "8b"):
            for batch, share in steady.stage(self.table.report, self.models, name).items():
                self.table.add(f"GPU idle, {name}, batch {batch}", "%", 100 * share, None)

    def long(self) -> None:
        llm = self.eager(max_model_len=256 if self.models.quick else 33024)
        for context in (100, 200) if self.models.quick else (8192, 32768):
            first = self.one_pass(llm, 1, 1, context)
            self.one_pass(llm, 1, NUM_DRAFTS + 1, context, first)

    def eager(self, **settings: Any) -> LLM:
        """Parts are measured alone: nothing may capture inside a capture."""
        return self.engine(enforce_eager=True, **settings)

    def one_pass(
        self, llm: LLM, requests: int, rows: int, context: int, against: float | None = None
    ) -> float:
        """Milliseconds. `against`: those of the pass it is compared with."""
        gpu_passes.fill(llm, requests, context + rows)
        call = gpu_passes.TargetPass(llm, rows, context, requests)
        with torch.no_grad():
            ms = 1e3 * gpu_passes.seconds(call, self.models.device)
        work = rooflines.target_pass(gpu_passes.config_of(llm), requests, rows, context)
        checked = "" if llm.config.exact else ", exact=False"
        self.table.add(
            *(f"target pass{checked}, {requests} x {rows} rows at {context}", "ms", ms, work.seconds * 1e3),
            f"{ms / against:.3f} of {'exact' if checked else '1 row'}" if against else "",
        )
        self.profile(call)
        return ms

    def prompt_pass(self, llm: LLM, title: str, exact: float | None = None) -> float:
        gpu_passes.fill(llm, 1, self.prompt)
        call = gpu_passes.TargetPass(llm, self.prompt, 0, last_only=True)
        with torch.no_grad():
            ms = 1e3 * gpu_passes.seconds(call, self.models.device)
        work = rooflines.prompt_pass(gpu_passes.config_of(llm), self.prompt)
        note = f"{work.flops / ms / 1e9:.0f} TFLOP/s"
        note += "" if exact is None else f", {exact / ms:.3f} of exact"
        self.table.add(f"prompt of {self.prompt}{title}", "ms", ms, work.seconds * 1e3, note)
        self.profile(call)
        return ms

    def profile(self, call: Callable[[], object]) -> None:
        if self.profiled:
            with torch.no_grad():
                for line in gpu_passes.kernels_of(call, self.models.device):
                    self.table.report.note(line)

    def transformers(self) -> None:
        from draftproof.bench import against

        llm = self.engine()
        prompts, num_new = self.prompts(llm, 4), self.steps // 2
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        given: list[Any] = [{"prompt_token_ids": p} for p in prompts]
        speeds, outputs = {}, []
        for batch in (1, len(prompts)):
            llm.generate(given[:batch], params, use_tqdm=False)
            start = time.perf_counter()
            outputs = [
                o
                for first in range(0, len(given), batch)
                for o in llm.generate(given[first : first + batch], params, use_tqdm=False)
            ]
            speeds[batch] = len(prompts) * num_new / (time.perf_counter() - start)
            self.table.add(f"generate, batch {batch}, prompts included", "tokens/s", speeds[batch], None)
        config, device, dtype = llm.config, torch.device(self.models.device), torch.bfloat16
        del llm
        release()
        rows, notes = against.measure(
            Path(str(config.model)), device, dtype, dummy=True, prompts=prompts, plain_speeds=speeds,
            reference={i: o.outputs[0].token_ids for i, o in enumerate(outputs)}, batch_sizes=tuple(speeds),
            num_new=num_new, num_lookup=NUM_DRAFTS, tell=lambda _: None,
        )  # fmt: skip
        for row in rows:
            equal = f"ids of {row['num_identical']} of {row['num_compared']} outputs are ours"
            note = f"ours {row['plain_over_it']:.2f} times as fast; {equal}"
            what = f"{row['name']}, batch {row['batch_size']}"
            self.table.add(what, "tokens/s", row["output_throughput"], None, note)
        for note in notes:
            self.table.report.note(note)

    def products(self) -> None:
        if self.models.device == "cpu":
            self.table.report.note("products: against cuBLAS, on a GPU only")
            return
        from bench import gpu_kernels

        with torch.inference_mode():
            found, num_bytes = gpu_kernels.products()
        roof = num_bytes / rooflines.BYTES_PER_SECOND * 1e3
        for rows, ms in found["exact"].items():
            cublas = found["cublas"][rows]
            note = f"cuBLAS {cublas:.3g} ms, exact / cuBLAS {ms / cublas:.3f}"
            self.table.add(f"all products of a pass, {rows} rows", "ms", ms, roof, note)

    def replay(self) -> None:
        from draftproof.drafters import recordings

        file = self.models.scratch / "recordings.json"
        llm = self.engine()
        recordings.save(
            file, llm.generate(self.prompts(llm, max(self.batches)), self.params(), use_tqdm=False)
        )
        if not self.plain_speeds:  # measured beside what it is compared with
            self.plain_speeds = {b: self.speed(llm, b, 1).tokens_per_second for b in self.batches}
        del llm
        head = self.models.drafter(self.shape, "eagle3")
        for rate in self.rates:
            release()
            settings = {"num_speculative_tokens": NUM_DRAFTS, "policy": "fixed", "recordings": str(file)}
            inner = {"method": "replay", "acceptance": rate, "drafters": [{"model": head["model"]}]}
            self.replay_at(rate, self.engine(speculative_config={**settings, **inner}))

    def replay_at(self, rate: float, llm: LLM) -> None:
        for batch in self.batches:
            s = self.speed(llm, batch)
            work = rooflines.target_pass(gpu_passes.config_of(llm), batch, NUM_DRAFTS + 1, s.context).seconds
            work += gpu_passes.draft_work(llm, batch, s.context).seconds
            note = f"tau {s.tau:.2f}, {s.tokens_per_second / self.plain_speeds[batch]:.2f} of plain"
            what = f"K = {NUM_DRAFTS}, drafts right at {rate:g}, batch {batch}"
            self.table.add(what, "tokens/s", s.tokens_per_second, s.tau * batch / work, note)
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
    table = Table(Report())
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(given.device, given.quick, given.models, Path(scratch))
        rates = [float(rate) for rate in given.rates.split(",")]
        bench = Bench(models, table, rates, given.shape, given.profile)
        status = run_stages(table.report, given.stages, {name: getattr(bench, name) for name in names})
    if given.json:
        before = json.loads(given.json.read_text()) if given.json.is_file() else []
        measured = {row["what"] for row in table.rows}
        table.rows = [row for row in before if row["what"] not in measured] + table.rows
        given.json.write_text(json.dumps(table.rows, indent=1))
    print(table.markdown())
    return status


if __name__ == "__main__":
    sys.exit(main())
