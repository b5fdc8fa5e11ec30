"""`Pace` separates the machine's pace from errors of the profile. No clock."""

from __future__ import annotations

import math
import random

import pytest

from draftproof.engine.pace import LEAST_NOISE, SURPRISE, UNKNOWN_PACE, Pace

PLAIN, DRAFTING, OTHER = 0, 1, 2


def fed(pace: Pace, num_rounds: int, times: dict[int, float], noise: float = 0.0, seed: int = 0) -> Pace:
    """`pace` after `num_rounds` rounds of one step of each kind. `times`: kind -> time relative to the profile."""
    rng = random.Random(seed)
    for _ in range(num_rounds):
        for kind, factor in times.items():
            pace.observe(kind, math.log(factor) + rng.gauss(0.0, noise))
    return pace


def test_a_slow_machine_slows_every_kind_alike() -> None:
    pace = fed(Pace(), 20, {PLAIN: 1.5})
    assert math.exp(pace.at(PLAIN)) == pytest.approx(1.5, rel=0.02)
    assert pace.at(DRAFTING) == pace.at(PLAIN), "nothing is known of them but the profile"
    fed(pace, 20, {DRAFTING: 1.5})
    assert pace.at(DRAFTING) - pace.at(PLAIN) == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_fault_of_the_profile_is_told_from_the_pace(noise: float) -> None:
    pace = fed(Pace(), 400, {PLAIN: 1.3, DRAFTING: 1.3 * 1.25, OTHER: 1.3 * 0.9}, noise)
    found = [pace.at(kind) - pace.at(PLAIN) for kind in (DRAFTING, OTHER)]
    assert found == pytest.approx([math.log(1.25), math.log(0.9)], abs=0.02 + 0.3 * noise)


def test_a_machine_that_becomes_busy_changes_no_correction() -> None:
    """While it is busy only drafting steps run."""
    pace = fed(Pace(), 200, {PLAIN: 1.0, DRAFTING: 1.1})
    known = pace.at(DRAFTING) - pace.at(PLAIN)
    fed(pace, 100, {DRAFTING: 2.2})
    assert math.exp(pace.at(DRAFTING)) == pytest.approx(2.2, rel=0.03)
    assert pace.at(DRAFTING) - pace.at(PLAIN) == pytest.approx(known, abs=0.1)


def test_how_noisy_steps_are_is_found_out() -> None:
    quiet, busy = (fed(Pace(), 300, {PLAIN: 1.0}, noise) for noise in (0.0, 0.4))
    assert quiet.noise == pytest.approx(LEAST_NOISE**2, rel=0.1)
    assert 0.25 < math.sqrt(busy.noise) < 0.45
    moved = []
    for pace in (quiet, busy):
        before = pace.at(PLAIN)
        pace.observe(PLAIN, before + 0.3)
        moved.append(pace.at(PLAIN) - before)
    assert moved[1] < 0.04 < moved[0], "what is usual says little"


def test_one_wild_step_says_no_more_than_a_surprising_one() -> None:
    wild, surprising = (fed(Pace(), 100, {PLAIN: 1.0}, 0.1) for _ in range(2))
    wild.observe(PLAIN, math.log(1e6))
    surprising.observe(PLAIN, surprising.at(PLAIN) + SURPRISE)
    assert wild.at(PLAIN) == pytest.approx(surprising.at(PLAIN)) and wild.at(PLAIN) < 0.1


def test_a_correction_of_steps_that_are_not_met_fades() -> None:
    pace = fed(Pace(), 100, {PLAIN: 1.0, DRAFTING: 1.5})
    before = pace.at(DRAFTING)
    fed(pace, 400, {PLAIN: 1.0})
    assert before > 0.35 and abs(pace.at(DRAFTING)) < 0.05
    fed(pace, 10, {DRAFTING: 1.5})
    assert pace.at(DRAFTING) > 0.2, "and is soon learnt again"


@pytest.mark.parametrize("unknown", [0.02, 0.2])
def test_what_is_known_of_a_kind_beforehand_is_known_after_a_rest_as_well(unknown: float) -> None:
    pace = Pace()
    pace.observe(DRAFTING, 0.0, unknown=unknown)
    fed(pace, 500, {PLAIN: 1.0})
    place = pace._places[DRAFTING]
    assert math.sqrt(pace.covariances[place][place]) == pytest.approx(unknown, rel=0.02)
    pace.observe(DRAFTING, 0.1, unknown=unknown)
    assert (pace.at(DRAFTING) > 0.08) == (unknown == 0.2)


def test_a_kind_that_comes_by_chance_makes_no_other_seem_slow() -> None:
    """Steps for which a lookup has no drafts, one in twenty, between steps of many rows that slow them."""
    found = []
    for is_alternative in (False, True):
        pace = fed(Pace(), 20, {PLAIN: 1.0, DRAFTING: 1.0})
        for number in range(400):
            kind, times = (DRAFTING, 1.0) if number % 20 else (OTHER, 1.4)
            pace.observe(kind, math.log(times), is_alternative=is_alternative)
        found.append(pace.at(PLAIN))
    assert abs(found[0]) < 0.02 and found[1] > 0.06, "as it would where they were chosen"


def test_a_successor_begins_at_the_machine_s_pace() -> None:
    pace = fed(Pace(), 50, {PLAIN: 2.0, DRAFTING: 3.0})
    after = pace.successor()
    assert after.at(PLAIN) == after.at(DRAFTING) == pace.at(PLAIN)
    after.observe(PLAIN, math.log(2.6))
    assert after.at(PLAIN) > math.log(2.4), "other sizes were measured for themselves"
    assert Pace().covariances == [[UNKNOWN_PACE**2]]


def test_steps_may_grow_more_with_their_rows_than_the_profile_says() -> None:
    pace, rng = Pace(), random.Random(0)
    for _ in range(300):
        pace.observe(PLAIN, rng.gauss(0.0, 0.03))
        doublings = rng.choice([1.0, 2.0, 3.0])
        pace.observe(DRAFTING, 0.1 + 0.15 * doublings + rng.gauss(0.0, 0.03), doublings)
    found = [pace.at(DRAFTING, doublings) - pace.at(PLAIN) for doublings in (1.0, 2.0, 3.0)]
    assert found == pytest.approx([0.25, 0.4, 0.55], abs=0.04)
    assert pace.at(DRAFTING, 4.0) - pace.at(PLAIN) == pytest.approx(0.7, abs=0.06), "not met yet"
    fed(pace, 500, {PLAIN: 1.0})
    assert pace.at(DRAFTING, 3.0) - pace.at(PLAIN) == pytest.approx(0.0, abs=0.02), "it is tried again"
