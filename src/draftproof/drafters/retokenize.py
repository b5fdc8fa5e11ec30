"""One text in two tokenizers: target tokens to text, text to draft tokens, and drafts back to target tokens.

All three work only on the end of the text, so a round costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftproof.models.tokenizer_file import BROKEN

CONTEXT = 8  # preceding tokens decoded along: a token's text may depend on what precedes it
LOOKBACK = 16  # tokens at the end of the encoded text that are encoded again
SYNC = 4  # consecutive unchanged tokens after which the encoding before them counts as unchanged


class TargetText:
    """The text of a growing list of target ids, without `unknown` ids."""

    def __init__(self, tokenizer: Any, unknown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._unknown = unknown
        self.num_ids = 0
        self._ids: list[int] = []  # without the unknown
        self._num_sure = 0  # ids whose text is certain
        self._sure = ""
        self.text = ""
        self.ends_whole = True  # False: the last bytes are an incomplete character

    def add(self, ids: Sequence[int]) -> None:
        self.num_ids += len(ids)
        self._ids += [i for i in ids if i not in self._unknown]
        start = max(0, self._num_sure - CONTEXT)
        before = self._decode(self._ids[start : self._num_sure])
        piece = self._decode(self._ids[start:])[len(before) :]
        self.ends_whole = not piece.endswith(BROKEN)
        self.text = self._sure + piece.rstrip(BROKEN)
        if self.ends_whole:
            self._sure = self.text
            self._num_sure = len(self._ids)

    def continued(self, text: str, most: int) -> list[int]:
        """At most `most` ids of `text` encoded after this text; empty if the ids would not decode to exactly `text`."""
        known = self._ids[-CONTEXT:]
        behind = self._decode(known)
        whole = self._tokenizer.encode(behind + text, add_special_tokens=False)
        # the first token that begins in the new text, in case the known text was written in other tokens
        first = next((i for i, (start, end) in enumerate(whole.offsets) if start >= len(behind) < end), None)
        if whole.ids[: len(known)] == known:
            ids = whole.ids[len(known) :]
        elif first is not None and whole.offsets[first][0] == len(behind):
            ids = whole.ids[first:]
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[:most] if self._decode([*known, *ids]) == behind + text else []

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class DraftIds:
    """The draft's encoding of a growing text. `ids`: what its model reads, including the tokenizer's prefix (BOS)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._ids: list[int] = []
        self._starts: list[int] = []  # the character each begins with
        self.prefix = _prefix(tokenizer)

    @property
    def ids(self) -> list[int]:
        prefix = self.prefix
        return self._ids if self._ids[: len(prefix)] == prefix else prefix + self._ids

    def update(self, text: str) -> None:
        """Replace the text by `text`, which begins with the text so far."""
        if text == self._text:
            return
        lookback = LOOKBACK
        while not self._splice(text, max(0, len(self._ids) - lookback)):
            lookback *= 4
        self._text = text

    def continuation(self, ids: Sequence[int]) -> str:
        """The text that `ids` add, up to the last complete character."""
        known = self._ids[-CONTEXT:]
        before = self._tokenizer.decode(known, skip_special_tokens=False)
        after = self._tokenizer.decode([*known, *ids], skip_special_tokens=False)
        return str(after[len(before) :]).rstrip(BROKEN) if after.startswith(before) else ""

    def _splice(self, text: str, place: int) -> bool:
        """Encode again from the token at `place` on and join with the old ids; False if the two never agree."""
        at = self._starts[place] if place else 0
        found = self._tokenizer.encode(text[at:], add_special_tokens=False)
        ids = found.ids
        starts = [at + start for start, _ in found.offsets]
        if place == 0:
            self._ids = ids
            self._starts = starts
            return True
        # The cut may change the first few tokens: join where old and new encoding agree on SYNC tokens.
        old = {start: i for i, start in reversed(list(enumerate(self._starts[place:], place)))}
        for new in range(len(ids) - SYNC):
            i = old.get(starts[new])
            if i is None or (new and starts[new] == starts[new - 1]):
                continue
            same = self._ids[i : i + SYNC] == ids[new : new + SYNC]
            if same and self._starts[i : i + SYNC] == starts[new : new + SYNC]:
                self._ids = self._ids[:i] + ids[new:]
                self._starts = self._starts[:i] + starts[new:]
                return True
        return False


def _prefix(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before any text."""
    found = tokenizer.encode("a", add_special_tokens=True)
    first = next((i for i, special in enumerate(found.special_tokens_mask) if not special), 0)
    return list(found.ids[:first])
