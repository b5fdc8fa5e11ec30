"""Acceptance: what is learnt from rounds. No engine, no clock."""

from __future__ import annotations

import random

import pytest

from draftproof.engine.acceptance import OWN_MEMORY, POOL_WEIGHT, Acceptance, AcceptanceRecord


def test_rounds_beyond_the_first_miss_were_not_observed() -> None:
    """Two positions, accepted at 0.8 and 0.3: counting drafts after a miss would lower the second estimate."""
    acceptance, record, rng = Acceptance(2), AcceptanceRecord(), random.Random(1)
    for _ in range(3000):
        first = rng.random() < 0.8
        acceptance.count(record, 2, int(first) + int(first and rng.random() < 0.3))
    assert acceptance.accepted.estimates == pytest.approx([0.8, 0.3], abs=0.08)
    assert acceptance.survival() == pytest.approx([0.8, 0.24], abs=0.08)


def test_what_is_not_known_of_a_position_is_taken_from_the_one_before() -> None:
    acceptance = Acceptance(3, expected=0.5)
    for _ in range(400):
        acceptance.count(AcceptanceRecord(), 1, 1)
    first, second, third = acceptance.accepted.estimates
    assert first > 0.97 and second == pytest.approx(first) == third


def test_a_request_differs_from_the_pool_by_its_odds() -> None:
    acceptance, good, bad = Acceptance(1), AcceptanceRecord(), AcceptanceRecord()
    assert good.odds() == 0 and acceptance.survival(0) == pytest.approx(acceptance.accepted.estimates)
    for _ in range(50):
        acceptance.count(good, 1, 1)
        acceptance.count(bad, 1, 0)
    assert good.odds() > 1 and bad.odds() < -1
    assert acceptance.survival(good.odds())[0] > 0.7 > 0.3 > acceptance.survival(bad.odds())[0]
    for _ in range(300):
        good.fade()
    assert good.odds() == 0, "what was long ago says nothing"


def test_odds_multiply_those_of_the_pool_at_each_position() -> None:
    """Odds of 3 to 2 in the pool (0.6) are 3 to 1 (0.75) for a request with twice the odds, 3 to 4 with half."""
    pool = Acceptance(2, expected=0.6)
    assert pool.survival(2) == pytest.approx([0.75, 0.75**2])
    assert pool.survival(-2) == pytest.approx([3 / 7, (3 / 7) ** 2])


def test_one_trial_moves_an_expectation_by_its_share() -> None:
    acceptance = Acceptance(1, expected=0.6)
    acceptance.count(AcceptanceRecord(), 1, 0)
    assert acceptance.accepted.estimates[0] == pytest.approx(0.6 * POOL_WEIGHT / (POOL_WEIGHT + 1))


def test_only_what_was_observed_of_a_round_is_expected() -> None:
    """A miss at the first draft says nothing about the seven after it; older rounds weigh less."""
    acceptance, record = Acceptance(8, expected=0.5), AcceptanceRecord()
    acceptance.count(record, 8, 0)
    assert record.expected_hits + record.expected_misses == 1.0 == record.misses
    acceptance.count(record, 2, 2)
    assert record.hits == 2.0 and record.misses == pytest.approx(OWN_MEMORY)
    assert record.expected_hits + record.expected_misses == pytest.approx(OWN_MEMORY + 2)


def test_an_expectation_weighs_as_much_after_many_rounds_as_before() -> None:
    """Weights grow with the rounds, and are rescaled beyond a bound."""
    acceptance = Acceptance(1, expected=0.6, memory=0.99)
    for _ in range(5000):
        acceptance.count(AcceptanceRecord(), 1, 0)
        assert 0 <= acceptance.accepted.estimates[0] <= 0.6
    num_trials = 1 / (1 - 0.99)
    expected = 0.6 * POOL_WEIGHT / (POOL_WEIGHT + num_trials)
    assert acceptance.accepted.estimates[0] == pytest.approx(expected, rel=0.02)


def test_rounds_without_drafts_say_nothing_of_how_long_drafts_are() -> None:
    acceptance, record = Acceptance(3), AcceptanceRecord()
    for _ in range(300):
        acceptance.count_given(record, 3, 0)
    assert acceptance.share < 0.1 and acceptance.longer[1] == 1.0


def rounds(given: int, accepted: int, asked: int = 4, number: int = 400) -> Acceptance:
    """Acceptance after rounds in which `accepted` of `given` drafts were right, of `asked` asked for."""
    acceptance, record = Acceptance(asked), AcceptanceRecord()
    for _ in range(number):
        acceptance.count_given(record, asked, given)
        acceptance.count(record, given, accepted)
    return acceptance


