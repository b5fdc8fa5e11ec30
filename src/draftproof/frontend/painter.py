"""Which stretches of a stream's text come from accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.frontend.text import Detokenizer, Tokenizer
from draftproof.types import Delta


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
