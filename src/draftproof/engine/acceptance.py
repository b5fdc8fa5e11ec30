"""Estimates how likely drafts are to be accepted, by request and position, from recent rounds.

A round verifies a request's drafts up to the first rejected one: those before it are hits, it is a miss, and those
after it are not observed. A position's chance is conditional on acceptance of all drafts before it, so the survival of
draft j, the chance that it and all before it are accepted, is the product of the chances up to j.

Drafters that look for repeated text propose fewer drafts than asked for, and more where they are surer. So whether
there is a draft j is counted twice: over all rounds, for the rows that drafts take, and over rounds in which all drafts
before it were accepted, for the tokens that they bring.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftproof.engine.opening import Opening, Outcomes, raised
from draftproof.engine.persistence import Persistence
from draftproof.engine.shadows import Comparison

# "pool": the counts over all requests; "own": those of one request
EXPECTED = 0.6  # prior acceptance of a drafter
POOL_MEMORY = 0.995  # weight that the past keeps with each round, if one request decodes at a time
GIVEN_SOONER = 2  # how much sooner it is forgotten whether there were drafts
MOST_FULL = 200  # proposals that had all drafts which are counted afterwards, of each number
OWN_MEMORY = 0.95  # weight that a request's past keeps with each of its rounds
MOST_WEIGHT = 1e6  # weight of a new round, relative to the first, at which weights are rescaled
POOL_WEIGHT = 4.0  # weight of a prior, in trials
GOES_ON = 0.6  # prior chance that a drafter which stops where that pays makes another draft
MODEL_WEIGHT = 10.0  # see `acceptance_of`
# Odds that drafts of which nothing is known are hoped to have, relative to the prior's, as an exponent of `ODDS_STEP`:
# 0.86 where 0.6 is expected. A head may be as good.
HOPED = 4
MODEL_OPENING = 0.5  # prior odds of a model's drafts at the beginning of an output, relative to later ones
# How much such rounds count for the pool, relative to later ones: what later drafts are like is guessed by them. Where
# they are like later ones, 0.9 seemed 0.93 after a text of 64 requests.
EARLY_SHARE = 0.25
# Weight of the prior that there are drafts at all, which is certain at first. Of the hundred rounds that are remembered
# none may have any, and with 4 that would seem 0.04, for which a lookup for one request of a small model seems to pay.
SOME_WEIGHT = 1.0
OWN_WEIGHT = 9.0
# Weight that the past keeps with each `PLAIN_EVERY` steps without drafts for the pool, with each step for a request:
# estimates return to the prior, so drafting is tried again.
POOL_FADING = 0.98
OWN_FADING = 0.98
ODDS_STEP = 2**0.5  # requests whose odds differ by a smaller factor are in one class
# The same for shares of rounds with drafts. Fine where drafts are rare: a lookup costs so little that it is decided
# there whether it pays. The rarest is one round in 128.
RARITY_STEP = 2**0.25
MOST_RARE = 28


class RequestClass(NamedTuple):
    """Requests that get the same number of drafts. `odds`: their odds of acceptance relative to the pool's, as an
    exponent of `ODDS_STEP`; `rarity`: their share of rounds with drafts when asked for, as an exponent of 1 /
    `RARITY_STEP`; `opening`: what is added to `odds` at their beginning, mostly negative; `room`: drafts that their
    outputs have room for, None: for any number."""

    odds: int
    rarity: float = 0
    opening: int = 0
    room: int | None = None

    @property
    def share(self) -> float:
        """Share of rounds with drafts when asked for."""
        return RARITY_STEP**-self.rarity


def _rarity(share: float) -> float:
    return min(MOST_RARE, -math.log(share) / math.log(RARITY_STEP))


def _for_odds(chances: Sequence[float], odds: int) -> list[float]:
    """The pool's chances for a request with these odds, as in `RequestClass`."""
    ratio = ODDS_STEP**odds
    return [raised(chance, ratio) for chance in chances]


@dataclass(slots=True)
class AcceptanceRecord(Outcomes):
    """One request's recent rounds, expected by the pool's estimates, and how often the drafter was `asked` for drafts
    and had some (`given`). `last_asked`, `last_given`: the last time. `ratio`: the request's odds of acceptance
    relative to the pool's, as last estimated. `num_reports`: how often the policy's `learn` was told of its rounds.
    `trial`: number of the trial in which it takes part, see `exploring.py`."""

    asked: float = 0.0
    given: float = 0.0
    last_asked: int = 0
    last_given: int = 0
    ratio: float = 1.0
    num_reports: int = 0
    trial: int = 0

    @property
    def shift(self) -> float:
        """How many more of its drafts were accepted than the pool's estimates say, of each that was looked at."""
        return (self.hits - self.expected_hits) / (self.hits + self.misses + OWN_WEIGHT)

    def odds(self, slope: float = 1.0) -> int:
        """The request's odds of acceptance relative to the pool's, as an exponent of `ODDS_STEP`. `slope`: see
        `Persistence`."""
        return round(slope * math.log(self.relative_odds(OWN_WEIGHT)) / math.log(ODDS_STEP))

    def fade(self, num_rounds: int = 1) -> None:
        """Reduce the weight of the past by `num_rounds` rounds without drafts."""
        left = OWN_FADING**num_rounds
        self.remember(left)
        self.asked *= left
        self.given *= left


