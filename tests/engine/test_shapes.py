"""Shapes of steps, and which steps share one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from draftproof.engine.costs import rounded_rows
from draftproof.engine.interface import ScheduledRequest, StepInput
from draftproof.engine.shapes import BatchShape, Shapes

MOST = 8  # drafts


def decoding(rows: list[int], wanted: list[int], *, without_drafter: bool = False) -> StepInput:
    """A step in which each request has so many rows, all sampled, and then wants so many drafts."""
    scheduled = [
        ScheduledRequest(slot, 20, number, number, num_drafts)
        for slot, (number, num_drafts) in enumerate(zip(rows, wanted, strict=True))
    ]
    return StepInput(scheduled=scheduled, all_decode=True, without_drafter=without_drafter)


@pytest.mark.parametrize(
    ("costs_alike", "only_lookups"), [(True, True), (True, False), (False, False), (False, True)]
)
def test_a_recorded_step_has_the_shape_of_its_padded_rows_whatever_came_before(
    costs_alike: bool, only_lookups: bool
) -> None:
    """Shapes are kept, by what tells them apart: here each is compared with one that is made anew."""
    generator = random.Random(0)
    shapes = Shapes(
        num_drafts=MOST,
        max_model_len=100,
        has_drafter=True,
        max_num_seqs=5,
        costs_alike=costs_alike,
        only_lookups=only_lookups,
    )
    padded = {1: 1, 2: 2, 3: 4, 4: 4, 5: 5}  # requests without rows, where all drafters are lookups
    for _ in range(300):
        num_requests = generator.randint(1, 5)
        is_plain = generator.random() < 0.3
        rests = is_plain and generator.random() < 0.5  # else the drafter sees it all the same
        rows = [1 if is_plain else generator.randint(1, 1 + MOST) for _ in range(num_requests)]
        wanted = [0 if is_plain else generator.randint(0, MOST) for _ in range(num_requests)]
        step = decoding(rows, wanted, without_drafter=rests)
        scheduled, shape = shapes.fitted(step, has_items=False, is_recorded=True)
        assert [s.slot for s in scheduled] == list(range(num_requests))
        assert all(s.num_rows == s.num_sampled >= given for s, given in zip(scheduled, rows, strict=True))
        assert shape.num_rows == sum(s.num_rows for s in scheduled)
        assert shape.num_rows == rounded_rows(num_requests, sum(rows), MOST)
        anew = shapes.widened(
            BatchShape.of(scheduled, repeats=True, with_drafter=not rests), is_recorded=True
        )
        if only_lookups and not rests:
            anew = replace(anew, num_requests=padded[num_requests])
        assert shape == anew and shape.most_rows == 1 + MOST


@pytest.mark.parametrize("without_models", [True, False])
def test_a_chain_s_lookups_alone_have_requests_without_rows_beside_theirs(without_models: bool) -> None:
    shapes = Shapes(num_drafts=MOST, max_model_len=100, has_drafter=True, max_num_seqs=9)
    step = replace(decoding([3, 2, 2], [4, 4, 4]), without_models=without_models)
    scheduled, shape = shapes.fitted(step, has_items=False, is_recorded=True)
    assert len(scheduled) == 3 and shape.num_requests == 3 + without_models
    assert shape.num_drafts == (MOST if without_models else 4)


@pytest.mark.parametrize("has_drafter", [True, False])
def test_without_a_drafter_shapes_tell_how_many_rows_a_request_has(has_drafter: bool) -> None:
    """Drafts that a grammar forces."""
    most = MOST if has_drafter else 0
    shapes = Shapes(
        num_drafts=most, max_model_len=100, has_drafter=has_drafter, max_num_seqs=2, costs_alike=True
    )
    for rows in ([2, 3], [1, 4], [1, 3], [2, 2], [1, 3], [1, 1]):
        step = decoding(rows, [0, 0], without_drafter=has_drafter)
        _, shape = shapes.fitted(step, has_items=False, is_recorded=True)
        assert (shape.num_rows, shape.most_sampled) == (sum(rows), max(rows))
        assert shape.most_rows == (1 + MOST if has_drafter else max(rows))
