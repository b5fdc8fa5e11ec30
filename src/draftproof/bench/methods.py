"""Draft methods side by side: each drafter against plain decoding on the same questions, every output compared.

Times are seconds of wall clock unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftproof.bench import environment
from draftproof.bench.compare import Difference, Tally, compare
from draftproof.checkpoints import detect
from draftproof.engine.frontend import Request
from draftproof.frontend.llm import LLM
from draftproof.metrics import EngineStats
from draftproof.types import RequestOutput, SamplingParams

Record = dict[str, Any]
WARM_UP = 8  # tokens that each engine decodes before the clock runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt. `reference`: the number that answers it, where there is one."""

    id: str
    token_ids: list[int]
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """One way of decoding. `config` is its speculative_config; None decodes plainly. `found`: nobody named it, so it
    is left out, with a note, where it does not fit the target."""

    name: str
    config: Mapping[str, Any] | None
    found: bool = False


PLAIN = Method("plain", None)


@dataclass(frozen=True, slots=True)
class Timed:
    """One batch, or several. `verifying`, `drafting`, `stepping`: seconds of `num_steps` steps after the prompts."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    verifying: float = 0.0
    drafting: float = 0.0
    stepping: float = 0.0

    def __add__(self, other: Timed) -> Timed:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Timed(*(a + b for a, b in pairs))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class Run:
    """What one engine did. `fastest`: of each batch, over the repeats, since what disturbs a clock only adds to it.
    `outputs`: of the last repeat, one a question."""

    num_drafts: int = 0
    num_faults: int = 0
    fastest: dict[int, Timed] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    outputs: list[RequestOutput] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def total(self) -> Timed:
        return sum(self.fastest.values(), Timed())

    def ask(
        self, index: int, llm: LLM, batch: Sequence[Question], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Batch number `index`; its outputs. ValueError for a question that cannot be served."""
        faults = llm.stats.num_drafter_faults
        timed, outputs = ask(llm, batch, params)
        self.num_faults += llm.stats.num_drafter_faults - faults
        self.fastest[index] = min(timed, self.fastest.get(index, timed), key=lambda t: t.seconds)
        self.tally.add(outputs)
        return outputs


def ask(
    llm: LLM, batch: Sequence[Question], params: Sequence[SamplingParams]
) -> tuple[Timed, list[RequestOutput]]:
    """One batch, from its prompts to its last token. ValueError for a question that cannot be served."""
    frontend, stats = llm._frontend, llm.stats  # `generate` does not say where the prompts end
    requests: list[Request] = []
    begun: EngineStats | None = None
    start = time.perf_counter()
    try:
        for question, p in zip(batch, params, strict=True):
            requests.append(frontend.add({"prompt_token_ids": question.token_ids}, p))
        while not all(r.finished for r in requests):
            if begun is None and all(r.sequences[0].num_outputs for r in requests):
                begun = dataclasses.replace(stats)
            frontend.step()
            for request in requests:
                request.pending.clear()
        outputs = [frontend.output(r) for r in requests]
    finally:
        for request in requests:
            frontend.close(request.request_id)
    seconds, before = time.perf_counter() - start, begun or dataclasses.replace(stats)
    for question, output in zip(batch, outputs, strict=True):
        if output.error is not None:
            raise ValueError(f"question {question.id}: {output.error}")
    timed = Timed(
        seconds,
        sum(len(output.outputs[0].token_ids) for output in outputs),
        stats.num_steps - before.num_steps,
        stats.target_seconds - before.target_seconds,
        stats.draft_seconds - before.draft_seconds,
        stats.step_seconds - before.step_seconds,
    )
    return timed, outputs


