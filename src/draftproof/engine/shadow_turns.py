"""In which steps, and for whom, drafts are made to be compared with the output; see `shadows.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftproof.engine.kept_choice import PLAIN_EVERY

# Share of the time that making drafts may take while none are verified. It takes more than the drafter's time: what
# runs in few steps is in no cache. Example: 0.14 ms with an n-gram of `tiny`, whose steps take 0.3, and 0.02 where each
# step makes drafts.
SHADOW_SHARE = 0.01
# Steps between two that make drafts for all, at least: never in step with the reported plain ones, or these would all
# have shadow drafts.
LEAST_APART = PLAIN_EVERY + 1
LEAST_FREQUENCY = 1 / 8  # what is known fades at least so fast, relative to the fastest
# times that drafts are made as often as they may be, once they would have gained what making them took
NUM_SOON = 4
MOST_SHADOWS = 8  # requests of a step whose drafts are compared
# Drafts of the same requests are later compared in one of so many steps. Prime to `OBSERVED_EVERY`: else all reported
# steps could have such drafts, or none.
SHADOWS_EVERY = 53
NEVER = 1 << 30  # steps
RATE = 0.1  # weight of a new step in the average of what making drafts takes
MOST_LONGER = 1.0  # a step without drafts to verify counts as longer by at most so many plain steps


@dataclass(slots=True)
class ShadowTurns:
    """Those that draft have shadow drafts, while little is known in each step and later in some, and now and then all
    have: the more often the less it takes, and soon again where they would have paid. Few at a time, in turn."""

    _longer: float = (
        0.0  # plain steps that one takes besides which makes drafts and verifies none: an average
    )
    _until_all: int = 0  # steps until requests without drafts have shadow drafts, too
    _until_some: int = 0  # steps until those that draft have
    _apart: int = LEAST_APART  # steps between the last two for all
    _num_soon: int = 0  # times that all still have shadow drafts as often as they may
    # plain steps that the drafts made for all would have gained, since they were last made
    _gained: float = 0.0
    _first: list[int] = field(default_factory=lambda: [0, 0])  # whose turn it is: of those that draft, of all

    @property
    def frequency(self) -> float:
        """How often all have shadow drafts now, relative to the most often; at least `LEAST_FREQUENCY`."""
        return max(LEAST_FREQUENCY, LEAST_APART / self._apart)

    def num_until(self, chosen: Sequence[int], most: int, *, is_known: bool) -> int:
        """Steps before the next one with shadow drafts; see `next`."""
        due = NEVER if all(chosen) else self._until_all
        if _compared(chosen, most, is_known=is_known):
            due = min(due, self._until_some if is_known else 1)
        return max(0, due - 1)

    def skip(self, num_steps: int) -> None:
        """Count steps without shadow drafts, of which nobody was asked: at most `num_until`."""
        self._until_all -= num_steps
        self._until_some -= num_steps

    def took(self, longer: float) -> None:
        """Note that a step took so many plain steps besides, which made drafts for all while none are verified."""
        self._longer += RATE * (min(longer, MOST_LONGER) - self._longer)

    def hit(self, gained: float) -> None:
        """Note that shadow drafts were right, which would have gained so many plain steps."""
        self._gained += gained
        if self._gained > self._longer:
            self._num_soon = NUM_SOON
            self._until_all = min(self._until_all, LEAST_APART)

    def next(
        self, chosen: Sequence[int], most: int, drafting: Callable[[int], float], *, is_known: bool
    ) -> Sequence[int]:
        """Number of drafts to compare of each request in the next step, `most` or none; see `Policy.shadows`. `chosen`:
        drafts of each that are verified; `drafting`: returns what making drafts for so many requests takes the drafter,
        in plain steps; `is_known`: whether enough is known to compare in some steps only."""
        self._until_all -= 1
        self._until_some -= 1
        of_all = self._until_all <= 0 and not all(chosen)
        if of_all:
            self._until_all = self._apart = self._steps_apart(len(chosen), drafting)
            self._gained = 0.0
            its_turn = list(range(len(chosen)))
        elif self._until_some <= 0 or not is_known:
            its_turn = _compared(chosen, most, is_known=is_known)
            if not its_turn:
                return ()
            self._until_some = SHADOWS_EVERY
        else:
            return ()
        if len(its_turn) > MOST_SHADOWS:
            first = self._first[of_all] = (self._first[of_all] + MOST_SHADOWS) % len(its_turn)
            its_turn = [*its_turn[first:], *its_turn[:first]][:MOST_SHADOWS]
        found = [0] * len(chosen)
        for number in its_turn:
            found[number] = most
        return found

    def _steps_apart(self, num_asked: int, drafting: Callable[[int], float]) -> int:
        """Steps until all have shadow drafts again."""
        longer = drafting(min(num_asked, MOST_SHADOWS))
        if self._num_soon:
            self._num_soon -= 1
        else:
            longer = max(longer, self._longer)
        return max(LEAST_APART, math.ceil(longer / SHADOW_SHARE) | 1)


def _compared(chosen: Sequence[int], most: int, *, is_known: bool) -> list[int]:
    """The places of those that draft whose drafts are compared. Once enough is known, verifying tells as much of those
    that get the most drafts anyway."""
    return [place for place, number in enumerate(chosen) if number and (number < most or not is_known)]
