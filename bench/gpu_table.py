"""Speed of the Llama-3.1-8B shape with random weights, in bf16 at a context of 1000, each figure beside its roofline.

    PYTHONPATH=src:. python bench/gpu_table.py --json table.json --stages plain,passes,replay,products

`plain`: tokens/s. `passes`: one target pass by rows, and the draft pass, inside a CUDA graph. `replay`: tokens/s with
drafts that are right at given rates, at the cost of an EAGLE-3 head. `products`: against cuBLAS.
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
from torch import Tensor

from draftproof import LLM, SamplingParams
from draftproof.attention.base import PagedAttention, Rows
from draftproof.bench import rooflines
from draftproof.drafters.base import Verified
from draftproof.models.config import ModelConfig
from tests.gpu.settings import (
    DUMMY,
    NUM_DRAFTS,
    Decoding,
    Models,
    Report,
    describe,
    parser,
    parts,
    random_prompts,
    release,
    run_stages,
    synchronize,
)

CONTEXT, BATCHES, PASS_ROWS = 1000, (1, 8, 64), (1, 2, 4, 6, 8)
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
    plain_speeds: dict[int, float] = field(default_factory=dict)

    @property
    def batches(self) -> Sequence[int]:
        return (1, 4) if self.models.quick else BATCHES

    @property
    def context(self) -> int:
        return 50 if self.models.quick else CONTEXT

    @property
    def steps(self) -> int:
        return 8 if self.models.quick else 64

    def engine(self, **settings: Any) -> LLM:
        shared: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 64, "max_model_len": 2048}
        return LLM(**self.models.target(DUMMY), **shared, **settings)

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
            work = rooflines.target_pass(_config(llm), batch, 1, s.context)
            self.table.add(f"plain, batch {batch}", "tokens/s", s.tokens_per_second, batch / work.seconds)

    def passes(self) -> None:
        """Without the engine around them: its parts, called as a step calls them, on request 0 of a filled cache."""
        head = self.models.drafter(DUMMY, "eagle3")
        llm = self.engine(
            enforce_eager=True, speculative_config=head
        )  # so that nothing captures inside a capture
        p, device = parts(llm), self.models.device
        blocks = p.state.block_table_SB.shape[1]
        p.state.block_table_SB[0] = torch.arange(1, blocks + 1, device=device)
        for layer in (*p.cache.layers, *p.draft_cache.layers):
            layer.k.normal_()
            layer.v.normal_()
        with torch.no_grad():
            first = 0.0
            for rows in PASS_ROWS:
                ms = 1e3 * seconds(TargetPass(llm, rows, self.context), device)
                first = first or ms
                roof = rooflines.target_pass(_config(llm), 1, rows, self.context).seconds * 1e3
                self.table.add(f"target pass, {rows} rows", "ms", ms, roof, f"{ms / first:.3f} of 1 row's")
            ms = 1e3 * seconds(draft_pass(llm, self.context), device)
        self.table.add(
            f"draft pass, K = {NUM_DRAFTS}", "ms", ms, draft_work(llm, 1, self.context).seconds * 1e3
        )

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
        head = self.models.drafter(DUMMY, "eagle3")
        for rate in self.rates:
            release()
            settings = {"num_speculative_tokens": NUM_DRAFTS, "policy": "fixed", "recordings": str(file)}
            inner = {"method": "replay", "acceptance": rate, "drafters": [{"model": head["model"]}]}
            self.replay_at(rate, self.engine(speculative_config={**settings, **inner}))

    def replay_at(self, rate: float, llm: LLM) -> None:
        for batch in self.batches:
            s = self.speed(llm, batch)
            work = rooflines.target_pass(_config(llm), batch, NUM_DRAFTS + 1, s.context).seconds
            work += draft_work(llm, batch, s.context).seconds
            note = f"tau {s.tau:.2f}, {s.tokens_per_second / self.plain_speeds[batch]:.2f} of plain"
            what = f"K = {NUM_DRAFTS}, drafts right at {rate:g}, batch {batch}"
            self.table.add(what, "tokens/s", s.tokens_per_second, s.tau * batch / work, note)
        assert llm.stats.num_drafter_faults == 0, f"{llm.stats.num_drafter_faults} faults of the drafter"


def _config(llm: LLM) -> ModelConfig:
    return llm._frontend.loaded.model


def seconds(call: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Least time of a call: on a GPU inside a CUDA graph, by events."""
    if device.startswith("cuda"):
        from draftproof.kernels.gpu.planner import TimedGraph

        return TimedGraph([call]).microseconds() / 1e6
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


class TargetPass:
    """Rows of request 0 from `context` on, logits of all; what a step's target pass is."""

    def __init__(self, llm: LLM, rows: int, context: int) -> None:
        self._parts = parts(llm)
        device = self._parts.state.device
        self.positions_T = torch.arange(context, context + rows, device=device)
        self.slots_T = torch.zeros_like(self.positions_T)
        self.tokens_T = torch.arange(10, 10 + rows, device=device)

    def __call__(self) -> tuple[Tensor, ...]:
        p = self._parts
        attn = PagedAttention(p.ops, p.backend, p.cache, Rows.causal(self.positions_T, self.slots_T))
        out = p.target(self.tokens_T, attn, p.spec.taps.layers, p.spec.taps.final)
        return (p.target.logits(out.hidden_TH), *out.taps)


def draft_pass(llm: LLM, context: int) -> Callable[[], object]:
    """The draft pass after a round of K + 1 rows of request 0, of which 3 survived."""
    p, target = parts(llm), TargetPass(llm, NUM_DRAFTS + 1, context)
    assert p.guard is not None

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, device=p.state.device)

    slots_R = numbers(0)
    verified = Verified(
        tokens_T=target.tokens_T,
        positions_T=target.positions_T,
        cu_R1=numbers(0, NUM_DRAFTS + 1),
        slots_R=slots_R,
        live_R=numbers(3),
        next_R=numbers(7),
        k_R=numbers(NUM_DRAFTS),
        taps=target()[1:],
        draw=p.verifier.drawer(slots_R, numbers(context + 4)),
        history=lambda _: torch.zeros(0, dtype=torch.int32),
    )
    drafter = p.guard.drafter
    return lambda: drafter.propose(verified, NUM_DRAFTS)


def draft_work(llm: LLM, requests: int, context: int) -> rooflines.Work:
    """Of the EAGLE-3 head that drafts, or that replay runs."""
    guard = parts(llm).guard
    assert guard is not None
    found = rooflines.draft_pass_of(guard.drafter, requests, NUM_DRAFTS + 1, context, NUM_DRAFTS)
    assert found is not None
    return found


def main() -> int:
    names = ("plain", "passes", "replay", "products")
    flags = parser(__doc__, names)
    flags.add_argument(
        "--json", type=Path, help="write the figures there; figures of other stages in it are kept"
    )
    flags.add_argument("--rates", default=RATES, help="how often a draft of `replay` is right")
    given = flags.parse_args()
    print(describe(given.device), flush=True)
    table = Table(Report())
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(given.device, given.quick, given.models, Path(scratch))
        bench = Bench(models, table, [float(rate) for rate in given.rates.split(",")])
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
