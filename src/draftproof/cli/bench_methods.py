"""`draftproof bench methods`: every draft method there is for a target, in one table and one plot."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftproof import assets
from draftproof.cli import bench_setup as setup
from draftproof.cli import options
from draftproof.cli.prompts import Prompt, read_file
from draftproof.config import SpeculativeConfig

if TYPE_CHECKING:
    from draftproof.bench.harness import Variant
    from draftproof.bench.methods import Comparison

EXAMPLES = """\b
Examples:
  draftproof bench methods
  draftproof bench methods --heads FOLDER --batch-size 4
  draftproof bench methods --model TARGET --heads FOLDER --prompts gsm8k.jsonl --max-tokens 256
  draftproof bench methods --model TARGET --drafters ngram mine=package.module.Class \\
      'both={"method": "chain", "drafters": [{"method": "suffix"}, {"model": "HEAD"}]}'
"""


class NamedDrafter(options.DrafterType):
    """NAME=DRAFTER, or a drafter whose text is also its name."""

    name = "[name=]json|method|directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        name, is_named, config = value.partition("=")
        if value.lstrip().startswith("{"):
            self.fail(f"{value!r}: give it a name: NAME={value}", param, ctx)
        if not is_named:
            name, config = Path(value).name, value
        return name, super().convert(config, param, ctx)


DRAFTER = NamedDrafter()


@click.command(epilog=EXAMPLES)
@click.option(
    "--drafters", "named", type=DRAFTER, multiple=True, help="Methods to compare. [default: all available]"
)
@click.argument("more", type=DRAFTER, nargs=-1, metavar="[DRAFTER]...")
@click.option(
    "--heads",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folder of draft checkpoints; those that fit the target are compared, too.",
)
@click.option(
    "--prompts",
    "--prompt-file",
    "prompt_file",
    help="Prompts as for generate; where they have a `reference`, answers are compared with it. "
    "[default: 16 GSM8K questions and 10 pieces of code that come with draftproof]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first prompts.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Requests at once."
)
@click.option("--num-drafts", type=click.IntRange(1, 64), help="K of all drafters. [default: each one's own]")
@click.option(
    "--policy",
    type=click.Choice(["fixed", "adaptive"]),
    default="fixed",
    show_default=True,
    help="Always K drafts, or as many as pay.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="The fastest run of each batch counts.",
)
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default="bench-results",
    show_default=True,
    help="Folder for methods.json, methods.md and methods.png.",
)
@options.engine_flags
def methods(
    named: Sequence[tuple[str, dict[str, Any]]],
    more: Sequence[tuple[str, dict[str, Any]]],
    heads: Sequence[Path],
    output_dir: Path,
    engine: dict[str, Any],
    **given: Any,
) -> int:
    """Compare draft methods on one target: acceptance, time, speed-up, right answers, and whether they are the same.

    Each drafter takes turns with plain decoding on the same prompts. A step's time is divided into the target's pass,
    the draft pass and the rest; acceptance at a position is the share of rounds that accept the draft there. Exit
    status 1 if any output differs from the plain one.
    """
    from draftproof.bench.methods import Comparison
    from draftproof.types import SamplingParams

    for flag, instead in (("speculative_config", "drafters"), ("max_num_seqs", "batch-size")):
        if flag in engine:
            raise ValueError(f"--{flag.replace('_', '-')}: use --{instead} here")
    engine, own = _apart(engine)
    drafters, notes = all_drafters([*named, *more], heads, engine)
    drafters += own
    for drafter in drafters:
        _check(drafter, engine)
    common = {"policy": given["policy"], "num_speculative_tokens": given["num_drafts"]}
    questions = _questions(given["prompt_file"], given["limit"], engine)
    setup.make_folder(output_dir)
    comparison = Comparison(
        lambda method: _engine(method, engine, given["batch_size"]),
        [_with(common, method) for method in drafters],
        questions,
        SamplingParams(temperature=given["temperature"], max_tokens=given["max_tokens"]),
        batch_size=given["batch_size"],
        repeats=given["repeats"],
        tell=setup.tell,
    )
    settings = {"engine": dict(engine), **given, "num_prompts": len(questions)}
    try:
        comparison.run()
    except (KeyboardInterrupt, ValueError) as error:
        if comparison.records():
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"ended early ({error})"
            notes.append(f"{why}: what was not measured is missing")
            _conclude(comparison, output_dir, notes, settings)
        raise
    return _conclude(comparison, output_dir, notes, settings)


def all_drafters(
    named: Sequence[tuple[str, dict[str, Any]]], heads: Sequence[Path], engine: Mapping[str, Any]
) -> tuple[list[Variant], list[str]]:
    """(drafters, notes): the named ones, else those without checkpoints and those in the package; then all in folders.

    Notes: a line for each checkpoint that does not match the target.
    """
    from draftproof.bench.harness import Variant
    from draftproof.bench.methods import find

    chosen = [Variant(name, config) for name, config in named]
    if not named:
        chosen = [Variant("ngram", {"method": "ngram"}), Variant("suffix", {"method": "suffix"})]
        if options.is_embedded(engine):
            own = {"model": str(assets.path(options.EMBEDDED_DRAFTER))}
            short = {"method": "suffix", "num_speculative_tokens": 5}  # the head's number
            both = {"method": "chain", "drafters": [short, own]}
            chosen += [Variant("suffix, then eagle3", both), Variant(options.EMBEDDED_DRAFTER, own)]
    notes: list[str] = []
    for folder in heads:
        found, misfits = find(folder, _target(engine))
        names = {m.name for m in chosen}
        chosen += [m for m in found if m.name not in names]
        notes += misfits
    return chosen, notes


def _check(method: Variant, engine: Mapping[str, Any]) -> None:
    """ValueError for a config that was given and makes no sense, whatever the target; nothing is loaded for it."""
    from draftproof.engine.loading.plans import Files, draft_plans
    from draftproof.models.weights import RandomWeights

    if method.found or method.config is None:
        return
    try:
        files = Files(_target(engine), RandomWeights(), engine.get("load_format", "auto"))
        draft_plans(SpeculativeConfig.from_dict(method.config), files)
    except ValueError as error:
        raise ValueError(f"{method.name}: {error}") from error


def _with(common: Mapping[str, Any], method: Variant) -> Variant:
    """The method with the common settings, which its own override."""
    given = {name: value for name, value in common.items() if value is not None}
    return dataclasses.replace(method, config={**given, **(method.config or {})})


def _apart(engine: Mapping[str, Any]) -> tuple[dict[str, Any], list[Variant]]:
    """(engine settings, variants): a draft head given as the model becomes a variant for the target that it names."""
    from draftproof.bench.harness import Variant

    chosen = options.apart(engine)
    if "model" not in engine:
        return options.without_drafter(chosen), []
    drafter = chosen.pop("speculative_config", None)
    return chosen, [] if drafter is None else [Variant(Path(engine["model"]).name, drafter)]


def _target(engine: Mapping[str, Any]) -> Path:
    from draftproof.models.loading import resolve

    model = engine.get("model", assets.default_model().where)
    return resolve(model, engine.get("revision"), load_format=engine.get("load_format", "auto"))


def _engine(method: Variant, engine: Mapping[str, Any], batch_size: int) -> Any:
    """A variant's engine. On a GPU the plain engine leaves memory for the other one."""
    chosen = {"enable_prefix_caching": False, **engine, "max_num_seqs": batch_size}
    if method.config is None:
        chosen["gpu_memory_utilization"] = chosen.get("gpu_memory_utilization", 0.9) / 2
        return options.make_llm(chosen)
    return options.make_llm({**chosen, "speculative_config": dict(method.config)})


