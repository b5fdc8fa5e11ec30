"""`Persistence`: whether a request's acceptance so far tells of its next drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draftproof.engine.acceptance import Acceptance, AcceptanceRecord, RequestClass
from draftproof.engine.persistence import Persistence
from draftproof.engine.shadows import Comparison


def counted(rate_of: Callable[[int, int], float], num_requests: int = 40, num_rounds: int = 50) -> Acceptance:
    """After rounds of one draft each, and a choice for each request. `rate_of`: by request and round."""
    rng, its = random.Random(0), Acceptance(1)
    for request in range(num_requests):
        record = AcceptanceRecord()
        its.survival(its.class_of(record).odds)
        for number in range(num_rounds):
            is_right = rng.random() < rate_of(request, number)
            its.count_compared(record, Comparison(1, 1, 0, int(is_right), not is_right))
    return its


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_chance_does_not_persist(rate: float) -> None:
    assert Persistence().slope == 1.0
    assert counted(lambda request, number: rate).persistence.slope < 0.5


def test_requests_that_differ_persist() -> None:
    assert counted(lambda request, number: (0.3, 0.9)[request % 2]).persistence.slope > 0.9


def test_text_that_changes_persists() -> None:
    assert counted(lambda request, number: (0.3, 0.9)[number // 25 % 2]).persistence.slope > 0.6


def test_what_came_before_tells_the_opposite() -> None:
    assert counted(lambda request, number: (0.9, 0.1)[number % 2]).persistence.slope == 0.0


def test_a_request_s_class_follows_it_as_far_as_it_persists() -> None:
    lucky = AcceptanceRecord(
        hits=20.0, misses=2.0, expected_hits=13.0, expected_misses=9.0, asked=1.0, given=1.0
    )
    classes = []
    for slope in (1.0, 0.5, 0.0):
        its = Acceptance(4)
        its.persistence = Persistence(slope, 1.0)
        classes.append(its.class_of(lucky).odds)
    assert classes[0] > classes[1] > classes[2] == 0
    assert its.class_of(lucky) == RequestClass(0) and lucky.ratio == 1.0
