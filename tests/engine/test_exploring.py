"""Trials of a drafter that rests."""

from __future__ import annotations

import pytest

from draftproof.engine.acceptance import HOPED, Acceptance, AcceptanceRecord
from draftproof.engine.auto_policy import DOUBTED_LOSS, MOST_DECODING, WORTH_SHOWING, AutoPolicy
from draftproof.engine.costs import StepOutcome
from draftproof.engine.draft_choice import WORTH_GOING_ON, WORTH_IT
from draftproof.engine.exploring import DEARER, DEAREST, Exploring
from draftproof.engine.ledger import ALLOWANCE
from draftproof.engine.opening import SHORT
from draftproof.engine.progress import Progress
from tests.engine.test_policy import policy
from tests.engine.test_scheduler import request

LENGTH = 80  # tokens of an output
ENOUGH = ALLOWANCE + 20.0


def resting(speedup: float = 0.98, *, savings: float = ENOUGH, price: float = 0.0) -> AutoPolicy:
    """A policy for steps of which one with a draft for each request seems to gain `speedup`, and showing the drafter a
    prompt of one request takes `price` plain steps."""
    its = policy(0.5, row=0.0, step=1.5 / speedup - 1.0, levels=(0, 1))
    its.savings, its.costs.prompt_row_seconds = savings, price / 20
    return its


def new_requests(num_requests: int, first: int = 0, length: int = LENGTH) -> list[Progress]:
    return [request(20, first + number, limit=20 + length) for number in range(num_requests)]


def show(its: AutoPolicy, requests: list[Progress], num_decoding: int = 0) -> list[bool]:
    num_others = len(requests) - 1 + num_decoding
    return [its.will_draft(one, num_others, num_decoding=num_decoding) for one in requests]


def know(its: AutoPolicy, num_rounds: int = 200) -> None:
    """Let the policy count rounds of another request, every other of which had its draft accepted."""
    other = AcceptanceRecord()
    for number in range(num_rounds):
        its.acceptance.count(other, 1, number % 2)


def test_a_drafter_that_seems_to_lose_a_little_is_tried_once_enough_is_saved() -> None:
    for speedup, price in ((0.98, 0.0), (0.98, 3.0), (1.02, 3.0)):
        lost = price + max(0.0, LENGTH * (1.0 / speedup - 1.0)) + DOUBTED_LOSS * LENGTH
        its = resting(speedup, savings=ALLOWANCE + lost - 0.01, price=price)
        assert show(its, new_requests(1)) == [False]
        its, one = resting(speedup, savings=ALLOWANCE + lost + 0.01, price=price), new_requests(1)
        assert show(its, one) == [True]
        assert its.choose(one, 0) == [1]


def test_a_drafter_is_tried_only_if_drafts_as_good_as_may_be_hoped_would_pay() -> None:
    """One that is right at 0.5, as far as is known, may be right at 0.8: that would gain 1.2 times as much."""
    for speedup, expected in ((1.05 / 1.2, True), (1.01 / 1.2, False)):
        its, one = resting(speedup), new_requests(1)
        assert show(its, one) == [expected]
        assert its.choose(one, 0) == [int(expected)]


@pytest.mark.parametrize("share", [0.95, 1.05])
def test_what_may_be_hoped_for_must_pay_for_the_prompt(share: float) -> None:
    """`share`: of the price, in what may be hoped for. Also of a drafter that is known to gain a little each step."""
    for speedup in (0.98, 1.04):
        hoped = LENGTH * (1.0 - 1.0 / (1.2 * speedup))
        its = resting(speedup, price=hoped / WORTH_SHOWING / share)
        assert show(its, new_requests(1)) == [share > 1.0]


def test_hope_gives_way_to_what_is_counted() -> None:
    known = Acceptance(8, prior_weight=10.0)
    hopes = [known.hope]
    for number in range(100):
        known.count(AcceptanceRecord(), 1, number % 2)
        hopes.append(known.hope)
    assert hopes[0] == HOPED and hopes[10] == HOPED / 2 and hopes[-1] == 0
    assert hopes == sorted(hopes, reverse=True)


@pytest.mark.parametrize("price", [0.0, 3.0])
@pytest.mark.parametrize("why", ["known", "lookup", "short", "saved"])
def test_there_is_no_trial(why: str, price: float) -> None:
    """Where nothing is left to find out, or it would be dear. With a `price` each step seems to gain 2 %."""
    its = resting(1.02 if price else 0.98, price=price)
    assert show(resting(1.02 if price else 0.98, price=price), new_requests(1)) == [True]
    if why == "known":
        know(its)
    elif why == "saved":
        its.savings = ALLOWANCE
    its.is_lookup = why == "lookup"
    length = SHORT if why == "short" else LENGTH
    assert show(its, new_requests(1, length=length)) == [False] and not its._exploring.is_running


