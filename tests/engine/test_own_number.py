"""`OwnNumber`: the number of drafts of a request alone follows the drafts that were accepted lately."""

from __future__ import annotations

import math
import random

import pytest

from draftproof.engine.acceptance import Acceptance, RequestClass
from draftproof.engine.costs import Curve, StepCosts
from draftproof.engine.draft_choice import WORTH_GOING_ON, Chooser
from draftproof.engine.own_number import LEFT, OwnNumber
from draftproof.engine.persistence import Persistence

LEVELS = (0, 1, 2, 3, 5)
CONTEXT = 100


def chooser(rate: float, each: float = 0.15, falling: float = 1.0) -> Chooser:
    """A drafter of which each draft is accepted at this rate and takes `each` plain steps. `falling`: how many times as
    likely each next draft is."""
    costs = StepCosts(LEVELS, target=Curve({1: 1.0, 6: 1.0}))
    for level in LEVELS[1:]:
        costs.draft.set(1, level, each * level)
    acceptance = Acceptance(LEVELS[-1], rate, prior_weight=1e9)
    if falling != 1.0:
        acceptance.accepted.prior_weight = 1e-9
        for place in range(LEVELS[-1]):
            acceptance.accepted._trials[place] = 1e6
            acceptance.accepted._hits[place] = 1e6 * rate * falling**place
    return Chooser(costs, acceptance)


def own(
    rate: float, each: float = 0.15, most_lost: float = math.inf, odds: int = 0, falling: float = 1.0
) -> OwnNumber:
    its = chooser(rate, each, falling)
    choice = its.best({RequestClass(odds): 1}, context=CONTEXT, worth=0.0)
    assert choice.num_drafts
    return OwnNumber(its, choice, Persistence(), CONTEXT, most_lost, WORTH_GOING_ON)


def best_for(rate: float, each: float = 0.15) -> int:
    """By brute force."""
    speeds = {k: (1 + sum(rate**j for j in range(1, k + 1))) / (1 + each * k) for k in LEVELS[1:]}
    return max(speeds, key=speeds.__getitem__)


@pytest.mark.parametrize("rate", [0.5, 0.65, 0.8, 0.9])
def test_as_expected_it_is_the_best_number(rate: float) -> None:
    """As many hits and misses as are expected change nothing; a tenth of later tokens is not counted on."""
    its = own(rate)
    ((_, most),) = its.choice.num_drafts.items()
    its._hits = its._expected = 10 * rate / LEFT
    its._seen = 10 / LEFT
    assert its.after(most, most) in (most, best_for(rate))


@pytest.mark.parametrize("number", LEVELS[1:])
def test_what_is_expected_of_a_round_depends_on_how_far_it_looks(number: int) -> None:
    """First drafts are likelier than later ones, and a request that has few is no better for that."""
    its, rng, found = own(0.8, falling=0.85), random.Random(0), []
    for _ in range(4000):
        hits = 0
        while hits < number and rng.random() < 0.8 * 0.85**hits:
            hits += 1
        its.after(number, hits)
        found.append(its._shift)
    assert abs(sum(found) / len(found)) < 0.01


def test_it_follows_what_is_accepted_up_and_down() -> None:
    its = own(0.7)
    first = its.after(3, 2)
    up = [its.after(5, 5) for _ in range(20)]
    down = [its.after(number, 0) for number in [5] * 40]
    assert up[-1] == 5 > first and sorted(up) == up
    assert down[-1] in (0, 1) and sorted(down, reverse=True) == down and down[0] > 1, "one miss is no proof"
    assert [its.after(5, 5) for _ in range(30)][-1] == 5, "what is long past is forgotten"


def test_drafts_that_no_longer_pay_are_told() -> None:
    """Where plain decoding would be faster, by more than is put up with: here a draft takes half a step, and of the
    last ten none was accepted."""
    its, cheap = own(0.7, each=0.5), own(0.7, each=0.05)
    numbers = [its.after(3, 0) for _ in range(30)]
    assert numbers[0] and not numbers[-1] and its.is_worse
    assert all(cheap.after(3, 0) for _ in range(30)) and cheap.is_worse


def test_no_step_is_longer_than_the_savings_allow() -> None:
    its = own(0.7, most_lost=0.15 * 3 + 1e-9)
    numbers = {its.after(3, 3) for _ in range(30)}
    assert max(numbers) == 3
    assert its.worst == pytest.approx(0.45), "and what a step may lose is known"
    free = own(0.7)
    before = free.worst
    assert max(free.after(3, 3) for _ in range(30)) == 5
    assert free.worst == pytest.approx(0.75) and before < 0.7


def test_another_request_begins_anew() -> None:
    its = own(0.7)
    first = its.after(3, 0)
    for _ in range(20):
        its.after(3, 0)
    assert its.is_worse
    its.restart()
    assert not its.is_worse
    assert its.after(3, 0) == first


def test_it_begins_at_the_odds_of_the_request() -> None:
    worse, better = own(0.7, odds=-2), own(0.7, odds=2)
    assert worse.after(1, 1) < better.after(1, 1)
    assert worse._hits_of[1] < 0.7 < better._hits_of[1]


def speed(its: OwnNumber | None, rates: list[float], number: int = 2) -> float:
    """Tokens for each plain step, with a rate of acceptance for each token of an output."""
    rng, num_tokens, taken = random.Random(0), 0, 0.0
    while num_tokens < len(rates):
        hits, rate = 0, rates[num_tokens]
        while hits < number and rng.random() < rate:
            hits += 1
        num_tokens += 1 + hits
        taken += 1 + 0.15 * number
        if its is not None:
            number = its.after(number, hits) or 1
    return num_tokens / taken


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8, 0.9])
def test_where_all_drafts_are_as_likely_it_follows_no_chance(rate: float) -> None:
    its, rates = own(rate), [rate] * 8000
    speed(its, rates)
    assert its.persistence.slope < 0.3
    assert speed(its, rates) > 0.99 * speed(None, rates, best_for(rate))


def test_what_the_class_knows_of_a_request_is_no_persistence() -> None:
    """Requests at 0.85 and at 0.5, each in a class of its own."""
    together = Persistence()
    for rate, odds in [(0.85, 3), (0.5, -3)]:
        its = own(0.7, odds=odds)
        its.persistence = together
        chance = its.chooser.acceptance.chances(odds)[0]
        assert chance == pytest.approx(rate, abs=0.06)
        speed(its, [chance] * 8000)
    assert together.slope < 0.4


def test_where_acceptance_persists_it_gains_over_each_fixed_number() -> None:
    """A hundred tokens at 0.9, and a hundred at 0.3."""
    rates, its = ([0.9] * 100 + [0.3] * 100) * 40, own(0.6)
    speed(its, rates)
    assert its.persistence.slope > 0.8
    assert speed(its, rates) > 1.03 * max(speed(None, rates, number) for number in LEVELS[1:])
