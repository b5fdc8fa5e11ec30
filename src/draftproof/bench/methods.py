"""Compares draft methods: each drafter takes turns with plain decoding on the same questions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftproof.bench import figures, workload
from draftproof.bench.drive import ClientResult, Job
from draftproof.bench.harness import PLAIN, Benchmark, Measured, Record, Variant
from draftproof.checkpoints import detect
from draftproof.frontend.llm import LLM
from draftproof.types import SamplingParams

WARM_UP = 8  # tokens that each engine decodes before the clock runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt. `reference`: the number that answers it, if any."""

    id: str
    token_ids: list[int]
    reference: str | None = None


class Comparison(Benchmark):
    """The methods, each in a cell with plain decoding: they take turns batch by batch, and the fastest of a batch's
    repeats counts. A drafter that learns from outputs starts anew in each repeat.
    """

    def __init__(
        self,
        make: Callable[[Variant], LLM],
        methods: Sequence[Variant],
        questions: Sequence[Question],
        params: SamplingParams,
        *,
        batch_size: int = 1,
        repeats: int = 1,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(make, tell)
        names = [m.name for m in (PLAIN, *methods)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"methods: two are named {name!r}; give each a name of its own")
        if not methods:
            raise ValueError("methods: there are none to compare; name a drafter, such as ngram")
        if not questions:
            raise ValueError("questions: there are none")
        self._methods, self._questions, self._params = methods, questions, params
        self._batch_size, self._repeats = batch_size, repeats
        prompts, count = [q.token_ids for q in questions], len(questions)
        indices = [range(i, min(i + batch_size, count)) for i in range(0, count, batch_size)]
        self._batches = [workload.jobs(prompts, batch, params) for batch in indices]
        # reversed text: a drafter that learns from earlier outputs must not have seen the questions
        self._warm_up = [Job(0, prompts[0][::-1], dataclasses.replace(params, max_tokens=WARM_UP))]

    def run(self) -> None:
        """Measure all methods."""
        self.tell("plain: loading")
        self.describe()
        assert not self.engine(PLAIN).num_speculative_tokens, "the plain engine drafts"
        for method in self._methods:
            for repeat in range(self._repeats):
                self.tell(f"{method.name}: run {repeat + 1} of {self._repeats}")
                try:
                    self.engine(method)
                except ValueError as error:
                    if not method.found:
                        raise ValueError(f"{method.name}: {error}") from error
                    self.notes.append(f"{method.name} is left out: {error}")
                    break
                for variant in (PLAIN, method):
                    self.run_once(variant, self._warm_up, 1)
                self.measure(method, (PLAIN, method), self._batches, self._batch_size)
                self.release([method])

    def take(self, cell: object, variant: Variant, number: int, run: ClientResult) -> None:
        """See `Benchmark.take`. ValueError for a question that failed, as there is nothing to compare."""
        for timing, output in zip(run.timings, run.outputs, strict=True):
            if output.error is not None:
                raise ValueError(f"question {self._questions[timing.index].id}: {output.error}")
        super().take(cell, variant, number, run)

    def records(self) -> list[Record]:
        """A row per method for methods.json, plain first; methods that did not finish all batches are left out."""
        pairs = [
            (self.measured[method, PLAIN], its)
            for method in self._methods
            if (its := self.measured.get((method, method))) and len(its.rounds) == len(self._batches)
        ]
        if not pairs:
            return []
        together = Measured(PLAIN, 0)
        for plain, _ in pairs:
            together.add(plain)
        return [self._record(its, plain) for plain, its in [(together, together), *pairs]]

    def _record(self, measured: Measured, plain: Measured) -> Record:
        """The row of a method; `plain`: plain decoding in the same cell."""
        stats, outputs = measured.tally.speculation, measured.outputs
        scores = [
            is_right(outputs[i].outputs[0].text, question.reference)
            for i, question in enumerate(self._questions)
            if question.reference is not None
        ]
        return figures.record(measured, measured.fastest, {}) | {
            "config": measured.variant.config,
            "tau": stats.acceptance_length,
            "accepted_per_position": [n / max(1, stats.num_rounds) for n in stats.accepted_per_position],
            **figures.step_parts(measured.fastest),
            "tokens_per_second": measured.speed,
            "speedup": measured.speed / plain.speed,
            "num_right": sum(scores),
            "num_asked": len(scores),
            "num_same": measured.tally.requests - len(measured.differences),
            "num_outputs": measured.tally.requests,
            "num_drafted": stats.num_draft_tokens,
            "num_faults": sum(run.clock.faults for run in measured.runs),
        }


def is_right(answer: str, reference: str) -> bool:
    """Whether the number after the last `####`, else the answer's last number, equals the reference."""
    marked = answer.rpartition("####")[2]
    found = [_number(text) for text in re.findall(r"-?\d[\d,]*\.?\d*", marked)]
    return bool(found) and found[0 if "####" in answer else -1] == _number(reference)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def find(folder: Path, target: Path) -> tuple[list[Variant], list[str]]:
    """(draft checkpoints in the subfolders of `folder` that may match the target in the folder `target`, a line for
    each that does not: a head that names another target, a language model that is not smaller).

    ValueError if `folder` contains no checkpoint.
    """
    methods, notes = [], []
    configs = sorted(folder.glob("*/config.json"))
    if not configs:
        raise ValueError(
            f"{folder}: holds no draft checkpoints; give a folder of folders with a config.json each"
        )
    for path in configs:
        name, directory = path.parent.name, path.parent
        if directory.resolve() == target.resolve():
            continue
        try:
            reason = _misfit(directory, target)
        except ValueError as error:
            reason = str(error)
        if reason is None:
            methods.append(Variant(name, {"model": str(directory)}, found=True))
        else:
            notes.append(f"{name} is left out: {reason}")
    return methods, notes


def _misfit(directory: Path, target: Path) -> str | None:
    """Why a checkpoint does not match, as far as known without loading the target; else None."""
    if not detect.is_draft_head(directory):
        own, most = _num_bytes(directory), _num_bytes(target)
        return f"a language model of {own} bytes, the target has {most}" if own >= most else None
    made_for = detect.target_of(detect.read(directory))
    if made_for is None or not Path(made_for).is_dir() or Path(made_for).name == target.name:
        return None
    return f"made for {Path(made_for).name}" if Path(made_for).resolve() != target.resolve() else None


def _num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
