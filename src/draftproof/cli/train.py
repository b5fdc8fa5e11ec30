"""`draftproof train`: trains a draft head for your own target, on the target's own answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli import options
from draftproof.cli.prompts import Prompt, read_file
from draftproof.train.settings import WHOLE, AnswerConfig, HeadConfig, Part

if TYPE_CHECKING:
    from draftproof.frontend.text import Tokenizer

EXAMPLES = """\b
Examples:
  python -m draftproof.train.corpus prompts
  draftproof train head --prompt-file prompts/train.jsonl --held-out-file prompts/held_out.jsonl
  draftproof train head --model Qwen/Qwen3-0.6B --prompt-file mine.jsonl --method dflash --max-seconds 600
  draftproof train head --prompt-file mine.jsonl --dry-run
"""
STAGES = ("data", "train", "check")


@click.command(epilog=EXAMPLES)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt-file", required=True, help="Prompts to train on, as for generate.")
@click.option("--held-out-file", help="Prompts to check the head with; each may name its domain.")
@click.option(
    "--num-held-out",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Held-out prompts of each domain.",
)
@click.option("--max-prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option(
    "--data", type=click.Path(path_type=Path), help="Folder of answers and states. [default: FOLDER/data]"
)
@click.option("--target-name", help="What the head calls its target. [default: the model as given]")
@click.option("--stages", type=options.ListType(*STAGES), default=",".join(STAGES), show_default=True)
@click.option(
    "--part",
    help="Write only every N-th file of answers and states from the I-th on, as I/N: for several processes at once.",
)
@click.option(
    "--allow-missing", is_flag=True, help="Train on the answers that exist, even if some are missing."
)
@click.option(
    "--dry-run", is_flag=True, help="Print how long it would take and how much disk it needs, then stop."
)
@options.train_flags
@options.engine_flags
def command(
    folder: Path,
    prompt_file: str,
    held_out_file: str | None,
    num_held_out: int,
    max_prompt_tokens: int,
    data: Path | None,
    target_name: str | None,
    stages: list[str],
    part: str | None,
    allow_missing: bool,
    dry_run: bool,
    engine: dict[str, Any],
    answers: dict[str, Any],
    head: dict[str, Any],
) -> int:
    """Train a draft head into FOLDER.

    The target answers the prompts and reads them again with its answers; the head is trained on the states it had; then
    held-out prompts are decoded with and without it. What was written is used again: a run that was stopped goes on
    where it was. Beside the head lie train.json (how it was made), report.md and acceptance.png.
    """
    from draftproof.train import run

    if "speculative_config" in engine:
        raise ValueError("--speculative-config: is what is trained here; leave it out")
    heard = AnswerConfig(**answers)
    tokenizer = _tokenizer(engine)
    listed = read_file(Path(prompt_file))
    prompts = [
        ids for ids in (p.token_ids(tokenizer, chat=False) for p in listed) if len(ids) <= max_prompt_tokens
    ]
    if not prompts:
        raise ValueError(f"--prompt-file {prompt_file}: every prompt is longer than --max-prompt-tokens")
    training = run.Training(
        engine=engine,
        prompts=prompts,
        folder=folder,
        data_folder=data or folder / "data",
        answers=heard,
        head=HeadConfig(**head),
        target_name=target_name,
        part=_part(part),
        allow_missing=allow_missing,
    )
    if dry_run:
        click.echo(str(run.estimate(training, training.target(), options.make_llm(engine))))
        return 0
    target, files = run.prepare(training)
    if "data" in stages:
        llm = options.make_llm(engine)
        if part is None:
            click.echo(str(run.estimate(training, target, llm)))
        run.make_data(training, files, llm, _bar)
    if "train" in stages:
        reached = run.make_head(training, target, files, _show_step)
        click.echo("; ".join(f"{name} {value:.3f}" for name, value in reached.items()))
    if "check" in stages and held_out_file is not None:
        _check(training, tokenizer, read_file(Path(held_out_file)), num_held_out)
    return 0


def _part(text: str | None) -> Part:
    if text is None:
        return WHOLE
    numbers = text.split("/")
    if (
        len(numbers) != 2
        or not all(map(str.isdecimal, numbers))
        or not 1 <= int(numbers[0]) <= int(numbers[1])
    ):
        raise ValueError(f"--part {text!r}: must be I/N with I from 1 to N, such as 2/8")
    return Part(int(numbers[0]) - 1, int(numbers[1]))


def _check(training: Any, tokenizer: Tokenizer, prompts: list[Prompt], num_each: int) -> None:
    from draftproof.train import check

    chosen: dict[str, list[check.HeldOutPrompt]] = {}
    for prompt in prompts:
        among = chosen.setdefault(prompt.domain or "all", [])
        if len(among) < num_each:
            among.append(check.HeldOutPrompt(prompt.domain or "all", prompt.token_ids(tokenizer, chat=False)))
    temperatures = sorted({0.0, training.answers.temperature})
    held_out = [prompt for among in chosen.values() for prompt in among]
    rows = check.check(training.engine, training.folder, held_out, temperatures, training.answers.max_tokens)
    click.echo(check.report(rows, training.folder))


def _tokenizer(engine: dict[str, Any]) -> Tokenizer:
    from draftproof import assets
    from draftproof.frontend.text import Tokenizer
    from draftproof.models.loading import resolve, resolve_tokenizer

    if engine.get("tokenizer"):
        return Tokenizer(resolve_tokenizer(engine["tokenizer"]))
    model = engine.get("model") or assets.default_model().where
    return Tokenizer(resolve(model, load_format=engine.get("load_format", "auto")))


def _bar(what: str, done: int, total: int) -> None:
    from draftproof.frontend.llm import show_progress

    show_progress(what, done, total)


def _show_step(step: int, most: int, metrics: dict[str, float]) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    if step % 200 == 0 or sys.stderr.isatty() or step == most:
        click.echo(f"step {step} of {most}: loss {metrics['loss']:.3f}", err=True, nl=False)
        click.echo(end, err=True, nl=False)
