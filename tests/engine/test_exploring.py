"""Trials of a drafter that rests."""

from __future__ import annotations

import pytest

from draftproof.engine.acceptance import HOPED, Acceptance, AcceptanceRecord
from draftproof.engine.auto_policy import ALLOWANCE, DOUBTED_LOSS, MOST_UNDRAFTED, AutoPolicy
from draftproof.engine.costs import StepOutcome
from draftproof.engine.exploring import DEARER, DEAREST, Exploring
from draftproof.engine.progress import Progress
from tests.engine.test_policy import policy
from tests.engine.test_scheduler import request

LENGTH = 80  # tokens of an output
ENOUGH = ALLOWANCE + 20.0


def resting(speedup: float = 0.98, *, savings: float = ENOUGH, price: float = 0.0) -> AutoPolicy:
    """A policy for steps of which one with a draft for each request seems to gain `speedup`, and showing the drafter a
    prompt takes `price` plain steps."""
    its = policy(0.5, row=0.0, step=1.5 / speedup - 1.0, levels=(0, 1))
    its.savings, its.costs.prompt_row_seconds = savings, price / 20
    return its


def new_requests(num_requests: int, first: int = 0) -> list[Progress]:
    return [request(20, first + number, limit=20 + LENGTH) for number in range(num_requests)]


def show(its: AutoPolicy, requests: list[Progress], num_undrafted: int = 0) -> list[bool]:
    num_others = len(requests) - 1 + num_undrafted
    return [its.will_draft(one, num_others, num_undrafted=num_undrafted) for one in requests]


def test_a_drafter_that_seems_to_lose_a_little_is_tried_once_enough_is_saved() -> None:
    for speedup, price in ((0.98, 0.0), (0.98, 3.0), (1.02, 3.0)):
        lost = max(price, price + LENGTH * (1.0 / speedup - 1.0)) + DOUBTED_LOSS * LENGTH
        assert show(resting(speedup, savings=ALLOWANCE + lost - 0.01, price=price), new_requests(1)) == [
            False
        ]
        its, one = resting(speedup, savings=ALLOWANCE + lost + 0.01, price=price), new_requests(1)
        assert show(its, one) == [True]
        assert its.choose(one, 0) == [1]


def test_a_drafter_is_tried_only_if_drafts_as_good_as_may_be_hoped_would_pay() -> None:
    """One that is right at 0.5, as far as is known, may be right at 0.8: that would gain 1.2 times as much."""
    for speedup, expected in ((1.05 / 1.2, True), (1.01 / 1.2, False)):
        its, one = resting(speedup), new_requests(1)
        assert show(its, one) == [expected]
        assert its.choose(one, 0) == [int(expected)]


def test_hope_gives_way_to_what_is_counted() -> None:
    known = Acceptance(8, prior_weight=10.0)
    its_class = known.unknown
    hoped = [known.hoped(its_class).odds]
    for number in range(100):
        known.count(AcceptanceRecord(), 1, number % 2)
        hoped.append(known.hoped(its_class).odds)
    assert hoped[0] == HOPED and hoped[10] == HOPED / 2 and hoped[-1] == 0
    assert hoped == sorted(hoped, reverse=True)


def test_a_prompt_that_seems_not_to_pay_is_shown_once_enough_is_saved() -> None:
    """The drafts of each step gain 10 %, so 7.3 plain steps in all: less than `WORTH_SHOWING` times the price."""
    for savings, expected in ((ALLOWANCE + 6.5 + DOUBTED_LOSS * LENGTH, False), (ENOUGH, True)):
        assert show(resting(1.1, savings=savings, price=6.6), new_requests(1)) == [expected]


def test_all_of_a_wave_take_part_though_the_savings_are_gone_with_its_first_prompts() -> None:
    its, wave = resting(price=0.5), new_requests(8)
    for number, one in enumerate(wave):
        assert its.will_draft(one, 7)
        its.prompted(20, 2.5 * its.costs.plain(8))
        assert its._exploring.num_left == 7 - number
    assert its.savings == ALLOWANCE
    assert all(show(its, wave)), "a prompt may be computed in several steps"
    assert its.choose(wave, 0) == [1] * 8
    assert show(its, new_requests(1, first=8)) == [False]


def test_a_trial_ends_when_its_drafts_lose() -> None:
    its, wave = resting(), new_requests(4)
    assert all(its.will_draft(one, 3) for one in wave[:3])
    assert its.choose(wave[:3], 0) == [1] * 3
    for _ in range(30):
        for one in wave[:3]:
            its.verified(one, 1, 0)
        its.finished(StepOutcome(3, 6, 1, 3, 0, its.costs.step(3, 6, 1)))
    while any(its.choose(wave[:3], 0)):
        pass
    assert not its._exploring.num_left and not its.will_draft(wave[3], 3)


@pytest.mark.parametrize("why", ["undrafted", "known", "lookup"])
def test_there_is_no_trial(why: str) -> None:
    """Not where most decode without the drafter, nor while it is well known, nor of what needs no prompts."""
    its, wave = resting(), new_requests(4)
    if why == "undrafted":
        assert show(its, wave, num_undrafted=2) == [False] * 4
        assert MOST_UNDRAFTED * 5 >= 1
        assert show(its, wave, num_undrafted=1) == [True] * 4
        return
    if why == "known":
        for number in range(200):
            its.acceptance.count(AcceptanceRecord(), 1, number % 2)
    its.is_lookup = why == "lookup"
    assert show(its, wave) == [False] * 4


def test_trials_become_rarer_until_drafts_pay_without_one() -> None:
    its = Exploring()
    for times in (1.0, DEARER, DEARER**2, DEAREST, DEAREST):
        its.begin(1, 2.0, 2.0 * times - 0.01, 28.0)
        assert not its.join(AcceptanceRecord())
        its.begin(1, 2.0, 2.0 * times, 28.0)
        record = AcceptanceRecord()
        assert its.join(record) and its.join(record) and not its.join(AcceptanceRecord())
    its.end(pays=True)
    its.begin(2, 2.0, 2.0, 28.0)
    assert its.join(AcceptanceRecord())
    its.end()
    assert not its.join(AcceptanceRecord())


def test_a_trial_that_loses_less_than_can_be_saved_is_made_again_some_day() -> None:
    for to_lose, expected in ((20.0, True), (28.0, True), (28.1, False)):
        its = Exploring(_times=DEAREST)
        its.begin(1, to_lose, 28.0, 28.0)
        assert its.join(AcceptanceRecord()) == expected


def test_what_pays_needs_no_trial() -> None:
    its = resting(1.3)
    its._exploring._times = DEAREST
    assert show(its, new_requests(1)) == [True] and not its._exploring.num_left
    assert its._exploring._times == 1.0
