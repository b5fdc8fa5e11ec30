from __future__ import annotations

import random

import pytest

from draftproof.engine.policy import FIRST_PROBES, AdaptivePolicy, Costs, FixedPolicy
from tests.engine.test_scheduler import request


def settled(rate: float, row: float, step: float, base: float = 1.0, k: int = 8) -> int:
    """The number chosen for one sequence once costs and acceptance are known."""
    rng = random.Random(0)
    policy, s = AdaptivePolicy(k), request(4)
    for _ in range(300):
        (chosen,) = policy.choose([s])
        accepted = 0
        while accepted < chosen and rng.random() < rate:
            accepted += 1
        if chosen:
            policy.verified(s, chosen, accepted)
        policy.timed(1 + chosen, chosen, base + row * (1 + chosen), step * chosen)
    s.accept_rate = rate
    counts = [policy.choose([s])[0] for _ in range(23)]
    return max(set(counts), key=counts.count)


def test_good_and_cheap_drafts_are_asked_for_in_full() -> None:
    assert settled(0.95, row=0.005, step=0.01) == 8


def test_useless_drafts_are_not_asked_for() -> None:
    assert settled(0.02, row=0.05, step=0.1) == 0


def test_expensive_drafts_are_asked_for_sparingly() -> None:
    cheap, dear = settled(0.7, row=0.01, step=0.02), settled(0.7, row=0.05, step=0.25)
    assert 0 < dear < cheap


def test_free_drafts_are_always_worth_it() -> None:
    assert settled(0.3, row=0.0, step=0.0) == 8


def test_a_sequence_switched_off_is_probed_again() -> None:
    policy, s = AdaptivePolicy(4), request(4)
    for _ in range(50):
        policy.timed(1, 0, 1.0, 0.0)
        policy.timed(5, 4, 3.0, 2.0)
    s.accept_rate = 0.01
    chosen = [policy.choose([s])[0] for _ in range(FIRST_PROBES + 96)][FIRST_PROBES:]
    assert chosen.count(0) >= 90 and 2 <= sum(k > 0 for k in chosen) <= 4


def test_each_sequence_gets_its_own_number() -> None:
    policy, good, bad = AdaptivePolicy(4), request(4), request(4, 1)
    for rows in (2, 4, 6, 10) * 20:
        policy.timed(rows, 2, 1.0 + 0.05 * rows, 0.05)
    good.accept_rate, bad.accept_rate = 0.95, 0.02
    for _ in range(FIRST_PROBES):
        policy.choose([good, bad])
    k_good, k_bad = policy.choose([good, bad])
    assert k_good > k_bad == 0


def test_a_fixed_policy_is_fixed() -> None:
    assert FixedPolicy(3).choose([request(4), request(4, 1)]) == [3, 3]


def test_costs_recover_offset_and_slope_and_shrug_off_slow_runs() -> None:
    costs = Costs()
    for x in (1, 2, 6):
        costs.add(x, 1000.0)  # the first run
    for _ in range(40):
        for x in (1, 2, 6):
            costs.add(x, 3 + 0.5 * x)
    costs.add(6, 1000.0)
    costs.add(6, 6.0)
    assert costs.at(2) == pytest.approx(4, rel=0.01)
    for _ in range(8):
        costs.add(6, 6.0)
    assert costs.at(4) == pytest.approx(5, rel=0.1) and costs.slope == pytest.approx(0.5, rel=0.15)
