"""`draftproof certify`: the exactness on this machine of every operator and product of a model, in every version."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import click

from draftproof.cli import options

EXAMPLES = """\b
Examples:
  draftproof certify
  draftproof certify Qwen/Qwen3-0.6B --dtype float32
  draftproof certify path/to/model --no-native --all
"""


UNUSED = ("speculative_config", "exact", "load_format")  # engine flags without effect here


@click.command(epilog=EXAMPLES)
@click.argument("target", required=False, metavar="[MODEL]")
@click.option("--all", "show_all", is_flag=True, help="Also show the versions that are not used.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, with every version.")
@partial(options.engine_flags, own=dict.fromkeys(UNUSED))
def command(target: str | None, show_all: bool, as_json: bool, engine: dict[str, Any]) -> int:
    """Certify every operator and product shape of MODEL on this machine, and time it.

    A version passes if a row has the same bits alone and in every batch tried, on data that would show another order
    of sums or another rounding. Operators that only move bits, and those on integers, have nothing to round and are
    not listed. Weights are random, as large as the model's; of its files only config.json is read. Exit status 1 where
    something would run that is not exact.
    """
    from rich import box
    from rich.table import Table

    from draftproof.config import EngineConfig
    from draftproof.engine.certificates import GROUPED, survey
    from draftproof.frontend.llm import show_progress

    if target is not None and engine.get("model") not in (None, target):
        raise click.UsageError(f"MODEL {target!r} and --model {engine['model']!r}: give one of them")
    config = EngineConfig.from_kwargs(**{**engine, **({} if target is None else {"model": target})})
    found = survey(config, show_progress)
    lines = found.lines
    bad = [line for line in lines if line.used and line.exact < 1 and line.operator != "product"]
    served = {(x.operator, x.shape) for x in lines if x.used}
    unserved = {(x.operator, x.shape) for x in lines if x.operator != GROUPED} - served
    if as_json:
        for line in lines:
            print(json.dumps(dataclasses.asdict(line)))
        return int(bool(bad or unserved))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("operator", "shape", "version", "exact"):
        table.add_column(column)
    table.add_column("us, 8 rows", justify="right")
    table.add_column("used")
    for line in lines:
        if show_all or line.used:
            exact = "yes" if line.exact == 1 else f"{line.exact:.0%} of row counts" if line.exact else "no"
            used = "yes" if line.used else ""
            time_us = "not timed" if line.microseconds is None else f"{line.microseconds:.0f}"
            table.add_row(line.operator, line.shape, line.version, exact, time_us, used)
    options.print_table(table)
    for operator, shape in sorted(unserved):
        print(f"no exact version here: {operator} {shape}")
    print(f"compiled operators: {found.operators}")
    shapes = {(line.operator, line.shape) for line in lines}
    verdict = "NOT exact on this machine" if bad or unserved else "what is used is certified on this machine"
    print(f"{len(shapes)} operators and shapes, {len(lines)} versions: {verdict}")
    return int(bool(bad or unserved))
