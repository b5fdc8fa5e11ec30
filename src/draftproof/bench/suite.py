"""A benchmark: every setting of the sweep, plain decoding beside each way of drafting, all outputs compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from draftproof.bench import environment, figures, passes, workload
from draftproof.bench.compare import Difference, compare
from draftproof.bench.drive import Client, Job, Run
from draftproof.bench.rooflines import Peaks, peaks_of
from draftproof.drafters.recordings import save
from draftproof.frontend.llm import LLM
from draftproof.kernels.room import free_bytes
from draftproof.types import RequestOutput, SamplingParams

Kind = Literal["latency", "throughput", "serve-like"]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of decoding. `config` is its speculative_config; None decodes plainly."""

    name: str
    config: dict[str, Any] | None = field(default=None, hash=False)
    acceptance: float | None = None  # of replayed drafts


PLAIN = Variant("plain")


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of the sweep. `rate`: requests a second, where they arrive by themselves."""

    batch_size: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"batch {self.batch_size}" + ("" if self.rate is None else f", {self.rate:g} requests/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured. `peaks` None: the device's own, where they are known."""

    kind: Kind
    batch_sizes: Sequence[int]
    rates: Sequence[float]
    burstiness: float
    num_iters: int
    num_warmups: int
    goodput: dict[str, float]
    seed: int
    peaks: Peaks | None = None

    @property
    def cells(self) -> list[Cell]:
        rates = self.rates if self.kind == "serve-like" else [None]
        return [Cell(batch, rate) for batch in self.batch_sizes for rate in rates]


@dataclass(slots=True)
class Measured:
    """One variant in one cell. `differences`: outputs that are not the plain ones."""

    runs: list[Run] = field(default_factory=list)
    num_drafts: int = 0
    runs_ahead: bool = False  # of the host's clock
    device_split: figures.Figures | None = None
    roofline_share: float | None = None
    differences: list[Difference] = field(default_factory=list)
    num_compared: int = 0