def _questions(file: str | None, limit: int | None, engine: Mapping[str, Any]) -> list[Any]:
    """The prompts as ids; those of the package alternate between questions and code."""
    from draftproof.bench.methods import Question
    from draftproof.frontend.text import Tokenizer
    from draftproof.models.loading import resolve_tokenizer

    if file is not None:
        prompts = read_file(Path(file))
    else:
        code = [p for p in read_file(assets.path(assets.PROMPTS)) if p.messages is None]
        pairs = itertools.zip_longest(read_file(assets.path(assets.QUESTIONS)), code)
        prompts = [p for pair in pairs for p in pair if isinstance(p, Prompt)]
    tokenizer = Tokenizer(
        resolve_tokenizer(engine["tokenizer"]) if "tokenizer" in engine else _target(engine)
    )
    return [
        Question(id=p.id, token_ids=p.token_ids(tokenizer, chat=False), reference=p.reference)
        for p in prompts[:limit]
    ]


def _conclude(comparison: Comparison, folder: Path, notes: list[str], settings: Mapping[str, Any]) -> int:
    """Write and print the results; returns the exit status."""
    from draftproof.bench import report

    rows, model, notes = comparison.records(), settings["engine"].get("model"), [*notes, *comparison.notes]
    if not rows:
        raise ValueError("\n".join(["no drafter fits this target", *notes]))
    results = {
        "model": assets.default_model().name if model is None else Path(model).name,
        "environment": comparison.environment,
        "settings": settings,
        "methods": rows,
        "notes": notes + [f"{row['name']}: {row['num_faults']} faults" for row in rows if row["num_faults"]],
    }
    setup.conclude(comparison, report.METHODS, folder, results)
    return 1 if comparison.differences else 0
