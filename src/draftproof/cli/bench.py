"""`draftproof bench`: the benchmarks there are."""

from __future__ import annotations

import click

from draftproof.cli.bench_methods import methods


@click.group()
def command() -> None:
    """Measure speculation, with plain decoding beside it, and compare all outputs."""


command.add_command(methods)
