"""A sweep over batch sizes and request rates: plain decoding and each drafting variant, all outputs compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftproof.bench import figures, internals, passes, workload
from draftproof.bench.drive import Job
from draftproof.bench.harness import PLAIN, Benchmark, Record, Variant
from draftproof.bench.rooflines import Peaks, peaks_of
from draftproof.drafters.recordings import save
from draftproof.frontend.llm import LLM
from draftproof.runtime.room import free_bytes
from draftproof.types import SamplingParams

Kind = Literal["latency", "throughput", "serve-like"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of the sweep. `rate`: arriving requests per second; None: no arrival times."""

    batch_size: int
    rate: float | None = None

    def __str__(self) -> str:
        return f"batch {self.batch_size}" + ("" if self.rate is None else f", {self.rate:g} requests/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a sweep. `peaks` None: the device's, if known."""

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


class Suite(Benchmark):
    """The sweep. On a CPU, whose speed drifts, the variants take turns if all engines fit into memory at once; on a GPU
    engines run one after the other, each with the whole memory.
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
        super().__init__(make, tell)
        self._settings, self.prompts, self._params = settings, prompts, params
        self.kind = settings.kind
        self._variants, self._recordings = variants, recordings
        self.peaks = settings.peaks

    def run(self) -> None:
        """Measure all cells and variants."""
        self.describe()
        if self.peaks is None and self.dtype.itemsize == 2:
            self.peaks = peaks_of(self.environment["device"])
        if any(v.acceptance is not None for v in self._variants):
            self._record()
        everybody = [PLAIN, *self._variants]
        groups = [everybody] if self._fit_together() else [[v] for v in everybody]
        for group in groups:
            for cell in self._settings.cells:
                self._measure(group, cell)
            self.release(group)

    def _fit_together(self) -> bool:
        """Whether all engines fit into memory at once; one with a drafter counts as two plain ones."""
        used = self.engine(PLAIN).memory
        needed = 2 * len(self._variants) * (used.weights + used.kv)
        return self.device.type == "cpu" and needed <= free_bytes(self.device) / 2

    def jobs(self, cell: Cell, iteration: int) -> list[Job]:
        """The jobs of an iteration. `latency`: the next batch of prompts; else all prompts."""
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

    def _record(self) -> None:
        self.tell("recording plain outputs")
        jobs = workload.jobs(self.prompts, range(len(self.prompts)), self._params)
        outputs = self.run_once(PLAIN, jobs, max(self._settings.batch_sizes)).outputs
        self.reference.update(enumerate(outputs))
        save(self._recordings, outputs)

    def _measure(self, group: Sequence[Variant], cell: Cell) -> None:
        """Measure the variants of one group in one cell, taking turns."""
        batch, num_iters = cell.batch_size, self._settings.num_iters
        indices = [job.index for job in self.jobs(cell, 0)[:batch]]
        for variant in group:
            self.tell(f"{variant.name}, {cell}: warming up")
            for _ in range(self._settings.num_warmups):
                self.run_once(variant, workload.jobs(self.prompts, indices, self._params), batch)
        rounds = [self.jobs(cell, iteration) for iteration in range(num_iters)]
        self.measure(cell, group, rounds, batch, "iteration")
        for variant in group:
            self._look_inside(variant, cell)

    def _look_inside(self, variant: Variant, cell: Cell) -> None:
        llm, found = self.engine(variant), self.measured[cell, variant]
        if self.peaks is not None:
            found.roofline_share = passes.roofline_share(llm, found.runs, self.peaks, found.num_drafts)
        found.runs_ahead = internals.runs_ahead(llm)
        if found.runs_ahead:
            found.device_split = passes.device_split(llm, self.jobs(cell, 0)[: cell.batch_size])

    def records(self) -> list[Record]:
        """One record per cell and variant, plain first, for results.json."""
        found = []
        for cell in self._settings.cells:
            records = [
                {**figures.record(m, m.runs, self._settings.goodput), **_cell_of(cell)}
                for v in (PLAIN, *self._variants)
                if (m := self.measured.get((cell, v))) is not None
            ]
            found += [record | self._against_plain(record, records[0]) for record in records]
        return found

    def _against_plain(self, record: Record, plain: Record) -> Record:
        """`speedup` in throughput; if requests arrive at a rate, in time per output token."""
        if self._settings.kind != "serve-like":
            return {"speedup": record["output_throughput"] / (plain["output_throughput"] or 1.0)}
        own = record["mean_tpot_ms"]
        return {"speedup": plain["mean_tpot_ms"] / own if own else None}


def _cell_of(cell: Cell) -> Record:
    return {"batch_size": cell.batch_size, "request_rate": cell.rate}
