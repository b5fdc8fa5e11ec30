"""Evaluates a head on held-out prompts: acceptance by position, and speed beside plain decoding and n-gram drafts.

The engines take turns prompt by prompt, so that a slow phase of the machine slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftproof.bench import plots
from draftproof.bench.compare import compare
from draftproof.bench.internals import asking_for
from draftproof.frontend.llm import LLM
from draftproof.metrics import SpeculationStats
from draftproof.train.settings import write_record
from draftproof.types import RequestOutput, SamplingParams

PLAIN, NGRAM, HEAD = "plain", "ngram", "head"
ALL_DRAFTS = "head, all drafts"
REPORT = "report.md"


@dataclass(slots=True)
class Row:
    """One engine over the prompts of one domain at one temperature."""

    domain: str
    temperature: float
    drafter: str
    num_tokens: int = 0
    seconds: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, output: RequestOutput, seconds: float) -> None:
        self.num_tokens += len(output.outputs[0].token_ids)
        self.seconds += seconds
        self.stats.add(output.metrics.speculation)

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def shares(self) -> list[float]:
        """The share of rounds that accepted the first, second, ... draft."""
        return [n / max(1, self.stats.num_rounds) for n in self.stats.accepted_per_position]


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt that the head was not trained on."""

    domain: str
    token_ids: Sequence[int]


def check(
    engine: dict[str, Any],
    head: Path,
    prompts: Sequence[HeldOutPrompt],
    temperatures: Sequence[float],
    max_tokens: int,
) -> list[Row]:
    """Decode the prompts plainly, with n-gram drafts, and with the head: once with an adaptive number of drafts and
    once with the maximum. ValueError if an output differs, or if the head does not fit the target."""
    llms = {PLAIN: LLM(**engine), NGRAM: LLM(**engine, speculative_config={"method": "ngram"})}
    llms[HEAD] = LLM(**engine, speculative_config={"model": str(head)})
    rows: dict[tuple[str, float, str], Row] = {}
    for temperature in temperatures:
        for llm in llms.values():  # compiling and measuring at first use is not timed
            llm.generate([_input(prompts[0])], _params(temperature, 8, 0), use_tqdm=False)
        for number, prompt in enumerate(prompts):
            outputs = []
            for name, llm in llms.items():
                row = rows.setdefault(
                    (prompt.domain, temperature, name), Row(prompt.domain, temperature, name)
                )
                outputs.append(_timed(llm, prompt, _params(temperature, max_tokens, number), row))
            row = rows.setdefault(
                (prompt.domain, temperature, ALL_DRAFTS), Row(prompt.domain, temperature, ALL_DRAFTS)
            )
            with asking_for(llms[HEAD], llms[HEAD].num_speculative_tokens):
                outputs.append(_timed(llms[HEAD], prompt, _params(temperature, max_tokens, number), row))
            for output in outputs[1:]:
                if compare(outputs[:1], [output]):
                    raise ValueError(f"prompt {number}: drafts changed the output; please report this")
    for llm in llms.values():
        llm.close()
    return list(rows.values())


def report(rows: Sequence[Row], folder: Path) -> str:
    """Write the table, its figures as JSON and the plot into `folder`; returns the table."""
    plain = {(row.domain, row.temperature): row.speed for row in rows if row.drafter == PLAIN}
    lines = [
        "| domain | temperature | drafter | tokens/s | against plain | tau | accepted at 1, 2, ... |",
        "|---|---|---|---|---|---|---|",
    ]
    records = []
    for row in rows:
        ratio = row.speed / plain[row.domain, row.temperature]
        shares = " ".join(f"{share:.2f}" for share in row.shares)
        cells = (row.domain, row.temperature, row.drafter, f"{row.speed:.0f}", f"{ratio:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} | {row.stats.acceptance_length:.2f} | {shares} |")
        records.append(
            {
                "domain": row.domain,
                "temperature": row.temperature,
                "drafter": row.drafter,
                "tokens_per_second": row.speed,
                "against_plain": ratio,
                "tau": row.stats.acceptance_length,
                "accepted_per_position": row.shares,
            }
        )
    table = "\n".join(lines)
    (folder / REPORT).write_text(table + "\n", encoding="utf-8")
    write_record(folder / "report.json", {"rows": records})
    if plots.available():
        drawn = [record for record in records if record["drafter"] == ALL_DRAFTS]
        plots.draw_acceptance(folder / "acceptance.png", drawn)
    return table


def _timed(llm: LLM, prompt: HeldOutPrompt, params: SamplingParams, into: Row) -> RequestOutput:
    start = time.perf_counter()
    output = llm.generate([_input(prompt)], params, use_tqdm=False)[0]
    into.add(output, time.perf_counter() - start)
    return output


def _input(prompt: HeldOutPrompt) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(prompt.token_ids)}


def _params(temperature: float, max_tokens: int, number: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