class Suite:
    """Runs it. `make` builds a variant's engine; `tell` gets a line for people when something begins.

    On a CPU, whose speed drifts, the variants take turns where all engines fit into memory at once; on a GPU one engine
    after the other has the memory to itself.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        variants: Sequence[Variant],
        make: Callable[[Variant], LLM],
        recordings: Path,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings, self.prompts, self._params = settings, prompts, params
        self.kind = settings.kind
        self._variants, self._make, self._recordings, self._tell = variants, make, recordings, tell
        self._engines: dict[str, LLM] = {}
        self.reference: dict[int, RequestOutput] = {}  # plain outputs, by prompt
        self.measured: dict[tuple[str, Cell], Measured] = {}
        self.environment: dict[str, Any] = {}
        self.memory: dict[str, str] = {}  # the line of each variant's engine
        self.peaks = settings.peaks
        self.device, self.dtype = torch.device("cpu"), torch.float32  # of the engines, once there is one

    def run(self) -> None:
        """Everything; what was measured before an exception stays."""
        self._describe()
        if any(v.acceptance is not None for v in self._variants):
            self._record()
        everybody = [PLAIN, *self._variants]
        groups = [everybody] if self._take_turns() else [[v] for v in everybody]
        for group in groups:
            for cell in self._settings.cells:
                self._measure(group, cell)
            for variant in group:
                self._engines.pop(variant.name, None)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _describe(self) -> None:
        key = self._engine(PLAIN)._frontend.loaded.engine.parts.cache.layers[0].k
        self.device, self.dtype = key.device, key.dtype
        self.environment = environment.describe(self.device, self.dtype)
        if self.peaks is None and self.dtype.itemsize == 2:
            self.peaks = peaks_of(self.environment["device"])

    def _take_turns(self) -> bool:
        """Whether all engines can be in memory at once; one with a drafter is taken for twice a plain one."""
        used = self._engine(PLAIN).memory
        needed = 2 * len(self._variants) * (used.weights + used.kv)
        return self.device.type == "cpu" and needed <= free_bytes(self.device) / 2

    def jobs(self, cell: Cell, iteration: int) -> list[Job]:
        """`latency`: one batch, walking through the prompts; else all of them."""
        count, settings = len(self.prompts), self._settings
        if settings.kind == "latency":
            first = iteration * cell.batch_size
            return workload.jobs(
                self.prompts, [(first + i) % count for i in range(cell.batch_size)], self._params
            )
        times = None
        if cell.rate is not None:
            times = workload.arrivals(count, cell.rate, settings.burstiness, settings.seed + iteration)
        return workload.jobs(self.prompts, range(count), self._params, times)

    def _engine(self, variant: Variant) -> LLM:
        if variant.name not in self._engines:
            llm = self._engines[variant.name] = self._make(variant)
            self.memory[variant.name] = str(llm.memory)
        return self._engines[variant.name]

    def _record(self) -> None:
        self._tell("recording plain outputs")
        jobs = workload.jobs(self.prompts, range(len(self.prompts)), self._params)
        outputs = Client(self._engine(PLAIN), max(self._settings.batch_sizes)).run(jobs).outputs
        self.reference.update(enumerate(outputs))
        save(self._recordings, outputs)

    def _measure(self, group: Sequence[Variant], cell: Cell) -> None:
        """The variants of one group in one cell, taking turns."""
        engines = {v.name: self._engine(v) for v in group}
        for variant in group:
            self._tell(f"{variant.name}, {cell}: warming up")
            first = workload.jobs(
                self.prompts, [j.index for j in self.jobs(cell, 0)][: cell.batch_size], self._params
            )
            for _ in range(self._settings.num_warmups):
                Client(engines[variant.name], cell.batch_size).run(first)
        for iteration in range(self._settings.num_iters):
            for variant in group:
                self._tell(f"{variant.name}, {cell}: iteration {iteration + 1} of {self._settings.num_iters}")
                jobs = self.jobs(cell, iteration)
                run = Client(engines[variant.name], cell.batch_size).run(jobs)
                self._take(variant, cell, run)
        for variant in group:
            self._look_inside(variant, cell, engines[variant.name])

    def _take(self, variant: Variant, cell: Cell, run: Run) -> None:
        """Keep a run and compare its outputs; plain decoding comes first, so there is something to compare with."""
        found = self.measured.setdefault((variant.name, cell), Measured())
        found.num_drafts = self._engine(variant).num_speculative_tokens
        found.runs.append(run)
        for timing, output in zip(run.timings, run.outputs, strict=True):
            if variant is PLAIN and timing.index not in self.reference:
                self.reference[timing.index] = output
                continue
            different = compare([self.reference[timing.index]], [output])
            found.differences += [replace(d, request=timing.index) for d in different]
            found.num_compared += 1

    def _look_inside(self, variant: Variant, cell: Cell, llm: LLM) -> None:
        found = self.measured[variant.name, cell]
        if self.peaks is not None:
            found.roofline_share = passes.roofline_share(llm, found.runs, self.peaks, found.num_drafts)
        found.runs_ahead = bool(llm._frontend.loaded.engine.parts.num_ahead)
        if found.runs_ahead:
            found.device_split = passes.device_split(llm, self.jobs(cell, 0)[: cell.batch_size])

    @property
    def differences(self) -> list[Difference]:
        return [d for found in self.measured.values() for d in found.differences]

    def records(self) -> list[Record]:
        """One for each cell and variant, plain first, as they go to results.json."""
        found = []
        for cell in self._settings.cells:
            plain: Record | None = None
            for variant in (PLAIN, *self._variants):
                measured = self.measured.get((variant.name, cell))
                if measured is not None:
                    record = self._as_record(variant, cell, measured)
                    plain = plain or record
                    found.append(record | self._against_plain(record, plain))
        return found

    def _as_record(self, variant: Variant, cell: Cell, measured: Measured) -> Record:
        decoding = figures.decoding(measured.runs)
        time_split = None
        if measured.device_split is not None and decoding is not None:
            step, verify = measured.device_split["step"], measured.device_split["verify"]
            verify = min(verify, step) if variant.config else step
            total = max(decoding["mean_step_ms"] / 1e3, step)
            time_split = figures.split(
                total, verify, step - verify, "device time of graphs in a decoding step"
            )
        elif not measured.runs_ahead:
            time_split = figures.host_clock_split(measured.runs, drafts=variant.config is not None)
        return {
            "name": variant.name,
            "batch_size": cell.batch_size,
            "request_rate": cell.rate,
            "num_speculative_tokens": measured.num_drafts,
            "replayed_acceptance": variant.acceptance,
            "num_iters": len(measured.runs),
            **figures.summarise(measured.runs, self._settings.goodput),
            "decoding": decoding,
            "time_split": time_split,
            "roofline_share": measured.roofline_share,
            "identical": not measured.differences,
            "num_compared": measured.num_compared,
            "num_different": len(measured.differences),
        }

    def _against_plain(self, record: Record, plain: Record) -> Record:
        """`speedup`: of the throughput; where requests come at a rate, of the time per output token."""
        if self._settings.kind != "serve-like":
            return {"speedup": record["output_throughput"] / (plain["output_throughput"] or 1.0)}
        own = record["mean_tpot_ms"]
        return {"speedup": plain["mean_tpot_ms"] / own if own else None}
