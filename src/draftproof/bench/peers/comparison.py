"""Compares engines: their requests, the order of turns, and the rows of the report.

In a round every engine gets the same prompts, and no prompt is used twice, because some engines cache prefixes. Seconds
are those of a whole batch, prompts included.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from draftproof.bench.environment import num_cores
from draftproof.bench.harness import Record, take_turns
from draftproof.bench.peers import MEMORY, OURS, load
from draftproof.bench.peers.engine import Ids
from draftproof.bench.peers.memory import NUM_BYTES
from draftproof.bench.peers.processes import EngineFailedError, EngineProcess, busy
from draftproof.bench.workload import FIRST_ID

PROMPT_NEW = 2  # output tokens where the prompt's time is measured
PROMPTS_A_CALL = 4  # in sequence, because the clock of processor time ticks only every 10 ms
READS_A_CALL = 5
STRIDE = 37  # ids between the starts of two prompts
PAUSE_SECONDS = 0.05  # between turns, so that the last engine's threads go to sleep
CELL_SECONDS = 60.0  # after which an engine gets no more rounds of the same cell
MUCH_LOAD = 0.1  # share of the machine taken by foreign load that is noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every engine is measured on. `source`: ids that prompts of `length` are cut from; `weight_bytes`: read by a
    step in each dtype, if an engine does not report it; `busy`: numbers of busy processes, each for extra rounds."""

    dtypes: Sequence[str]
    batch_sizes: Sequence[int]
    num_new: int
    length: int
    num_rounds: int
    num_threads: int
    source: Sequence[int]
    vocab_size: int
    weight_bytes: Mapping[str, float] = field(default_factory=dict)
    busy: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `batches` batches of prompts in sequence. `num_new` 0: reading memory."""

    dtype: str
    batch_size: int
    num_new: int
    batches: int = 1
    num_busy: int = 0


@dataclass(frozen=True, slots=True)
class Entrant:
    """One engine process with one of its ways to generate."""

    process: EngineProcess
    way: str = ""

    @property
    def name(self) -> str:
        return f"{self.process.name}, {self.way}" if self.way else self.process.name


@dataclass(frozen=True, slots=True)
class Call:
    """One turn. `seconds`: of each batch; `foreign`: share of the machine that other processes took meanwhile."""

    seconds: list[float]
    outputs: Ids
    foreign: float | None


Start = Callable[[str, str], EngineProcess]  # an engine's name, dtype -> its process


class Comparison:
    """The comparison. `start` starts an engine; `names`: ours first, then the peers. Measurements made before an
    exception stay.

    `together`: all engines are in memory at once and take turns; else they run one after the other.
    """

    def __init__(
        self,
        work: Work,
        names: Sequence[str],
        start: Start,
        *,
        together: bool = True,
        tell: Callable[[str], None] = lambda line: None,
        pause_s: float = PAUSE_SECONDS,
    ) -> None:
        self._work, self._names, self._start, self._tell = work, names, start, tell
        self._together, self._pause_s = together, pause_s
        self._prompts: dict[tuple[Cell, int], list[Ids]] = {}
        self._num_prompts = 0
        self._gave_up: set[tuple[Cell, str]] = set()
        self.calls: dict[tuple[Cell, str], list[Call]] = {}
        self._read: dict[
            tuple[str, str], float | None
        ] = {}  # bytes of weights that a step reads, by dtype and entrant
        self.engines: dict[str, Record] = {}  # version, and settings by dtype
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure all engines in all dtypes."""
        groups = [self._names] if self._together else [[name] for name in self._names]
        for dtype in self._work.dtypes:
            for group in groups:
                with contextlib.ExitStack() as stack:
                    self._measure(dtype, self._started(dtype, group, stack))

    def _started(self, dtype: str, names: Sequence[str], stack: contextlib.ExitStack) -> list[Entrant]:
        entrants: list[Entrant] = []
        for name in names:
            self._tell(f"{name}, {dtype}: loading")
            try:
                process = self._start(name, dtype)
            except EngineFailedError as error:
                self.notes.append(f"{name}, {dtype}: {error}")
                continue
            stack.callback(process.close)
            known = self.engines.setdefault(name, {"version": process.version, "settings": {}})
            known["settings"][dtype] = process.settings
            own = [Entrant(process, way) for way in ("", *process.ways)]
            read = process.weight_bytes or self._work.weight_bytes.get(dtype)
            self._read.update(dict.fromkeys([(dtype, entrant.name) for entrant in own], read))
            entrants += own
        return entrants

    def _measure(self, dtype: str, entrants: Sequence[Entrant]) -> None:
        """Run the rounds of one dtype: on a quiet machine, then with each number of busy processes."""
        sizes, num_new = self._work.batch_sizes, self._work.num_new
        first, *others = [Cell(dtype, batch, num_new) for batch in sizes]
        reading = Cell(
            dtype, 0, 0, READS_A_CALL
        )  # next to the first batch size, which is compared with this rate
        prompts = [Cell(dtype, batch, PROMPT_NEW, 1 if batch > 1 else PROMPTS_A_CALL) for batch in sizes]
        self._rounds([first, reading, *others, *prompts], entrants)
        for count in self._work.busy:
            with busy(count) as pids:
                cells = [Cell(dtype, batch, num_new, 1, count) for batch in sizes]
                self._rounds(cells, entrants, pids)

    def _rounds(self, cells: Sequence[Cell], entrants: Sequence[Entrant], pids: Sequence[int] = ()) -> None:
        pairs = [(cell, entrant) for cell in cells for entrant in entrants if self._fits(cell, entrant)]
        take_turns(
            [partial(self._turn, cell, entrant, pids) for cell, entrant in pairs], self._work.num_rounds + 1
        )

    def _fits(self, cell: Cell, entrant: Entrant) -> bool:
        """Whether the entrant runs this cell: the default way all, others only quiet decoding at one batch size."""
        if (entrant.process.name == MEMORY) != (cell.num_new == 0):
            return False
        if not entrant.way:
            return True
        size = 1 if entrant.process.ways[entrant.way] == "single" else max(self._work.batch_sizes)
        return cell == Cell(cell.dtype, size, self._work.num_new)

    def _turn(self, cell: Cell, entrant: Entrant, pids: Sequence[int], number: int) -> None:
        """Run and record one call; the first round is a warm-up and not recorded."""
        kept = self.calls.setdefault((cell, entrant.name), [])
        spent = sum(sum(call.seconds) for call in kept)
        gave_up = (cell, entrant.name) in self._gave_up or not entrant.process.is_alive
        if gave_up or spent > CELL_SECONDS:
            return
        self._tell(
            f"{entrant.name}, {cell.dtype}, batch {cell.batch_size}, {cell.num_new} tokens: round {number}"
        )
        try:
            call = self._call(cell, entrant, pids, number)
        except EngineFailedError as error:
            self._gave_up.add((cell, entrant.name))
            self.notes.append(f"{entrant.name}, {cell.dtype}, batch {cell.batch_size}: {error}")
            return
        if number:
            kept.append(call)

    def _call(self, cell: Cell, entrant: Entrant, pids: Sequence[int], number: int) -> Call:
        batches = self._asked(cell, number)
        time.sleep(self._pause_s)
        before = load.sample(pids)
        answer = entrant.process.generate(batches, cell.num_new, entrant.way)
        after = load.sample(pids)
        foreign = load.foreign_share(before, after, answer.cpu_seconds)
        outputs = [ids for batch in answer.outputs for ids in batch]
        num_given, num_asked = sum(map(len, outputs)), cell.num_new * cell.batch_size * cell.batches
        if num_given != num_asked:
            raise EngineFailedError(f"gave {num_given} tokens, was asked for {num_asked}")
        return Call(answer.seconds, outputs, foreign)

    def _asked(self, cell: Cell, number: int) -> list[Ids]:
        """The batches of a round: the same for every engine, and never used before."""
        if (cell, number) not in self._prompts:
            self._prompts[cell, number] = [
                [self._fresh_prompt() for _ in range(cell.batch_size)] for _ in range(cell.batches)
            ]
        return self._prompts[cell, number]

    def _fresh_prompt(self) -> list[int]:
        """A piece of the source with two unique first ids."""
        number, source, work = self._num_prompts, self._work.source, self._work
        self._num_prompts += 1
        prompt = [source[(STRIDE * number + i) % len(source)] for i in range(work.length)]
        usable = max(1, work.vocab_size - FIRST_ID)
        marks = [work.vocab_size - 1 - number % usable, work.vocab_size - 1 - number // usable % usable]
        return [*marks, *prompt[2:]][: work.length]

    # results

    def read_rate(self, dtype: str) -> float | None:
        """Measured memory read rate in bytes per second: the median over rounds of each round's best."""
        calls = self.calls.get((Cell(dtype, 0, 0, READS_A_CALL), MEMORY), [])
        return statistics.median(NUM_BYTES / min(call.seconds) for call in calls) if calls else None

    def read_rates(self) -> dict[str, float]:
        """Read rates by dtype, if known."""
        return {dtype: rate for dtype in self._work.dtypes if (rate := self.read_rate(dtype)) is not None}

    def rows(self) -> list[Record]:
        """One row per dtype, batch size and entrant on a quiet machine."""
        cells = [
            Cell(d, batch, self._work.num_new) for d in self._work.dtypes for batch in self._work.batch_sizes
        ]
        return [
            self._row(cell, name)
            for cell in cells
            for (at, name), calls in self.calls.items()
            if at == cell and calls
        ]

    def _row(self, cell: Cell, name: str) -> Record:
        calls, ours = self.calls[cell, name], self.calls.get((cell, OURS), [])
        seconds, foreign = median(calls), [call.foreign for call in calls if call.foreign is not None]
        row = {
            "name": name,
            "dtype": cell.dtype,
            "batch_size": cell.batch_size,
            "output_throughput": cell.batch_size * cell.num_new / seconds,
            "duration": seconds,
            "plain_over_it": seconds / median(ours) if ours else None,
            "prompt_ms": self._prompt_ms(cell, name),
            "weight_bytes": self._read[cell.dtype, name],
            "read_rate_share": self._read_share(cell, name),
            "foreign_load": statistics.median(foreign) if foreign else None,
            "most_foreign_load": max(foreign, default=None),
            "calls": [{"seconds": call.seconds, "foreign_load": call.foreign} for call in calls],
        }
        pairs = (
            []
            if name == OURS
            else [
                p for a, b in zip(calls, ours, strict=False) for p in zip(a.outputs, b.outputs, strict=True)
            ]
        )
        return row | {"num_compared": len(pairs), "num_identical": sum(a == b for a, b in pairs)}

    def _prompt_calls(self, cell: Cell, name: str) -> list[Call]:
        return next(
            (
                calls
                for (at, who), calls in self.calls.items()
                if (at.dtype, at.batch_size, at.num_new, who)
                == (cell.dtype, cell.batch_size, PROMPT_NEW, name)
            ),
            [],
        )

    def _prompt_ms(self, cell: Cell, name: str) -> float | None:
        calls = self._prompt_calls(cell, name)
        return 1e3 * median(calls) if calls else None

    def _read_share(self, cell: Cell, name: str) -> float | None:
        """Share of the read rate at which one request's steps read the weights, without the prompt's time."""
        rate, weights, prompt = (
            self.read_rate(cell.dtype),
            self._read[cell.dtype, name],
            self._prompt_ms(cell, name),
        )
        if (
            rate is None
            or weights is None
            or prompt is None
            or cell.batch_size > 1
            or cell.num_new <= PROMPT_NEW
        ):
            return None
        step = (median(self.calls[cell, name]) - prompt / 1e3) / (cell.num_new - PROMPT_NEW)
        return weights / step / rate if step > 0 else None

    def busy_rows(self) -> list[Record]:
        """One row per number of busy processes, dtype, batch size and engine."""
        found = []
        for (cell, name), calls in self.calls.items():
            quiet = self.calls.get((Cell(cell.dtype, cell.batch_size, cell.num_new), name))
            if not cell.num_busy or not calls or not quiet:
                continue
            share = median(quiet) / median(calls)
            fair = min(1.0, num_cores() / (self._work.num_threads + cell.num_busy))
            found.append(
                {
                    "name": name,
                    "dtype": cell.dtype,
                    "batch_size": cell.batch_size,
                    "num_busy": cell.num_busy,
                    "output_throughput": cell.batch_size * cell.num_new / median(calls),
                    "of_quiet": share,
                    "of_fair_share": share / fair,
                    "num_rounds": len(calls),
                }
            )
        return found

    def all_notes(self) -> list[str]:
        """What could not be measured, and whether foreign load disturbed the measurements."""
        shares = [
            c.foreign
            for (cell, _), calls in self.calls.items()
            if not cell.num_busy
            for c in calls
            if c.foreign is not None
        ]
        much = sum(share > MUCH_LOAD for share in shares)
        if not shares:
            return [*self.notes, "foreign load is not known on this system"]
        return self.notes + (
            [f"foreign load above {MUCH_LOAD:.0%} in {much} of {len(shares)} calls"] if much else []
        )


def median(calls: Sequence[Call]) -> float:
    """Median seconds of a batch."""
    return statistics.median(second for call in calls for second in call.seconds)
