"""The likeliest continuation of texts, by what followed earlier occurrences of their last tokens.

Shapes: N rows of tokens, L positions, R requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from draftproof.kernels.continuation.index import SlotTexts, TextIndex

MOST_PLACES = 64  # earlier occurrences looked at in one index, newest first


class Limits(NamedTuple):
    """`longest`: tokens of a match that are looked at; `each`: drafts per matching token, at most; `least`: the
    continuation ends where its estimated probability falls below."""

    longest: int
    each: float
    least: float


class ContinuationOps(Protocol):
    """Adds to texts and continues them; runs on the host."""

    def add(self, index: TextIndex, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        ...

    def propose(
        self,
        own: SlotTexts,
        shared: TextIndex | None,
        slots_R: Tensor,  # int64
        tokens_NL: Tensor,  # int32: known tokens
        length_N: Tensor,  # int64: number of known tokens
        row_R: Tensor,  # int64: the row of each request's tokens
        k_R: Tensor,  # int64: drafts wanted; 0: only the text is appended
        num_drafts: int,
        limits: Limits,
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens of each request's text to its slot's own, and return its continuation: (tokens int64
        [R, K], count int64 [R]). None for a slot without a text.

        A match is an earlier place, in its own text or in a shared one, where the last two or more tokens are the same.
        For each number of matching tokens, the continuation takes the commonest next token of all places with at least
        as many (of equally common ones the newest place's), as long as `limits` allow. The one with the most expected
        accepted tokens is returned: of equal ones its own text's, then that of the longer match.
        """
        ...
