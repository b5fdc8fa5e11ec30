"""`draftproof bench latency|throughput|serve-like|methods`: measures plain decoding and speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli import bench_setup as setup
from draftproof.cli import options
from draftproof.cli.bench_methods import methods

if TYPE_CHECKING:
    from draftproof.bench.harness import Variant
    from draftproof.bench.peers.plan import Beside
    from draftproof.bench.suite import Kind, Suite
    from draftproof.frontend.llm import LLM

EXAMPLES = """\b
Examples:
  draftproof bench latency --batch-sizes 1,4 --num-drafts 1,3,5
  draftproof bench throughput --against transformers,llama.cpp,openvino --busy 1,4
  draftproof bench serve-like --request-rate 2,8 --goodput ttft:500 --goodput tpot:50
  draftproof bench methods --heads FOLDER
  draftproof bench latency --model SHAPE --load-format dummy --random-input-len 1000 \\
      --speculative-config HEAD --num-drafts 5 --replay-acceptance 0.6,0.8
"""


class Kinds(click.Group):
    """Lists each command with the whole first sentence of its help, which click would cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        helps = [(name, one.help or "") for name, one in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split("\n\n")[0].split())) for name, text in helps])


@click.group(cls=Kinds, epilog=EXAMPLES)
def command() -> None:
    """Measure plain decoding beside speculation, over batch sizes and numbers of drafts, and compare all outputs.

    Results go to one folder: results.json (keys as `vllm bench serve` names them), results.md and plots. Exit status 1
    if any output differs from the plain one.
    """


command.add_command(methods)


@command.command(epilog=EXAMPLES)
@setup.shared_flags
def latency(given: dict[str, Any], engine: dict[str, Any]) -> int:
    """One batch at a time, from its prompts to its last token."""
    return run("latency", given, engine)


@command.command(epilog=EXAMPLES)
@setup.shared_flags
def throughput(given: dict[str, Any], engine: dict[str, Any]) -> int:
    """All prompts; a new request starts as soon as one of the batch is done."""
    return run("throughput", given, engine)


@command.command("serve-like", epilog=EXAMPLES)
@click.option(
    "--request-rate",
    "rates",
    type=options.NumbersType(float, positive=True),
    default="4",
    show_default=True,
    help="Requests per second; inf: all at once.",
)
@click.option(
    "--burstiness", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
    help="1: Poisson arrivals; below 1: in bursts; above 1: steadier; inf: at a fixed rate.",
)  # fmt: skip
@click.option(
    "--goodput", multiple=True, help="ttft:MS, tpot:MS or e2el:MS: the limit that a good request keeps."
)
@setup.shared_flags
def serve_like(
    rates: Sequence[float],
    burstiness: float,
    goodput: Sequence[str],
    given: dict[str, Any],
    engine: dict[str, Any],
) -> int:
    """Requests that arrive at a rate, served by the engine in this process, without HTTP.

    Times count from a request's arrival, whether or not there is room for it then.
    """
    return run("serve-like", given, engine, rates, burstiness, goodput)


def run(
    kind: Kind,
    given: Mapping[str, Any],
    engine: Mapping[str, Any],
    rates: Sequence[float] = (),
    burstiness: float = 1.0,
    goodput: Sequence[str] = (),
) -> int:
    """Check the settings, measure, write the files; returns the exit status."""
    from draftproof.bench.suite import Suite

    plan = setup.make_plan(kind, given, engine, (rates, burstiness, goodput))

    def make(variant: Variant) -> LLM:
        drafter = {} if variant.config is None else {"speculative_config": variant.config}
        return options.make_llm({**plan.engine, **drafter})

    suite = Suite(plan.settings, plan.prompts, plan.params, plan.variants, make, plan.recordings, setup.tell)
    try:
        suite.run()
    except KeyboardInterrupt:
        if not suite.measured:
            raise
        _conclude(suite, plan, "interrupted: what was not measured is missing")
        return 130
    return _conclude(suite, plan)


def _conclude(suite: Suite, plan: setup.BenchPlan, interrupted: str = "") -> int:
    """Compare with other engines if requested, write and print; returns the exit status."""
    from draftproof.bench import report

    runs = suite.records()
    beside = None if interrupted or not plan.against.peers else _beside_others(suite, plan)
    results = {
        "benchmark": suite.kind,
        "identical": report.verdict(runs),
        "environment": suite.environment,
        "settings": plan.record,
        "memory": suite.memory,
        "runs": runs,
        **({} if beside is None else {"against": dataclasses.asdict(beside)}),
        "notes": [interrupted] if interrupted else [],
    }
    setup.conclude(suite, report.SWEEP, plan.folder, results)
    return 1 if suite.differences or any(run["failed"] for run in runs) else 0


def _beside_others(suite: Suite, plan: setup.BenchPlan) -> Beside:
    """Measure the engines of --against and ours, after the sweep's engines were freed."""
    from draftproof.bench.peers import plan as comparison

    target = comparison.Target(
        directory=str(plan.directory),
        model=plan.model,
        device=suite.device,
        dtype=suite.dtype,
        settings={name: value for name, value in plan.engine.items() if name != "model"},
    )
    work = comparison.make_work(
        plan.against,
        target,
        batch_sizes=plan.settings.batch_sizes,
        num_new=plan.params.max_tokens or 1,
        num_rounds=plan.settings.num_iters,
        source=[token for prompt in plan.prompts for token in prompt],
    )
    return comparison.compare(plan.against.peers, work, target, setup.tell)
