"""The one way a benchmark runs: variants take turns on the same jobs, and every output is compared with the plain one.

A machine's speed drifts; what takes turns has the same weather. All times are seconds of wall clock.
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

    `config`: its speculative_config; None decodes plainly. `settings`: of `LLM`, where they differ from the others'.
    `acceptance`: of replayed drafts. `found`: nobody named it, so it is left out, with a note, where it does not fit
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
    """What a benchmark knows of one variant in one cell. `rounds`: its runs of the same jobs, by number of the round.

    `device_split` and `roofline_share` are looked for at the end, where they are of use.
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
        """The best run of each round: what disturbs a clock only adds to it."""
        return [min(runs, key=lambda run: run.seconds) for runs in self.rounds.values()]

    @property
    def speed(self) -> float:
        """Output tokens a second, of the fastest runs."""
        return sum(run.num_tokens for run in self.fastest) / sum(run.seconds for run in self.fastest)

    @property
    def outputs(self) -> dict[int, RequestOutput]:
        """By prompt; the last run's."""
        return {
            timing.index: output
            for run in self.runs
            for timing, output in zip(run.timings, run.outputs, strict=True)
        }

    def add(self, other: Measured) -> None:
        """Count what the variant did in another cell as rounds of this one."""
        first = len(self.rounds)
        self.rounds |= {first + i: runs for i, runs in enumerate(other.rounds.values())}
        for run in other.runs:
            self.tally.add(run.outputs)
        self.num_compared += other.num_compared
        self.differences += other.differences


def free_memory() -> None:
    """Give back the memory of engines that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def take_turns(runs: Sequence[Callable[[int], T]], num_rounds: int) -> list[tuple[T, ...]]:
    """What each of `runs` gave, called with the number of the round: all of them in every round."""
    found = [[run(number) for run in runs] for number in range(num_rounds)]
    return list(zip(*found, strict=True))


def medians(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """The median of what each gave, all taking turns; the first round warms up."""

    def measure(run: Callable[[], float], number: int) -> float:
        return run()

    columns = take_turns([partial(measure, run) for run in runs], repeats + 1)
    return [statistics.median(column[1:]) for column in columns]


class Benchmark:
    """Engines, and what they gave. `make` builds a variant's engine; `tell` gets a line when something begins.

    `reference`: plain outputs by prompt, which others are compared with. What was measured before an exception stays.
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
        self.memory: dict[str, str] = {}  # the line of each variant's engine
        self.device, self.dtype = torch.device("cpu"), torch.float32  # of the engines, once there is one

    def engine(self, variant: Variant) -> LLM:
        """The variant's engine, made when it is first asked for."""
        if variant not in self._engines:
            llm = self._engines[variant] = self._make(variant)
            self.memory[variant.name] = str(llm.memory)
        return self._engines[variant]

    def describe(self) -> None:
        """Say what figures are measured on. Makes the plain engine."""
        keys = keys_of(self.engine(PLAIN))
        self.device, self.dtype = keys.device, keys.dtype
        self.environment = environment.describe(self.device, self.dtype)

    def release(self, variants: Sequence[Variant]) -> None:
        """Give back the memory of their engines."""
        for variant in variants:
            self._engines.pop(variant, None)
        free_memory()

    def run_once(self, variant: Variant, jobs: Sequence[Job], most_at_once: int) -> ClientResult:
        """A run that nothing is kept of."""
        return Client(Stepper(self.engine(variant)), most_at_once).run(jobs)

    def measure(
        self,
        cell: Hashable,
        variants: Sequence[Variant],
        rounds: Sequence[Sequence[Job]],
        most_at_once: int,
        told_as: str = "",
    ) -> None:
        """Every round's jobs by every variant; plain decoding comes first where prompts are new.

        `told_as`: what a round is called when it is told that one begins; "": nothing is told.
        """

        def run(variant: Variant, number: int) -> None:
            if told_as:
                self.tell(f"{variant.name}, {cell}: {told_as} {number + 1} of {len(rounds)}")
            self.take(cell, variant, number, self.run_once(variant, rounds[number], most_at_once))

        take_turns([partial(run, variant) for variant in variants], len(rounds))

    def take(self, cell: Hashable, variant: Variant, number: int, run: ClientResult) -> None:
        """Keep a run of round `number`, and compare its outputs; those of a prompt that is new are the reference."""
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
