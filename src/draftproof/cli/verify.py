"""`draftproof verify`: the same requests with and without the drafter, in several settings, compared bit for bit."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from draftproof import assets
from draftproof.bench.compare import Difference, Tally, compare
from draftproof.cli import options
from draftproof.cli.prompts import Prompt, read_file, read_prompts
from draftproof.types import RequestOutput, SamplingParams

EXAMPLES = """\b
Examples:
  draftproof verify
  draftproof verify --prompt-file mine.jsonl --limit 32 --max-tokens 128
  draftproof verify --model Qwen/Qwen3-0.6B --speculative-config ngram --batch-sizes 1,16
  draftproof verify --model TARGET --speculative-config HEAD --chunk-sizes 2048,33 --temperatures 0,0.7,1
"""

SHOWN = 3  # differences that are printed
INSTEAD = {
    "max_num_seqs": "batch-sizes",
    "max_num_batched_tokens": "chunk-sizes",
    "temperature": "temperatures",
}
DEFAULTS = {"max_tokens": 64, "logprobs": 2}  # those that differ from the library's


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of running the requests; all of them must give the same outputs."""

    batch: int
    chunk: int
    temperature: float
    speculative: bool


@dataclass(slots=True)
class Row:
    """The result of one setting, compared with the reference: plain decoding in the first setting."""

    setting: Setting
    tally: Tally
    differences: list[Difference]
    num_faults: int = 0  # the drafter's
    last_fault: str = ""


@click.command(epilog=EXAMPLES)
@click.argument("prompt", required=False)
@click.option("--prompt-file", help="Prompts as for generate. [default: 16 that come with draftproof]")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first prompts.")
@click.option("--chat", is_flag=True, help="Ask raw prompts under the chat template.")
@click.option("--batch-sizes", type=options.NumbersType(int, positive=True), default="1,8", show_default=True)
@click.option(
    "--chunk-sizes", type=options.NumbersType(int, positive=True), default="2048,48", show_default=True
)
@click.option("--temperatures", type=options.NumbersType(float), default="0,0.8", show_default=True)
@partial(options.sampling_flags, own={**dict.fromkeys(INSTEAD), **DEFAULTS})
@partial(options.engine_flags, own=dict.fromkeys(INSTEAD))
def command(
    prompt: str | None,
    prompt_file: str | None,
    limit: int | None,
    chat: bool,
    batch_sizes: Sequence[int],
    chunk_sizes: Sequence[int],
    temperatures: Sequence[float],
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> int:
    """Decode every prompt with and without the drafter, and compare all token ids and log-probabilities.

    Runs each combination of batch size (requests at once), chunk size (tokens in a pass) and temperature, plainly
    and speculatively. Exit status 0 only if every output equals the first plain one bit for bit, and something was
    drafted.
    """
    for flag, value in {**engine, **sampling}.items():
        if flag in INSTEAD:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} {value}: give --{INSTEAD[flag]} {value} here")
    if engine.get("verification", "exact") != "exact":
        raise ValueError(
            f"--verification {engine['verification']}: gives outputs that are equal in distribution only; leave it out"
        )
    engine = options.apart(engine)
    if "speculative_config" not in engine:
        raise ValueError(
            "--speculative-config: name the drafter that is to be verified, such as ngram or a directory"
        )
    if prompt is None and prompt_file is None:
        prompts = read_file(assets.path(assets.PROMPTS))[:limit]
    else:
        prompts = read_prompts(prompt, prompt_file, limit)
    speculative = engine["speculative_config"]
    if (
        not {"policy", "num_speculative_tokens"} & speculative.keys()
    ):  # all drafts, even if they do not pay, so that the comparison proves something
        engine = {**engine, "speculative_config": {**speculative, "policy": "fixed"}}
    sampling = {**DEFAULTS, **sampling}
    rows = []
    for row in run_all(engine, sampling, prompts, chat, batch_sizes, chunk_sizes, temperatures):
        rows.append(row)
        if sys.stderr.isatty():
            click.echo(f"{describe(row.setting)}: {'different' if row.differences else 'equal'}", err=True)
        for difference in row.differences[:SHOWN]:
            click.echo(f"{describe(row.setting)}: prompt {prompts[difference.request].id}\n{difference}")
    print_table(rows)
    return conclude(rows)


