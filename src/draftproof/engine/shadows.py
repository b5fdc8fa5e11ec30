"""Shadow drafts: compared with the output as it comes, whether they are verified or not.

The output does not depend on drafts, so the comparison tells how many of them would have been accepted. It costs no
rows of the target, only the drafter's time. What rounds alone tell is biased: how far they look depends on what the
policy expects of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shadowing(NamedTuple):
    """For each request of a step: how many of its drafts are to be verified at most, and whether all that it makes are
    compared with the output. `of_models`: how many are to be verified if they come from a drafter that runs a model,
    which are never compared."""

    most: Sequence[int]
    is_compared: Sequence[bool]
    of_models: Sequence[int] | None = None


class Comparison(NamedTuple):
    """What is newly known of `num_drafts` shadow drafts, of `num_asked` that were asked for: all before `num_before`
    were accepted, as was known already, and now all before `num_accepted`. `is_rejected`: the next one was not."""

    num_asked: int
    num_drafts: int
    num_before: int
    num_accepted: int
    is_rejected: bool

    @property
    def is_last(self) -> bool:
        return self.is_rejected or self.num_accepted == self.num_drafts


@dataclass(slots=True)
class Shadow:
    """A request's shadow drafts, for the positions from `start` on; the drafter was asked for `num_asked`.

    `num_accepted`: how many are known to be right.
    """

    start: int
    drafts: Sequence[int]
    num_asked: int
    num_accepted: int = 0

    def compare(self, tokens: Sequence[int]) -> Comparison | None:
        """What the request's `tokens` so far tell that is new; None: nothing.

        Example: drafts 5 6 7. After the token 5: one accepted, of which none before; after 5 8: one accepted, one
        before, and rejected.
        """
        before = number = self.num_accepted
        is_rejected = False
        known = tokens[self.start + before : self.start + len(self.drafts)]
        for token in known:
            is_rejected = token != self.drafts[number]
            if is_rejected:
                break
            number += 1
        self.num_accepted = number
        return Comparison(self.num_asked, len(self.drafts), before, number, is_rejected) if known else None


def compare_all(shadows: Sequence[Shadow], tokens: Sequence[int]) -> tuple[list[Comparison], list[Shadow]]:
    """What a request's `tokens` so far tell of its shadow drafts that is new, and those of which more is to come."""
    found, still_open = [], []
    for shadow in shadows:
        comparison = shadow.compare(tokens)
        if comparison is not None:
            found.append(comparison)
        if comparison is None or not comparison.is_last:
            still_open.append(shadow)
    return found, still_open
