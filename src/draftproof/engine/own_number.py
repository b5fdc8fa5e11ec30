"""The number of drafts of a request that decodes alone, from round to round while a choice for it is kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.engine.acceptance import ODDS_STEP
from draftproof.engine.draft_choice import Chooser, DraftChoice
from draftproof.engine.persistence import Persistence

LEFT = 0.9  # weight that earlier rounds keep with each new one
WEIGHT = 9.0  # of what the choice expects of a draft that is looked at, in drafts
LEAST_RATE = 0.01  # share of accepted drafts, and of rejected ones


@dataclass(slots=True)
class OwnNumber:
    """Follows the drafts that were accepted lately, as far as these tell of the next: acceptance changes along an
    output, and sooner than a choice is made again. In recordings of EAGLE-3, MTP and a draft model this gains 1.9, 1.3
    and 1.0 % over the best fixed number.

    `choice` is for one request, in steps that are not padded, whose drafter always has all drafts that it is asked for.
    `persistence`: of what such requests had more than was expected of their class. `context`: tokens of the request;
    `most_lost`: what a step with drafts may lose, in plain steps, as the savings allow; `least_speedup`: with which
    drafts go on. `worst`: what a step loses against a plain one, in plain steps, if no draft is accepted: at most, with
    the numbers that were given so far."""

    chooser: Chooser
    choice: DraftChoice
    persistence: Persistence
    context: int
    most_lost: float
    least_speedup: float
    worst: float = field(init=False)
    is_worse: bool = False  # clearly fewer drafts are accepted than the choice expects: half the odds
    # exponents as in `RequestClass`: of the request by what was accepted lately, and of the class it was chosen for
    odds: int = field(init=False)
    _class_odds: int = field(init=False)
    _hits: float = 0.0  # drafts that were accepted, weighted
    _expected: float = 0.0  # how many were expected to be, of those that were looked at
    _seen: float = 0.0  # drafts that were looked at
    _shift: float = 0.0  # by how much the share of accepted ones was higher than expected, shrunk
    _hits_of: Sequence[float] = ()  # expected number of accepted ones, by how many were looked at
    _longer: Sequence[tuple[int, float]] = ()  # (number of drafts, plain steps that a step with them takes)
    _numbers: dict[int, int] = field(default_factory=dict)  # by odds, as in `RequestClass`

    def __post_init__(self) -> None:
        ((its_class, _),) = self.choice.num_drafts.items()
        self.odds = self._class_odds = its_class.odds
        self.worst = self.choice.worst

    def renew(self, context: int, most_lost: float) -> None:
        """Go by what costs and acceptance are now known to be."""
        self.context, self.most_lost, self.worst = context, most_lost, self.choice.worst
        self._hits_of = self._longer = ()
        self._numbers.clear()

    def restart(self) -> None:
        """Forget the rounds: it is for another request of this class from now on."""
        self._hits = self._expected = self._seen = self._shift = 0.0
        self.is_worse, self.odds = False, self._class_odds

    def after(self, num_drafted: int, num_accepted: int) -> int:
        """The number of drafts after such a round; 0: drafts no longer pay."""
        num_seen = num_accepted + (num_accepted < num_drafted)
        if not self._hits_of:
            chances = self.chooser.acceptance.chances(self._class_odds)
            self._hits_of = [0.0, *itertools.accumulate(chances)]
        num_expected = self._hits_of[num_seen]
        self.persistence.count(self._shift, num_accepted - num_expected, num_seen)
        self._hits = LEFT * self._hits + num_accepted
        self._expected = LEFT * self._expected + num_expected
        self._seen = LEFT * self._seen + num_seen
        self._shift = (self._hits - self._expected) / (self._seen + WEIGHT)
        rate = _clipped(self._expected / self._seen)
        found = _clipped(rate + self.persistence.slope * self._shift)
        better = found / (1.0 - found) * (1.0 - rate) / rate
        self.is_worse = better < 0.5
        self.odds = self._class_odds + round(math.log(better) / math.log(ODDS_STEP))
        number = self._numbers.get(self.odds)
        if number is None:
            number = self._numbers[self.odds] = self._best(self.odds)
        return number

    def _best(self, odds: int) -> int:
        """The number of drafts with the most tokens a second at these odds, as the chooser counts them."""
        costs, tokens = self.chooser.costs, self.chooser.counted_on(self.chooser.tokens(1.0, odds))
        if not self._longer:
            plain, step = costs.plain(1, self.context), costs.drafting(1, self.context)
            self._longer = [(k, step(1 + k, k) / plain) for k in costs.levels[1:]]
        best, speed, lost = 0, self.least_speedup, 0.0
        for number, longer in self._longer:
            if tokens[number] > speed * longer and longer <= 1.0 + self.most_lost:
                best, speed, lost = number, tokens[number] / longer, longer - 1.0
        self.worst = max(self.worst, lost)
        return best


def _clipped(rate: float) -> float:
    return min(max(rate, LEAST_RATE), 1.0 - LEAST_RATE)
