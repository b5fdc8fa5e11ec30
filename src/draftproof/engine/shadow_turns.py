"""In which steps, and for whom, drafts are made to be compared with the output; see `shadows.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftproof.engine.costs import StepCosts
from draftproof.engine.kept_choice import PLAIN_EVERY

# Share of the time that making drafts may take while none are verified; less than one step in `PLAIN_EVERY` makes them.
SHADOW_SHARE = 0.01
MOST_SHADOWS = 8  # requests of a step whose drafts are compared
# Drafts of the same requests are later compared in one of so many steps. Prime to `OBSERVED_EVERY`: else all reported
# steps could have such drafts, or none.
SHADOWS_EVERY = 7


@dataclass(slots=True)
class ShadowTurns:
    """Those that draft have shadow drafts, while little is known in each step and later in some, and now and then all
    have. Few at a time, in turn."""

    costs: StepCosts
    _until_all: int = 0  # steps until requests without drafts have shadow drafts, too
    _first: list[int] = field(default_factory=lambda: [0, 0])  # whose turn it is: of those that draft, of all

    def next(self, chosen: Sequence[int], plain: Callable[[], float], *, is_known: bool) -> Sequence[int]:
        """Number of drafts to compare of each request in the next step; see `Policy.shadows`. `chosen`: drafts of each
        that are verified; `plain`: returns a plain step's seconds; `is_known`: whether enough is known to compare in
        some steps only."""
        self._until_all -= 1
        if not chosen or (self._until_all > 0 and self._until_all % SHADOWS_EVERY and is_known):
            return ()
        most, num_asked = self.costs.levels[-1], len(chosen)
        if self._until_all <= 0:
            seconds = self.costs.draft.at(min(num_asked, MOST_SHADOWS), most)
            # never in step with the reported plain steps, or these would all have shadow drafts
            self._until_all = max(PLAIN_EVERY + 1, math.ceil(seconds / (SHADOW_SHARE * plain())))
            its_turn, of_all = list(range(num_asked)), True
        else:
            its_turn, of_all = [number for number, drafts in enumerate(chosen) if drafts], False
        if len(its_turn) > MOST_SHADOWS:
            first = self._first[of_all] = (self._first[of_all] + MOST_SHADOWS) % len(its_turn)
            its_turn = [*its_turn[first:], *its_turn[:first]][:MOST_SHADOWS]
        found = [0] * num_asked
        for number in its_turn:
            found[number] = most
        return found
