"""`draftproof doctor`: whether a model and its drafter match, how often drafts are right, and the speed-up here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof import assets
from draftproof.bench.compare import compare
from draftproof.cli import options
from draftproof.cli.prompts import Prompt, read_file
from draftproof.metrics import Prediction, SpeculationStats

if TYPE_CHECKING:
    from draftproof.engine.auto_policy import AutoPolicy
    from draftproof.engine.chain_policy import ChainPolicy
    from draftproof.frontend.llm import LLM
    from draftproof.types import RequestOutput

EXAMPLES = """\b
Examples:
  draftproof doctor
  draftproof doctor TARGET HEAD
  draftproof doctor TARGET ngram --seconds 60 --plot speedup.png
"""

RARE = 0.1  # acceptance of the first draft below which a head probably belongs to another target
BAR = 10  # characters for a speed-up of 1


@dataclass(slots=True)
class Examined:
    """Outputs and seconds of plain decoding, and of decoding with the maximum of drafts, from which `policy` has
    learnt."""

    policy: AutoPolicy | ChainPolicy
    plain: list[RequestOutput] = dataclasses.field(default_factory=list)
    drafted: list[RequestOutput] = dataclasses.field(default_factory=list)
    plain_seconds: float = 0.0
    drafted_seconds: float = 0.0
    speculation: SpeculationStats = dataclasses.field(default_factory=SpeculationStats)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.drafted_seconds


@click.command(epilog=EXAMPLES)
@click.argument("target", required=False, metavar="[MODEL]")
@click.argument("head", required=False, metavar="[DRAFTER]", type=options.DrafterType())
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=20.0, show_default=True, help="Seconds of measuring."
)
@click.option("--prompt-file", help="Prompts as for generate. [default: 16 that come with draftproof]")
@click.option("--chat", is_flag=True, help="Ask raw prompts under the chat template.")
@click.option("--max-tokens", type=click.IntRange(min=8), default=96, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a plot of the speed-ups to this PNG file.",
)
@options.engine_flags
def command(
    target: str | None,
    head: dict[str, Any] | None,
    seconds: float,
    plot: Path | None,
    engine: dict[str, Any],
    **given: Any,
) -> int:
    """Check MODEL with DRAFTER, measure both on this machine, and predict the speed-up for each number of requests.

    Prompts are decoded plainly and with as many drafts as there may be, in turns, to learn how often drafts are right
    and what passes take. Exit status 1 where something is wrong with the pair: drafts that are hardly ever right, a
    drafter that fails, outputs that differ.
    """
    chosen = _engine(target, head, engine)
    prompts = read_file(
        assets.path(assets.PROMPTS) if given["prompt_file"] is None else Path(given["prompt_file"])
    )
    if plot is not None:
        _check_plots(plot)
    llm = options.make_llm(chosen)
    found = examine(llm, prompts, seconds, given["chat"], given["max_tokens"], given["temperature"])
    predictions = predict(llm, found)
    print_predictions(predictions)
    print_acceptance(found)
    if plot is not None:
        from draftproof.bench.plots import draw_predictions

        draw_predictions(plot, predictions)
        click.echo(f"plot: {plot}")
    wrong = complaints(llm, found)
    for line in wrong:
        click.echo(f"wrong: {line}")
    if found.speculation.drafted_per_position:
        click.echo(advice(predictions))
    return int(bool(wrong))


def _engine(target: str | None, head: dict[str, Any] | None, engine: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings, with an adaptive number of drafts."""
    for name, own, flag in (("MODEL", target, "model"), ("DRAFTER", head, "speculative_config")):
        if own is not None:
            if engine.get(flag) not in (None, own):
                raise click.UsageError(f"{name} and --{flag.replace('_', '-')}: give one of them")
            engine = {**engine, flag: own}
    chosen = options.apart(engine)
    if "speculative_config" not in chosen:
        raise ValueError("DRAFTER: name the drafter, such as ngram or a directory")
    most = chosen["speculative_config"].get("num_speculative_tokens")
    speculative = {**chosen["speculative_config"], "policy": "adaptive"}  # up to the given number
    return {
        **chosen,
        "speculative_config": speculative | ({} if most is None else {"num_speculative_tokens": most}),
    }