@dataclass(slots=True)
class Chances:
    """Chances of a sequence of `num` events, each conditional on those before it: counted, and shrunk towards `first`
    at the first `num_alike` positions and towards the position before at later ones.

    Old counts lose weight with time. Instead of scaling them down, new counts weigh more: `_weight`."""

    num: int
    first: float
    num_alike: int = 1
    prior_weight: float = POOL_WEIGHT  # in trials
    _hits: list[float] = field(default_factory=list)
    _trials: list[float] = field(default_factory=list)
    _weight: float = 1.0
    _known: list[float] = field(default_factory=list)
    _is_stale: bool = True

    def __post_init__(self) -> None:
        self._hits = [0.0] * self.num
        self._trials = [0.0] * self.num

    @property
    def estimates(self) -> list[float]:
        if self._is_stale:
            self._known, self._is_stale = self._shrunk(self.first), False
        return self._known

    @property
    def doubt(self) -> float:
        """Share of the prior in the estimate of the first event: 1 if nothing was counted."""
        return self.prior_weight / (self.prior_weight + self._trials[0] / self._weight)

    @property
    def least(self) -> list[float]:
        """Estimates that are shrunk towards 0: what the counts vouch for."""
        return self._shrunk(0.0)

    @property
    def last(self) -> list[float]:
        """`estimates` as last computed, without updating them: those of the last choice."""
        return self._known or self.estimates

    def _shrunk(self, first: float) -> list[float]:
        found, chance, prior = [], first, self.prior_weight * self._weight
        for position, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            if position < self.num_alike:
                chance = first
            chance = (min(max(hits, 0.0), trials) + prior * chance) / (trials + prior)
            found.append(chance)
        return found

    def count(
        self,
        num_hits: int,
        num_tried: int,
        first: int = 0,
        ratio: float = 1.0,
        opening: float = 1.0,
        share: float = 1.0,
    ) -> None:
        """Count a round: the first `num_hits` events happened, and the next did not, unless no more were tried. Events
        before `first` are counted already. `ratio`: how much higher the odds are for this request: but for the first,
        what happened counts for less by as much as that raises its chance. Late events are tried mostly where they are
        likely, and would else seem likely for all. `opening`: how much higher still they are for this round, of the
        first event, too. `share`: how much it counts, relative to other rounds."""
        weight = self._weight * share
        for position in range(first, min(num_hits + 1, num_tried, self.num)):
            self._trials[position] += weight
            if position < num_hits:
                self._hits[position] += weight
            higher = ratio * opening if position else opening
            if higher != 1.0:
                chance = self.last[position]
                self._hits[position] -= weight * (raised(chance, higher) - chance)
        self._is_stale = True

    def add(self, num_hits: int, num_tried: int) -> None:
        """Count the first event of so many rounds."""
        self._trials[0] += num_tried * self._weight
        self._hits[0] += num_hits * self._weight
        self._is_stale = True

    def forget(self, left: float) -> None:
        """Multiply the weight of all counts so far by `left`."""
        self._weight /= left
        self._is_stale = True
        if self._weight > MOST_WEIGHT:
            self._hits = [n / self._weight for n in self._hits]
            self._trials = [n / self._weight for n in self._trials]
            self._weight = 1.0