def test_drafts_that_follow_accepted_ones_are_counted_apart() -> None:
    """Three of four drafts, all right: the first two were followed, the third was not."""
    followed = rounds(3, 3).followed.estimates
    assert followed[0] == followed[1] == 1.0 and followed[2] < 0.05
    assert rounds(3, 3).survival()[2] > 0.9 > 0.05 > rounds(3, 3).survival()[3]


@pytest.mark.parametrize("given, accepted", [(3, 1), (4, 4)])
def test_a_rejected_draft_and_the_last_one_asked_for_say_nothing_of_what_follows(
    given: int, accepted: int
) -> None:
    assert rounds(given, accepted).followed.estimates == [1.0] * 4


def test_a_proposal_cut_by_the_end_of_the_output_says_nothing_of_what_follows() -> None:
    acceptance, record = Acceptance(4), AcceptanceRecord()
    for _ in range(300):
        acceptance.count_given(record, 4, 4)
        acceptance.count(record, 2, 2)
    assert acceptance.followed.estimates == [1.0] * 4
    acceptance.count_given(record, 4, 0)
    acceptance.count(record, 0, 0)
    assert acceptance.followed.estimates == [1.0] * 4


def test_what_follows_is_forgotten_in_steps_without_drafts() -> None:
    acceptance = rounds(1, 1)
    assert acceptance.followed.estimates[0] < 0.05
    for _ in range(2000):
        acceptance.fade()
    assert acceptance.followed.estimates[0] > 0.9


def test_more_rounds_but_fewer_steps_are_remembered_of_requests_that_decode_together() -> None:
    shares = {}
    for num_requests, num_rounds in ((1, 400), (64, 400), (64, 400 * 64)):
        acceptance = Acceptance(1, expected=0.6)
        acceptance.decode_together(num_requests)
        for _ in range(5000):
            acceptance.count(AcceptanceRecord(), 1, 1)
        for _ in range(num_rounds):
            acceptance.count(AcceptanceRecord(), 1, 0)
        shares[num_requests, num_rounds] = acceptance.accepted.estimates[0]
    alone = shares[1, 400]
    assert shares[64, 400] > 2 * alone, "as many rounds: less noise"
    assert shares[64, 400 * 64] < alone, "as many steps: sooner forgotten"


def test_of_fewer_rounds_that_are_counted_fewer_are_remembered() -> None:
    """One in four of 64 requests: as many as of 16, in twice as many steps as all of them."""
    few, all_of_less = Acceptance(1), Acceptance(1)
    few.decode_together(64, 4)
    all_of_less.decode_together(16)
    for number in range(500):
        for acceptance in (few, all_of_less):
            acceptance.count(AcceptanceRecord(), 1, number % 2)
    assert few.accepted.estimates == pytest.approx(all_of_less.accepted.estimates)


def test_late_drafts_of_good_requests_do_not_make_those_of_all_seem_likely() -> None:
    """Half of the requests accept each draft at 0.9, half at 0.5. Only the good ones are asked for more than one, as
    soon as they are known, so the second draft of all that had one was right at nearly 0.9."""
    rng, acceptance = random.Random(0), Acceptance(2, prior_weight=1.0)
    counted = [0.0, 0.0]
    for number in range(200):
        rate, record = (0.9, 0.5)[number % 2], AcceptanceRecord()
        for _ in range(30):
            asked = 2 if acceptance.class_of(record).odds > 0 else 1
            found = 0
            while found < asked and rng.random() < rate:
                found += 1
            acceptance.count_given(record, asked, asked)
            acceptance.count(record, asked, found)
            if asked == 2 and found:
                counted[found - 1] += 1
    assert counted[1] / sum(counted) > 0.82
    first, second = acceptance.accepted.estimates
    assert first == pytest.approx(0.7, abs=0.06) and second < 0.8


def test_all_requests_are_better_than_expected_if_their_first_drafts_are() -> None:
    acceptance = Acceptance(2, expected=0.6)
    for _ in range(8):
        record = AcceptanceRecord()
        for _ in range(5):
            acceptance.class_of(record)
            acceptance.count_given(record, 2, 2)
            acceptance.count(record, 2, 2)
    assert acceptance.accepted.estimates[0] == pytest.approx(
        (0.6 * POOL_WEIGHT + 40) / (POOL_WEIGHT + 40), abs=0.01
    )


def test_whether_there_are_drafts_is_forgotten_sooner_than_whether_they_are_right() -> None:
    acceptance, record = Acceptance(3), AcceptanceRecord()
    for number in range(300):
        is_early = number < 200
        acceptance.count_given(record, 3, 3 * is_early)
        acceptance.count(record, 3, 3 * is_early)
    assert acceptance.share < 0.75 * acceptance.survival()[0]
