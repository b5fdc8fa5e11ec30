"""The number of drafts of a request that decodes alone, from round to round while a choice for it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from draftproof.engine.acceptance import ODDS_STEP
from draftproof.engine.draft_choice import WORTH_GOING_ON, Chooser, DraftChoice

LEFT = 0.9  # weight that earlier rounds keep with each new one
WEIGHT = 9.0  # of what the choice expects of a draft that is looked at, in drafts
LEAST_RATE = 0.01  # share of accepted drafts, and of rejected ones


@dataclass(slots=True)
class OwnNumber:
    """Follows the drafts that were accepted lately, as far as these tell of the next: acceptance changes along an
    output, and sooner than a choice is made again. In recordings of EAGLE-3, MTP and a draft model this gains 1.9, 1.3
    and 1.0 % over the best fixed number.

    `choice` is for one request, whose drafter always has all drafts that it is asked for. `most_seconds`: of a step
    with drafts, as long as the savings allow; `worst`: what a step loses against a plain one, in plain steps, if no
    draft is accepted: at most, with the numbers that were given so far."""

    chooser: Chooser
    choice: DraftChoice
    context: int  # tokens of the request
    most_seconds: float
    worst: float = field(init=False)
    is_worse: bool = False  # clearly fewer drafts are accepted than the choice expects: half the odds
    _odds: int = field(init=False)  # of the class that the choice was made for
    _rate: float = 0.0  # expected share of the looked-at drafts that are accepted; 0: not worked out
    _hits: float = 0.0  # drafts that were accepted, weighted
    _seen: float = 0.0  # drafts that were looked at
    _seconds: list[tuple[int, float]] = field(default_factory=list)  # (number of drafts, seconds of a step)
    _numbers: dict[int, int] = field(default_factory=dict)  # by odds, as in `RequestClass`

    def __post_init__(self) -> None:
        ((its_class, _),) = self.choice.num_drafts.items()
        self._odds, self.worst = its_class.odds, self.choice.worst

    def restart(self) -> None:
        """Forget the rounds: it is for another request of this class from now on."""
        self._hits = self._seen = 0.0
        self.is_worse = False

    def after(self, num_drafted: int, num_accepted: int) -> int:
        """The number of drafts after such a round; 0: drafts no longer pay."""
        rate = self._rate = self._rate or self._expected_rate()
        num_seen = num_accepted + (num_accepted < num_drafted)
        self._hits = LEFT * self._hits + num_accepted
        self._seen = LEFT * self._seen + num_seen
        shift = (self._hits - rate * self._seen) / (self._seen + WEIGHT)
        slope = self.chooser.acceptance.persistence.slope
        found = min(max(rate + slope * shift, LEAST_RATE), 1.0 - LEAST_RATE)
        better = found / (1.0 - found) * (1.0 - rate) / rate
        self.is_worse = better < 0.5
        odds = self._odds + round(math.log(better) / math.log(ODDS_STEP))
        number = self._numbers.get(odds)
        if number is None:
            number = self._numbers[odds] = self._best(odds)
        return number

    def _expected_rate(self) -> float:
        """By the pool's estimates, and below 1. Example: two drafts, accepted at 0.8 and 0.5: the second is looked at
        in 0.8 of the rounds, and 1.2 of 1.8 are accepted."""
        ((_, most),) = self.choice.num_drafts.items()
        survival = self.chooser.acceptance.survival(self._odds)[:most]
        num_accepted = sum(survival)
        num_seen = 1.0 + num_accepted - survival[-1]
        return min(max(num_accepted / num_seen, LEAST_RATE), 1.0 - LEAST_RATE)

    def _best(self, odds: int) -> int:
        """The number of drafts with the most tokens a second at these odds."""
        survival = self.chooser.acceptance.survival(odds)
        if not self._seconds:
            costs = self.chooser.costs
            self._seconds = [(k, costs.step(1, 1 + k, k, self.context)) for k in costs.levels_for(1)[1:]]
        best, speed, taken = 0, WORTH_GOING_ON / self.choice.plain_seconds, 0.0
        for number, seconds in self._seconds:
            found = (1.0 + sum(survival[:number])) / seconds
            if found > speed and seconds <= self.most_seconds:
                best, speed, taken = number, found, seconds
        self.worst = max(self.worst, taken / self.choice.plain_seconds - 1.0)
        return best