@dataclass(slots=True)
class Acceptance:
    """The pool's estimates for `num_drafts` positions: `accepted`, that a draft is accepted; `given`, that there is one
    after the one before; `followed`, that there is one after a draft that was accepted. `some`: that there are drafts
    when asked for. A request's estimates are the pool's, shifted by its `RequestClass`.

    `memory`: weight that the past keeps with each round, if one request decodes at a time.
    `prior_weight`: of `expected`, in trials. `goes_on`: prior chance that there is a draft after another.
    """

    num_drafts: int
    expected: float = EXPECTED
    memory: float = POOL_MEMORY
    prior_weight: float = POOL_WEIGHT
    goes_on: float = 1.0
    accepted: Chances = field(init=False)
    some: Chances = field(init=False)
    given: Chances = field(init=False)
    followed: Chances = field(init=False)
    persistence: Persistence = field(default_factory=Persistence)
    opening: Opening | None = None  # None: an output's first drafts are like the later ones
    _kept: float = field(init=False)  # weight that the past keeps with each round of any request
    _num_later: float = 0.0  # rounds in `accepted` that were at no output's beginning, weighted as there
    _survivals: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decode_together(1)
        self.accepted = Chances(self.num_drafts, self.expected, prior_weight=self.prior_weight)
        self.some = Chances(1, 1.0, prior_weight=SOME_WEIGHT)
        self.given = Chances(self.num_drafts, self.goes_on, num_alike=2)
        self.followed = Chances(self.num_drafts, self.goes_on)

    def decode_together(self, num_requests: int, learn_every: int = 1) -> None:
        """Remember as suits rounds of `num_requests` that decode together: the more, the more rounds, for an estimate
        with less noise, and yet fewer steps. Example: 200 of one request; 1600 of 64, those of 25 steps. If
        one in `learn_every` is counted, fewer of these and yet more steps, but as many as of one request at least.
        Example: one in four, 800 of 64, those of 50 steps."""
        self._kept = self.memory ** min(1.0, math.sqrt(learn_every / num_requests))

    @property
    def share(self) -> float:
        """Share of the rounds that had drafts when asked for; 1 at the start."""
        return self.some.estimates[0]

    @property
    def longer(self) -> list[float]:
        """The chance that a round with drafts has a first, second, ... draft."""
        return list(itertools.accumulate(self.given.estimates[1:], operator.mul, initial=1.0))

    @property
    def unknown(self) -> RequestClass:
        """The class of new requests."""
        return RequestClass(0, round(_rarity(self.share)), self._opening_odds)

    @property
    def average(self) -> RequestClass:
        """A class of its own for requests beyond their beginning, whose share of rounds with drafts is not rounded: for
        predictions."""
        return RequestClass(0, _rarity(self.share))

    @property
    def _opening_odds(self) -> int:
        return 0 if self.opening is None else self.opening.odds(ODDS_STEP)

    @property
    def _later_share(self) -> float:
        """How much of what is expected of later drafts was seen of such: the rest is the prior, and guessed by those of
        beginnings."""
        return self._num_later * self.accepted.doubt / self.prior_weight

    @property
    def hope(self) -> int:
        """How much higher the odds may be than expected, by what little is known of them: an exponent of `ODDS_STEP`.
        0 once enough is known."""
        return round(HOPED * self.accepted.doubt)

    def hoped(self, its_class: RequestClass) -> RequestClass:
        """This class with the odds that may be hoped for."""
        return its_class._replace(odds=its_class.odds + self.hope)

    def share_of(self, record: AcceptanceRecord) -> float:
        """Share of a request's rounds that have drafts when asked for."""
        return (record.given + OWN_WEIGHT * self.share) / (record.asked + OWN_WEIGHT)

    def class_of(self, record: AcceptanceRecord, *, is_early: bool = False) -> RequestClass:
        """The class of a request, by whose odds its next rounds count. `is_early`: it is at its beginning."""
        odds = record.odds(self.persistence.slope)
        record.ratio = ODDS_STEP**odds
        return RequestClass(
            odds, round(_rarity(self.share_of(record))), self._opening_odds if is_early else 0
        )

    def survival(self, odds: int = 0) -> list[float]:
        """The chance that there is a draft 1, 2, ... and survives, in a round with drafts of a request with these
        odds."""
        found = self._survivals.get(odds)
        if found is None:
            found = self._survivals[odds] = self._survival(self.chances(odds))
        return found

    def vouched(self, odds: int) -> list[float]:
        """`survival` by the counts of accepted drafts alone, without the prior: low until there are enough."""
        return self._survival(_for_odds(self.accepted.least, odds))

    def chances(self, odds: int) -> list[float]:
        """The chance that draft 1, 2, ... is accepted, if those before it were, for a request with these odds."""
        return _for_odds(self.accepted.estimates, odds)

    def _survival(self, chances: Sequence[float]) -> list[float]:
        found, alive = [], 1.0
        for chance, follows in zip(chances, self.followed.estimates, strict=True):
            alive *= chance
            found.append(alive)
            alive *= follows
        return found

    def count(
        self,
        record: AcceptanceRecord,
        num_drafted: int,
        num_accepted: int,
        *,
        is_whole: bool = False,
        is_early: bool = False,
    ) -> None:
        """Count a request's round of `num_drafted` drafts, of which the first `num_accepted` were accepted. `is_whole`:
        all were made that were asked for, which says nothing of where the drafter stops by itself; `is_early`: the
        request was at its beginning."""
        # fewer than proposed: the output's end has cut them, which says nothing of the drafter
        num_asked = num_drafted if num_drafted < record.last_given else record.last_asked
        is_rejected = num_accepted < num_drafted
        found = Comparison(num_asked, num_drafted, 0, num_accepted, is_rejected)
        self.count_compared(record, found, is_whole=is_whole, is_early=is_early)

    def count_compared(
        self, record: AcceptanceRecord, found: Comparison, *, is_whole: bool = False, is_early: bool = False
    ) -> None:
        """Count what has become of a request's drafts; those before `found.num_before` are counted already."""
        first, num_hits = found.num_before, found.num_accepted
        num_tried = num_hits + found.is_rejected
        num_seen = num_tried - first
        chances, opening, share = self.accepted.last[first:num_tried], 1.0, 1.0
        if is_early and self.opening is not None:
            opening, share = self.opening.ratio, EARLY_SHARE
            self.opening.count(num_hits - first, chances, self._later_share)
            chances = [raised(chance, opening) for chance in chances]
        num_expected = sum(chances)
        self.persistence.count(record.shift, num_hits - first - num_expected, num_seen)
        if not first:
            record.remember(OWN_MEMORY)
        record.add(num_hits - first, num_seen, num_expected)
        if not first:
            # at all positions, not only those that were reached: counts of late positions must age as well
            self.accepted.forget(self._kept)
            self._num_later = self._kept * self._num_later + (not is_early)
            if not is_whole:
                self.followed.forget(self._kept)
        self.accepted.count(num_hits, num_tried, first, record.ratio, opening, share)
        if not is_whole:
            self._count_followed(found)
        self._survivals.clear()

    def _count_followed(self, found: Comparison) -> None:
        """Count whether accepted drafts were followed by another. Example: of eight asked for, three drafts. If all
        were accepted, two were followed and the third was not; if the second was rejected, the first was followed."""
        num_accepted = found.num_accepted
        if num_accepted < found.num_drafts:
            self.followed.count(num_accepted, num_accepted, found.num_before)
        elif num_accepted:
            self.followed.count(num_accepted - 1, min(num_accepted, found.num_asked - 1), found.num_before)

    def fade(self, num_steps: float = 1.0) -> None:
        """Reduce the weight of the past by so many steps without drafts."""
        left = POOL_FADING**num_steps
        self.accepted.forget(left)
        self._num_later *= left
        self.some.forget(left)
        self.given.forget(left)
        self.followed.forget(left)
        self._survivals.clear()

    def count_full(self, num_proposals: Mapping[int, int]) -> None:
        """Count proposals before, which had all drafts that were asked for: how many, by that number of drafts."""
        for num_asked, number in num_proposals.items():
            number = min(number, MOST_FULL)
            self.some.add(number, number)
            for _ in range(number):
                self.given.count(num_asked, num_asked)

    def count_given(self, record: AcceptanceRecord, num_asked: int, num_given: int) -> None:
        """Count that the drafter was asked for `num_asked` drafts and had `num_given`."""
        self.count_some(record, 1, int(num_given > 0))
        self.count_length(record, num_asked, num_given)

    def count_length(self, record: AcceptanceRecord, num_asked: int, num_given: int) -> None:
        """Count how many drafts it had, and not whether it had some."""
        self.given.forget(self._kept**GIVEN_SOONER)
        self.given.count(num_given, num_asked)
        record.last_asked, record.last_given = num_asked, num_given

    def count_some(self, record: AcceptanceRecord, num_rounds: int, num_given: int) -> None:
        """Count rounds in which the drafter was asked for drafts, and had some in `num_given` of them."""
        self.some.forget(self._kept ** (GIVEN_SOONER * num_rounds))
        self.some.add(num_given, num_rounds)
        left = OWN_MEMORY**num_rounds
        record.asked = left * record.asked + num_rounds
        record.given = left * record.given + num_given


@dataclass(frozen=True, slots=True)
class Whole:
    """What `acceptance` says of rounds in which all drafts are made that are asked for."""

    acceptance: Acceptance

    @property
    def longer(self) -> list[float]:
        return [1.0] * self.acceptance.num_drafts

    def survival(self, odds: int = 0) -> list[float]:
        return list(itertools.accumulate(self.acceptance.chances(odds), operator.mul))

    def vouched(self, odds: int) -> list[float]:
        return list(itertools.accumulate(_for_odds(self.acceptance.accepted.least, odds), operator.mul))


def acceptance_of(num_drafts: int, *, has_kv: bool, stops: bool = False) -> Acceptance:
    """What is expected of a new drafter. With a model (`has_kv`) the prior of acceptance counts for more, and the first
    tokens of an output are harder to draft than later ones: what the first rounds show must not end drafting. Lookups
    are also learned from without verifying. `stops`: see `DraftSpec`."""
    weight = MODEL_WEIGHT if has_kv else POOL_WEIGHT
    opening = Opening(MODEL_OPENING) if has_kv else None
    return Acceptance(num_drafts, prior_weight=weight, goes_on=GOES_ON if stops else 1.0, opening=opening)