def test_all_of_a_wave_take_part_though_the_savings_are_gone_with_its_first_prompts() -> None:
    its, wave = resting(price=0.1), new_requests(8)
    for one in wave:
        assert its.will_draft(one, 7)
        its.prompted(20, 2.5 * its.costs.plain(8))
    assert its.savings == ALLOWANCE
    assert all(show(its, wave)), "a prompt may be computed in several steps"
    assert its.choose(wave, 0) == [1] * 8
    assert show(its, new_requests(1, first=8)) == [False]


def test_only_requests_that_were_there_join_and_who_decodes_takes_no_place() -> None:
    """Ten will decode together, two do so already."""
    its, wave = resting(), new_requests(8)
    assert MOST_DECODING * 10 >= 2 and show(its, wave[:1], num_decoding=9) == [False]
    assert its.will_draft(wave[0], 9, num_decoding=2)
    know(its)  # nobody begins another trial
    late = new_requests(1, first=8)[0]
    assert not its.will_draft(late, 9, num_decoding=2), "though some of the others have not joined"
    assert [its.will_draft(one, 9, num_decoding=2) for one in wave] == [True] * 8


def test_prompts_of_a_trial_take_no_more_than_was_saved() -> None:
    its = Exploring()
    its.begin(4, 0, 3.0, 5.0, 28.0)
    records = [AcceptanceRecord() for _ in range(4)]
    assert [its.join(record, 0, 2.0) for record in records] == [True, True, False, False]
    assert its.join(records[2], 0, 1.0) and [its.is_tried(record) for record in records] == [True] * 3 + [
        False
    ]


@pytest.mark.parametrize("num_left", [1, 3])
def test_a_trial_ends_when_its_drafts_lose(num_left: int) -> None:
    """Not because of a few that decode before the others."""
    its, wave = resting(), new_requests(4)
    assert show(its, wave) == [True] * 4
    wave = wave[:num_left]
    assert its.choose(wave, 0) == [1] * num_left
    for _ in range(60):
        for one in wave:
            its.verified(one, 1, 0)
        its.finished(
            StepOutcome(num_left, 2 * num_left, 1, num_left, 0, its.costs.step(num_left, 2 * num_left, 1))
        )
    for _ in range(100):
        chosen = its.choose(wave, 0)
    assert chosen == [0] * num_left
    assert its._exploring.is_running == (num_left == 1)
    assert its._exploring.is_tried(wave[0].records[0]) == (num_left == 1)


def test_what_was_shown_goes_on_until_it_seems_to_lose() -> None:
    """While there is hope steps may lose a little; then nothing, though beginning would not be worth it."""
    its, wave = resting(), new_requests(2)
    its.savings = ALLOWANCE + 4.0
    assert its._least_speedup(wave, 0, 0, 2) == WORTH_GOING_ON
    know(its)
    assert its.acceptance.hope == 0
    assert its._least_speedup(wave, 0, 0, 2) == 1.0 < WORTH_IT == its._least_speedup(wave, 0, 0, 1)


def test_trials_become_rarer_until_drafts_pay_without_one() -> None:
    its = Exploring()
    for times in (1.0, DEARER, DEARER**2, DEAREST, DEAREST):
        its.begin(1, 0, 2.0, 2.0 * times - 0.01, 28.0)
        assert not its.is_running and not its.join(AcceptanceRecord(), 0, 0.0)
        its.begin(1, 0, 2.0, 2.0 * times, 28.0)
        record = AcceptanceRecord()
        assert its.join(record, 0, 0.0) and its.is_tried(record)
        assert not its.join(AcceptanceRecord(), 0, 0.0)
        its.end()
        assert not its.is_tried(record)
    its.end(pays=True)
    its.begin(2, 0, 2.0, 2.0, 28.0)
    assert its.join(AcceptanceRecord(), 1, 0.0)
    its.begin(1, 2, 2.0, 3.9, 28.0)
    assert not its.is_running, "the one before came to nothing"


def test_a_trial_that_loses_less_than_can_be_saved_is_made_again_some_day() -> None:
    for to_lose, expected in ((20.0, True), (28.0, True), (28.1, False)):
        its = Exploring(_times=DEAREST)
        its.begin(1, 0, to_lose, 28.0, 28.0)
        assert its.is_running == expected


def test_what_pays_needs_no_trial_and_ends_one() -> None:
    its = resting(1.3)
    its._exploring = Exploring(is_running=True, _number=1, _num_left=2, _times=DEAREST)
    assert show(its, new_requests(1)) == [True]
    assert not its._exploring.is_running and its._exploring._times == 1.0


def test_who_is_computed_again_after_a_trial_is_a_request_like_others() -> None:
    its, wave = resting(), new_requests(1)
    assert show(its, wave) == [True]
    its._exploring.end()
    know(its)
    assert show(its, wave) == [False]