class Comparison:
    """Runs it. `make` builds a method's engine; `tell` gets a line for people when something begins.

    A plain engine and a drafting one take turns, batch by batch, so that a machine whose speed drifts is as fast for
    both, and of the repeats each batch's fastest counts. A drafter that learns from what it has seen starts anew in
    each repeat.
    """

    def __init__(
        self,
        make: Callable[[Method], LLM],
        methods: Sequence[Method],
        questions: Sequence[Question],
        params: SamplingParams,
        *,
        batch_size: int = 1,
        repeats: int = 1,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        names = [m.name for m in (PLAIN, *methods)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"methods: two are named {name!r}; give each a name of its own")
        if not methods:
            raise ValueError("methods: there are none to compare; name a drafter, such as ngram")
        if not questions:
            raise ValueError("questions: there are none")
        self._make, self._methods, self._questions = make, methods, questions
        self._params, self._batch_size, self._repeats, self._tell = params, batch_size, repeats, tell
        self.runs: dict[str, tuple[Run, Run]] = {}  # name -> its own, and the plain one beside it
        self.notes: list[str] = []
        self.environment: Record = {}

    def run(self) -> None:
        """Everything; what was measured before an exception stays."""
        self._tell("plain: loading")
        plain = self._make(PLAIN)
        assert not plain.num_speculative_tokens, "the plain engine drafts"
        cache = plain._frontend.loaded.engine.parts.cache.layers[0].k
        self.environment = environment.describe(cache.device, cache.dtype)
        for method in self._methods:
            run, beside = Run(), Run()
            for repeat in range(self._repeats):
                self._tell(f"{method.name}: run {repeat + 1} of {self._repeats}")
                try:
                    llm = self._make(method)
                except ValueError as error:
                    if not method.found:
                        raise ValueError(f"{method.name}: {error}") from error
                    self.notes.append(f"{method.name} is left out: {error}")
                    break
                self._take_turns(plain, llm, beside, run)
                self.runs[method.name] = (run, beside)
                del llm
                gc.collect()  # its memory is the next one's

    def _take_turns(self, plain: LLM, llm: LLM, beside: Run, run: Run) -> None:
        run.num_drafts = llm.num_speculative_tokens
        params = [dataclasses.replace(self._params, seed=i) for i in range(len(self._questions))]
        # other text: who learns from others' answers must not have seen these
        other = dataclasses.replace(self._questions[0], token_ids=self._questions[0].token_ids[::-1])
        pairs: list[tuple[LLM, Run, list[RequestOutput]]] = [(plain, beside, []), (llm, run, [])]
        for engine, _, _ in pairs:
            ask(engine, [other], [dataclasses.replace(self._params, max_tokens=WARM_UP)])
        for first in range(0, len(self._questions), self._batch_size):
            batch = slice(first, first + self._batch_size)
            for engine, its, outputs in pairs:
                outputs += its.ask(first, engine, self._questions[batch], params[batch])
        (_, _, beside.outputs), (_, _, run.outputs) = pairs
        run.differences += compare(beside.outputs, run.outputs)

    def records(self) -> list[Record]:
        """A row each, plain first, as they go to methods.json."""
        if not self.runs:
            return []
        besides = [beside for _, beside in self.runs.values()]
        plain, total = Run(outputs=besides[0].outputs), sum((b.total for b in besides), Timed())
        for beside in besides:
            plain.tally.add(beside.outputs)
        rows = [self._record(name, run, run.total, its.total) for name, (run, its) in self.runs.items()]
        return [self._record(PLAIN.name, plain, total, total), *rows]

    def _record(self, name: str, run: Run, timed: Timed, plain: Timed) -> Record:
        config = next((m.config for m in self._methods if m.name == name), None)
        steps, stats = max(1, timed.num_steps), run.tally.speculation
        verify, draft, whole = (1e3 * t / steps for t in (timed.verifying, timed.drafting, timed.stepping))
        has_clock = timed.verifying > 0  # an engine that runs ahead on a GPU has none
        scores = [
            is_right(output.outputs[0].text, question.reference)
            for question, output in zip(self._questions, run.outputs, strict=True)
            if question.reference is not None
        ]
        return {
            "name": name,
            "config": config,
            "num_speculative_tokens": run.num_drafts,
            "tau": stats.acceptance_length,
            "accepted_per_position": [n / max(1, stats.num_rounds) for n in stats.accepted_per_position],
            "verify_ms": verify if has_clock else None,
            "draft_ms": draft if has_clock else None,
            "rest_ms": max(0.0, whole - verify - draft) if has_clock else None,
            "tokens_per_second": timed.tokens_per_second,
            "speedup": timed.tokens_per_second / plain.tokens_per_second,
            "num_right": sum(scores),
            "num_asked": len(scores),
            "identical": not run.differences,
            "num_same": run.tally.requests - len(run.differences),
            "num_outputs": run.tally.requests,
            "num_tokens": run.tally.tokens,
            "num_drafted": stats.num_draft_tokens,
            "num_accepted": stats.num_accepted_tokens,
            "num_faults": run.num_faults,
        }

    @property
    def differences(self) -> list[Difference]:
        return [d for run, _ in self.runs.values() for d in run.differences]


def is_right(answer: str, reference: str) -> bool:
    """Whether the number after the last `####`, else the last number of the answer, is that of the reference."""
    marked = answer.rpartition("####")[2]
    found = [_number(text) for text in re.findall(r"-?\d[\d,]*\.?\d*", marked)]
    return bool(found) and found[0 if "####" in answer else -1] == _number(reference)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def find(folder: Path, target: Path) -> tuple[list[Method], list[str]]:
    """Every draft checkpoint in the subfolders of `folder` that may fit the target in the folder `target`, and a line
    for each that does not: a head that names another target, a language model that is no smaller.

    ValueError where `folder` holds no checkpoint.
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
            methods.append(Method(name, {"model": str(directory)}, found=True))
        else:
            notes.append(f"{name} is left out: {reason}")
    return methods, notes


def _misfit(directory: Path, target: Path) -> str | None:
    """What can be told without loading the target."""
    if not detect.is_draft_head(directory):
        own, most = _num_bytes(directory), _num_bytes(target)
        return f"a language model of {own} bytes, the target has {most}" if own >= most else None
    made_for = detect.target_of(detect.read(directory))
    if made_for is None or not Path(made_for).is_dir() or Path(made_for).name == target.name:
        return None
    return f"made for {Path(made_for).name}" if Path(made_for).resolve() != target.resolve() else None


def _num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