def run_all(
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any],
    prompts: Sequence[Prompt],
    chat: bool,
    batches: Sequence[int],
    chunks: Sequence[int],
    temperatures: Sequence[float],
) -> Iterator[Row]:
    """Run every setting, one engine at a time; the first plain run of each temperature is the reference."""
    references: dict[float, list[RequestOutput]] = {}
    for batch in batches:
        for chunk in chunks:
            for speculative in (False, True):
                chosen = dict(engine) if speculative else options.without_drafter(engine)
                llm = options.make_llm({**chosen, "max_num_seqs": batch, "max_num_batched_tokens": chunk})
                inputs = [p.for_llm(llm.tokenizer, chat) for p in prompts]
                base = options.make_params(llm, sampling)
                for temperature in temperatures:
                    faults = llm.stats.num_drafter_faults
                    outputs = llm.generate(inputs, seeded(base, temperature, len(prompts)), use_tqdm=False)
                    reference = references.setdefault(temperature, outputs)
                    row = Row(Setting(batch, chunk, temperature, speculative), Tally(), [])
                    row.tally.add(outputs)
                    row.num_faults = llm.stats.num_drafter_faults - faults
                    row.last_fault = llm.stats.last_drafter_fault
                    failed = failures(outputs)
                    if failed and outputs is reference:
                        raise ValueError(f"{prompts[failed[0].request].id}: {failed[0].other}")
                    row.differences = failed or compare(reference, outputs)
                    yield row
                del llm
                gc.collect()  # one engine's memory at a time


def seeded(base: SamplingParams, temperature: float, count: int) -> list[SamplingParams]:
    """SamplingParams for each prompt, each with its own seed."""
    return [dataclasses.replace(base, temperature=temperature, seed=seed) for seed in range(count)]


def failures(outputs: Sequence[RequestOutput]) -> list[Difference]:
    """Requests that ended in an error: equal errors prove nothing."""
    failed = [(i, output.error) for i, output in enumerate(outputs) if output.error]
    return [
        Difference(i, 0, 0, "error", "an output, as every request must have", str(error))
        for i, error in failed
    ]


def describe(setting: Setting) -> str:
    how = "speculative" if setting.speculative else "plain"
    return f"{how}, batch {setting.batch}, chunk {setting.chunk}, temperature {setting.temperature:g}"


def print_table(rows: Sequence[Row]) -> None:
    """Print a line for each setting that was compared."""
    from rich import box
    from rich.table import Table

    table = Table(
        title="compared with plain decoding in the first setting", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in (
        "run",
        "batch",
        "chunk",
        "T",
        "outputs",
        "tokens",
        "logprobs",
        "drafted",
        "accepted",
        "equal",
    ):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for row in rows:
        s = row.setting
        t = row.tally
        counts = (
            t.requests,
            t.tokens,
            t.logprobs,
            t.speculation.num_draft_tokens,
            t.speculation.num_accepted_tokens,
        )
        verdict = f"no: {len(row.differences)}" if row.differences else "yes"
        how = "drafting" if s.speculative else "plain"
        table.add_row(how, str(s.batch), str(s.chunk), f"{s.temperature:g}", *map(str, counts), verdict)
    options.print_table(table)


def conclude(rows: Sequence[Row]) -> int:
    """Print what was compared and the result; returns the exit status."""
    total = Tally()
    for row in rows:
        total.requests += row.tally.requests
        total.tokens += row.tally.tokens
        total.logprobs += row.tally.logprobs
        total.speculation.add(row.tally.speculation)
    different = sum(len(row.differences) for row in rows)
    faults = sum(row.num_faults for row in rows)
    if faults:
        last = [row.last_fault for row in rows if row.last_fault][-1]
        click.echo(f"faults of the drafter, whose drafts were left out: {faults}; the last: {last}")
    drafts = total.speculation.num_draft_tokens
    accepted = total.speculation.num_accepted_tokens
    if different:
        click.echo(f"identical: NO, {different} of {total.requests} outputs differ")
        return 1
    if not drafts and faults:
        click.echo(
            "identical: nothing was drafted, so nothing is proved; mend the drafter, whose fault is shown above"
        )
        return 1
    if not drafts or not total.tokens:
        click.echo(
            "identical: nothing was drafted, so nothing is proved; give a larger --max-tokens or --chunk-sizes, other "
            'prompts, or "policy": "fixed" in --speculative-config'
        )
        return 1
    counts = f"{total.tokens} tokens and {total.logprobs} log-probabilities of {total.requests} outputs"
    click.echo(f"identical: yes ({counts}; {drafts} drafts proposed, {accepted} accepted)")
    return 0
