"""Writes a stream of deltas, with accepted draft tokens in another colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import click

from draftproof.frontend.text import Detokenizer, Tokenizer
from draftproof.types import Delta

ACCEPTED = "green"


class Painter:
    """Cuts each delta's text into stretches that come from accepted drafts and stretches that do not.

    A delta's text may lag behind its tokens (unfinished characters, possible stop strings), so characters are
    matched with tokens by decoding the tokens once more.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._marks: list[bool] = []  # for each character that is decoded and not shown: was it drafted?

    def cut(self, delta: Delta) -> list[tuple[str, bool]]:
        """(text, accepted) in order; together they are `delta.text`."""
        marks = delta.accepted or [False] * len(delta.token_ids)
        for token_id, accepted in zip(delta.token_ids, marks, strict=True):
            self._marks += [accepted] * len(self._detokenizer.push(token_id))
        missing = len(delta.text) - len(self._marks)
        colors = self._marks[: len(delta.text)] + [False] * missing
        del self._marks[: len(delta.text)]
        runs: list[tuple[str, bool]] = []
        for character, accepted in zip(delta.text, colors, strict=True):
            if runs and runs[-1][1] == accepted:
                runs[-1] = (runs[-1][0] + character, accepted)
            else:
                runs.append((character, accepted))
        return runs


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