def examine(
    llm: LLM, prompts: Sequence[Prompt], seconds: float, chat: bool, max_tokens: int, temperature: float
) -> Examined:
    """Decode prompts plainly and with drafts, alternating, until the time is over."""
    from draftproof.bench.internals import asking_anyway, asking_for, using

    asker = asking_anyway(llm)
    found, inputs = Examined(asker), [prompt.for_llm(llm.tokenizer, chat) for prompt in prompts]
    base = dataclasses.replace(
        llm.default_sampling_params(), temperature=temperature, max_tokens=max_tokens, ignore_eos=True
    )
    end = time.perf_counter() + seconds
    number = 0
    while number < 2 or time.perf_counter() < end:
        params = dataclasses.replace(base, seed=number)
        asked = inputs[number % len(inputs)]
        for is_plain in (True, False):
            start = time.perf_counter()
            with asking_for(llm, 0) if is_plain else using(llm, asker):
                output = llm.generate(asked, params, use_tqdm=False)[0]
            took = time.perf_counter() - start if number else 0.0  # the first run is a warm-up
            if is_plain:
                found.plain.append(output)
                found.plain_seconds += took
            else:
                found.drafted.append(output)
                found.drafted_seconds += took
                found.speculation.add(output.metrics.speculation if output.metrics else SpeculationStats())
        number += 1
    return found


def predict(llm: LLM, found: Examined) -> list[Prediction]:
    """Predictions for each number of requests, at the measured requests' mean context."""
    lengths = [len(o.prompt_token_ids or ()) + len(o.outputs[0].token_ids) / 2 for o in found.plain]
    context = sum(lengths) / len(lengths)
    numbers = [prediction.num_requests for prediction in llm.stats.predictions]
    return [found.policy.predict(number, int(context * number)) for number in numbers]


def print_predictions(predictions: Sequence[Prediction]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="predicted", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("requests at once", "best K", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("")
    for p in predictions:
        table.add_row(
            str(p.num_requests), str(p.num_drafts), f"{p.speedup:.2f}x", "#" * round(BAR * p.speedup)
        )
    options.print_table(table)


def print_acceptance(found: Examined) -> None:
    stats = found.speculation
    shares = " ".join(f"{n / max(1, stats.num_rounds):.2f}" for n in stats.accepted_per_position) or "-"
    click.echo(
        f"drafts accepted at 1, 2, ...: {shares}; {stats.acceptance_length:.2f} tokens a round in {stats.num_rounds} "
        f"rounds; one request with all drafts (K={found.policy.levels[-1]}), measured: {found.speedup:.2f}x"
    )


def complaints(llm: LLM, found: Examined) -> list[str]:
    """Problems found with model and drafter, a line each."""
    wrong = []
    stats = found.speculation
    failed = [output.error for output in (*found.plain, *found.drafted) if output.error]
    if failed:
        wrong.append(f"a request failed: {failed[0]}")
    wrong += [f"outputs differ: {difference}" for difference in compare(found.plain, found.drafted)[:1]]
    if llm.stats.num_drafter_faults:
        wrong.append(
            f"{llm.stats.num_drafter_faults} faults of the drafter; the last: {llm.stats.last_drafter_fault}"
        )
    drafted, accepted = stats.drafted_per_position[:1], stats.accepted_per_position[:1]
    if not drafted:
        wrong.append("the drafter proposed nothing at all")
    elif accepted[0] < RARE * drafted[0]:
        wrong.append(
            f"the first draft is right in {accepted[0] / drafted[0]:.0%} of the rounds: the drafter was made for "
            "another model or another kind of text, or its files are read wrongly; `draftproof draft` shows drafts "
            "beside the target's tokens"
        )
    return wrong


def advice(predictions: Sequence[Prediction]) -> str:
    """The final line: at which numbers of requests speculation is predicted to pay."""
    from draftproof.engine.reporting import speculation_line

    return speculation_line(predictions)


def _check_plots(plot: Path) -> None:
    from draftproof.bench.plots import available

    if not available():
        raise ValueError(f"--plot {plot}: needs matplotlib; pip install draftproof[bench]")
    if not plot.parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no folder {plot.parent}")
