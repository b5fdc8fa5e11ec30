"""`draftproof demo`: one completion with accepted drafts coloured, then plain against speculative over many prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof import assets
from draftproof.bench.compare import Tally, compare
from draftproof.cli import options
from draftproof.cli.prompts import Prompt, read_file
from draftproof.cli.stream import ACCEPTED, write_stream
from draftproof.cli.verify import failures, seeded
from draftproof.frontend.painter import Painter
from draftproof.types import RequestOutput

if TYPE_CHECKING:
    from draftproof.frontend.llm import LLM

EXAMPLES = """\b
Examples:
  draftproof demo
  draftproof demo --max-tokens 32 --batch-size 8
  draftproof demo --model TARGET --speculative-config HEAD --prompt-file mine.jsonl
"""

GREEDY, SAMPLED = 0.0, 0.8
BAR = 48  # characters of the longest bar
PROVED = 4  # prompts that are always decoded with all drafts


@dataclass(slots=True)
class Timed:
    """The result of one engine over all prompts. Wall clock seconds: `reading`: until every request of a batch has its
    first token (mostly prefill); `decoding`: after that."""

    outputs: list[RequestOutput] = field(default_factory=list)
    reading_seconds: float = 0.0
    decoding_seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)

    @property
    def tokens_per_second(self) -> float:
        """The speed of decoding, without first tokens."""
        num_decoded = sum(len(choice.token_ids) - 1 for output in self.outputs for choice in output.outputs)
        return num_decoded / self.decoding_seconds

    def add(self, outputs: list[RequestOutput], seconds: float) -> None:
        """Add a batch that took `seconds`."""
        reading = max(output.metrics.first_token_latency for output in outputs)
        self.reading_seconds += reading
        self.decoding_seconds += seconds - reading
        self.outputs += outputs
        self.tally.add(outputs)


@click.command(epilog=EXAMPLES)
@click.option("--prompt-file", help="Prompts as for generate. [default: 16 that come with draftproof]")
@click.option("--max-tokens", type=click.IntRange(min=2), default=96, show_default=True)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Requests at once."
)
@click.option(
    "--color/--no-color", default=None, help="Colour accepted draft tokens. [default: on a terminal]"
)
@click.option(
    "--transformers/--no-transformers",
    "beside_transformers",
    default=True,
    show_default=True,
    help="Also measure transformers' generate on two of the prompts.",
)
@options.engine_flags
def command(
    prompt_file: str | None,
    max_tokens: int,
    batch_size: int,
    color: bool | None,
    beside_transformers: bool,
    engine: dict[str, Any],
) -> int:
    """Stream one completion, then decode 16 prompts plainly and speculatively, greedy and sampled.

    The table shows the speed of both, with as many drafts as pay on this machine. The streamed completion uses all
    drafts. Speed-ups are relative to draftproof's own plain decoding; the speed of transformers is shown below them.
    Speeds are of decoding, after the first token; a line below the table gives the time to first tokens. The line
    `identical: yes` comes from comparing every token id. Exit status 1 if any differs.
    """
    from draftproof.bench.internals import asking_for

    engine = {"max_num_seqs": batch_size, **options.apart(engine)}
    if "speculative_config" not in engine:
        raise ValueError("--speculative-config: name the drafter, such as ngram or a directory")
    prompts = read_file(assets.path(assets.PROMPTS) if prompt_file is None else Path(prompt_file))
    drafting = options.make_llm(engine)
    with asking_for(drafting, drafting.num_speculative_tokens):
        stream_one(drafting, _to_show(prompts, engine), max_tokens, options.use_color(color))
    plain = options.make_llm(options.without_drafter(engine))
    pairs = {}
    for temperature, name in ((GREEDY, "greedy"), (SAMPLED, f"T={SAMPLED}")):
        pairs[name] = run_both(plain, drafting, prompts, temperature, max_tokens, batch_size)
    print_table(pairs, len(prompts), batch_size)
    print_reading(*pairs["greedy"])
    speeds = {
        f"{name}, {how}": run.tokens_per_second
        for name, runs in pairs.items()
        for how, run in zip(("plain", "speculative"), runs, strict=True)
    }
    if beside_transformers:
        speeds["greedy, transformers"] = transformers_speed(
            plain, engine, prompts[:: len(prompts) // 2][:2], max_tokens
        )
    print_bars(speeds, options.use_color(color))
    with asking_for(
        drafting, drafting.num_speculative_tokens
    ):  # all drafts, even if they do not pay, so that the comparison proves something
        proof = [
            Timed(pairs["greedy"][0].outputs[:PROVED]),
            run_drafted(drafting, prompts[:PROVED], max_tokens),
        ]
    return conclude({**pairs, "all drafts": proof})


def _to_show(prompts: Sequence[Prompt], engine: Mapping[str, Any]) -> Prompt:
    """The prompt to stream: the first; for a default model other than the embedded one, the first chat, because it
    answers questions better than it writes code."""
    if "model" in engine or options.is_embedded(engine):
        return prompts[0]
    return next((prompt for prompt in prompts if prompt.messages), prompts[0])


def stream_one(llm: LLM, prompt: Prompt, max_tokens: int, color: bool) -> None:
    """Stream a greedy completion."""
    ids = prompt.token_ids(llm.tokenizer, chat=False)
    params = dataclasses.replace(llm.default_sampling_params(), temperature=0.0, max_tokens=max_tokens)
    click.echo(
        "Accepted draft tokens are green; the prompt comes first.\n" if color else "The prompt comes first.\n"
    )
    click.echo(
        click.style(llm.tokenizer.decode(ids), dim=True) if color else llm.tokenizer.decode(ids), nl=False
    )
    painter = Painter(llm.tokenizer, ids, params.skip_special_tokens) if color else None
    write_stream(llm.stream({"prompt_token_ids": ids}, params), painter)
    click.echo()


def run_drafted(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> Timed:
    """Decode some prompts greedily with all drafts."""
    run = Timed()
    inputs = [p.for_llm(llm.tokenizer, chat=False) for p in prompts]
    base = dataclasses.replace(llm.default_sampling_params(), max_tokens=max_tokens)
    run.outputs = llm.generate(inputs, seeded(base, GREEDY, len(prompts)), use_tqdm=False)
    run.tally.add(run.outputs)
    return run


def run_both(
    plain: LLM, drafting: LLM, prompts: Sequence[Prompt], temperature: float, max_tokens: int, batch_size: int
) -> list[Timed]:
    """Run all prompts through both engines, alternating batch by batch, so that disturbances affect both."""
    from tqdm import tqdm

    inputs = [p.for_llm(plain.tokenizer, chat=False) for p in prompts]
    base = dataclasses.replace(plain.default_sampling_params(), max_tokens=max_tokens)
    params = seeded(base, temperature, len(prompts))
    runs = [Timed(), Timed()]
    for llm in (plain, drafting):  # warm-up: compiling and measuring at first use is not timed
        llm.generate(
            inputs[:1], dataclasses.replace(params[0], max_tokens=min(8, max_tokens)), use_tqdm=False
        )
    for first in tqdm(range(0, len(inputs), batch_size), disable=None, leave=False, unit="batch"):
        batch = slice(first, first + batch_size)
        for llm, run in zip((plain, drafting), runs, strict=True):
            start = time.perf_counter()
            outputs = llm.generate(inputs[batch], params[batch], use_tqdm=False)
            run.add(outputs, time.perf_counter() - start)
    return runs


def print_table(pairs: dict[str, list[Timed]], num_prompts: int, batch_size: int) -> None:
    """Print speed and acceptance of each pair of runs."""
    from rich import box
    from rich.table import Table

    at_once = "one at a time" if batch_size == 1 else f"{batch_size} at once"
    table = Table(title=f"{num_prompts} prompts, {at_once}", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "plain tok/s", "spec. tok/s", "speed-up", "tau", "accepted at 1, 2, ..."):
        table.add_column(name, justify="right" if name.endswith("tok/s") else "left", no_wrap=True)
    for name, (plain, drafted) in pairs.items():
        stats = drafted.tally.speculation
        shares = [accepted / max(1, stats.num_rounds) for accepted in stats.accepted_per_position]
        speeds = (plain.tokens_per_second, drafted.tokens_per_second)
        table.add_row(
            name,
            *(f"{speed:.0f}" for speed in speeds),
            f"{speeds[1] / speeds[0]:.2f}x",
            f"{stats.acceptance_length:.2f}",
            " ".join(f"{share:.2f}" for share in shares) or "-",
        )
    options.print_table(table)


def print_reading(plain: Timed, drafted: Timed) -> None:
    """Print the time to first tokens, and the speed-up including it."""
    whole = [run.reading_seconds + run.decoding_seconds for run in (plain, drafted)]
    click.echo(
        f"Speeds are of decoding: first tokens took {plain.reading_seconds:.1f} s plain and "
        f"{drafted.reading_seconds:.1f} s speculative; if that is counted, greedy is {whole[0] / whole[1]:.2f}x.\n"
    )


def transformers_speed(
    llm: LLM, engine: Mapping[str, Any], prompts: Sequence[Prompt], max_tokens: int
) -> float:
    """Tokens per second of transformers' `generate` after the first token, greedy, one prompt at a time, in the
    precision of `llm`."""
    from draftproof.bench.peers.engine import Spec
    from draftproof.bench.peers.hf import Transformers
    from draftproof.engine.loading.memory import pick_device
    from draftproof.frontend.llm import show_progress
    from draftproof.models.loading import resolve

    config = llm.config
    directory = resolve(
        engine.get("model") or assets.default_model().where,
        load_format=config.load_format,
        progress=show_progress,
    )
    dtype = str(llm.model_config.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    peer = Transformers(
        Spec(
            where="",
            model=str(directory),
            dtype=dtype,
            device=str(pick_device(config.device)),
            dummy=config.load_format == "dummy",
        )
    )
    ids = [prompt.token_ids(llm.tokenizer, chat=False) for prompt in prompts]
    peer.generate(ids[:1], 4)  # warm-up
    reading = sum(peer.generate([one], 1)[1] for one in ids)
    whole = sum(peer.generate([one], max_tokens + 1)[1] for one in ids)
    return (max_tokens - 1) * len(ids) / (whole - reading)


def print_bars(speeds: Mapping[str, float], color: bool) -> None:
    """Print a bar for each speed in tokens per second."""
    widest = max(map(len, speeds))
    fastest = max(speeds.values())
    for name, speed in speeds.items():
        bar = "\u2588" * max(1, round(BAR * speed / fastest))
        painted = click.style(bar, fg=ACCEPTED) if color and name.endswith("speculative") else bar
        click.echo(f"{name:<{widest}}  {painted} {speed:.0f} tok/s")


def conclude(pairs: dict[str, list[Timed]]) -> int:
    """Compare every id and print the result; returns the exit status."""
    total = Tally()
    differences = []
    for plain, drafted in pairs.values():
        total.add(drafted.outputs)
        found = (
            failures(plain.outputs) or failures(drafted.outputs) or compare(plain.outputs, drafted.outputs)
        )
        differences += found
    for difference in differences[:3]:
        click.echo(str(difference))
    drafts = total.speculation.num_draft_tokens
    accepted = total.speculation.num_accepted_tokens
    if not differences and not accepted:
        click.echo("identical: nothing was accepted, so nothing is proved")
        return 1
    counts = (
        f"{total.tokens} tokens of {total.requests} outputs; {drafts} drafts proposed, {accepted} accepted"
    )
    click.echo(f"identical: {'NO' if differences else 'yes'} ({counts})")
    return 1 if differences else 0
