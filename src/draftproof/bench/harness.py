"""The harness of all benchmarks: variants take turns on the same jobs, and every output is compared with the plain one.

A machine's speed drifts; taking turns exposes all variants to the same drift. All times are seconds of wall clock.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from draftproof.bench import environment
from draftproof.bench.compare import Difference, Tally, compare
from draftproof.bench.drive import Client, ClientResult, Job
from draftproof.bench.internals import Stepper, keys_of
from draftproof.frontend.llm import LLM
from draftproof.types import RequestOutput

Record = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of decoding.

    `config`: its speculative_config; None: plain decoding. `settings`: its own keywords of `LLM`. `acceptance`: of
    replayed drafts. `found`: not named by the user but discovered, so it is skipped, with a note, if it does not match
    the target.
    """

    name: str
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    acceptance: float | None = None
    found: bool = False


PLAIN = Variant("plain")


@dataclass(slots=True)
class Measured:
    """Measurements of one variant in one cell. `rounds`: its runs of the same jobs, by round number.

    `device_split` and `roofline_share` are measured at the end, where they apply.
    """

    variant: Variant
    num_drafts: int
    rounds: dict[int, list[ClientResult]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    num_compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    runs_ahead: bool = False  # the device works ahead of the host's clock
    device_split: Record | None = None
    roofline_share: float | None = None

    @property
    def runs(self) -> list[ClientResult]:
        return [run for runs in self.rounds.values() for run in runs]

    @property
    def fastest(self) -> list[ClientResult]:
        """The fastest run of each round: disturbances only add time."""
        return [min(runs, key=lambda run: run.seconds) for runs in self.rounds.values()]

    @property
    def speed(self) -> float:
        """Output tokens per second, over the fastest runs."""
        return sum(run.num_tokens for run in self.fastest) / sum(run.seconds for run in self.fastest)

    @property
    def outputs(self) -> dict[int, RequestOutput]:
        """Outputs by prompt, from the last run."""
        return {
            timing.index: output
            for run in self.runs
            for timing, output in zip(run.timings, run.outputs, strict=True)
        }

    def add(self, other: Measured) -> None:
        """Add the variant's runs in another cell as rounds of this one."""
        first = len(self.rounds)
        self.rounds |= {first + i: runs for i, runs in enumerate(other.rounds.values())}
        for run in other.runs:
            self.tally.add(run.outputs)
        self.num_compared += other.num_compared
        self.differences += other.differences


def free_memory() -> None:
    """Free the memory of engines that are no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def take_turns(runs: Sequence[Callable[[int], T]], num_rounds: int) -> list[tuple[T, ...]]:
    """Call all of `runs` in every round, with the round's number; returns the results of each run."""
    found = [[run(number) for run in runs] for number in range(num_rounds)]
    return list(zip(*found, strict=True))


def medians(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """The median result of each of `runs`, which take turns; the first round is a warm-up."""

    def measure(run: Callable[[], float], number: int) -> float:
        return run()

    columns = take_turns([partial(measure, run) for run in runs], repeats + 1)
    return [statistics.median(column[1:]) for column in columns]


class Benchmark:
    """Engines and their measurements. `make` builds a variant's engine; `tell` is called with progress lines.

    `reference`: plain outputs by prompt, which others are compared with. Measurements made before an exception stay.
    """

    def __init__(
        self, make: Callable[[Variant], LLM], tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._make, self.tell = make, tell
        self._engines: dict[Variant, LLM] = {}
        self.measured: dict[tuple[Hashable, Variant], Measured] = {}  # by cell and variant
        self.reference: dict[int, RequestOutput] = {}
        self.notes: list[str] = []
        self.environment: Record = {}
        self.memory: dict[str, str] = {}  # summary line of each variant's engine
        self.device, self.dtype = (
            torch.device("cpu"),
            torch.float32,
        )  # the engines' own, set when the first is built

    def engine(self, variant: Variant) -> LLM:
        """The variant's engine, built on first use."""
        if variant not in self._engines:
            llm = self._engines[variant] = self._make(variant)
            self.memory[variant.name] = str(llm.memory)
        return self._engines[variant]

    def describe(self) -> None:
        """Fill `environment`, `device` and `dtype`. Builds the plain engine."""
        keys = keys_of(self.engine(PLAIN))
        self.device, self.dtype = keys.device, keys.dtype
        self.environment = environment.describe(self.device, self.dtype)

    def release(self, variants: Sequence[Variant]) -> None:
        """Free the memory of these variants' engines."""
        for variant in variants:
            self._engines.pop(variant, None)
        free_memory()

    def run_once(self, variant: Variant, jobs: Sequence[Job], most_at_once: int) -> ClientResult:
        """Run the jobs without recording anything."""
        return Client(Stepper(self.engine(variant)), most_at_once).run(jobs)

    def measure(
        self,
        cell: Hashable,
        variants: Sequence[Variant],
        rounds: Sequence[Sequence[Job]],
        most_at_once: int,
        told_as: str = "",
    ) -> None:
        """Run every round's jobs with every variant; for new prompts plain decoding must come first.

        `told_as`: name of a round in progress lines; "": no such lines.
        """

        def run(variant: Variant, number: int) -> None:
            if told_as:
                self.tell(f"{variant.name}, {cell}: {told_as} {number + 1} of {len(rounds)}")
            self.take(cell, variant, number, self.run_once(variant, rounds[number], most_at_once))

        take_turns([partial(run, variant) for variant in variants], len(rounds))

    def take(self, cell: Hashable, variant: Variant, number: int, run: ClientResult) -> None:
        """Record a run of round `number`, and compare its outputs; outputs of new prompts become the reference."""
        num_drafts = self.engine(variant).num_speculative_tokens
        found = self.measured.setdefault((cell, variant), Measured(variant, num_drafts))
        found.rounds.setdefault(number, []).append(run)
        found.tally.add(run.outputs)
        for timing, output in zip(run.timings, run.outputs, strict=True):
            if variant == PLAIN and timing.index not in self.reference:
                self.reference[timing.index] = output
                continue
            different = compare([self.reference[timing.index]], [output])
            found.differences += [dataclasses.replace(d, request=timing.index) for d in different]
            found.num_compared += 1

    @property
    def differences(self) -> list[Difference]:
        return [d for found in self.measured.values() for d in found.differences]
