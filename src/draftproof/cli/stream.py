"""Writes a stream of deltas, with accepted draft tokens in another colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from draftproof.frontend.painter import Painter
from draftproof.types import Delta

ACCEPTED = "green"


def write_stream(deltas: Iterable[Delta], painter: Painter | None) -> Delta | None:
    """Write every delta as it comes, coloured if there is a painter; returns the last delta."""
    write: Callable[..., None] = click.echo
    last = None
    for last in deltas:
        if painter is None:
            write(last.text, nl=False)
            continue
        for text, accepted in painter.cut(last):
            write(click.style(text, fg=ACCEPTED) if accepted else text, nl=False, color=True)
    write()
    return last
