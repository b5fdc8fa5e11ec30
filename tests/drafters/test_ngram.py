"""N-gram drafting: its settings. What it finds: tests/kernels/test_lookup.py."""

from __future__ import annotations

import pytest

from draftproof.drafters.ngram import NgramOptions


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min=4, prompt_lookup_max=3"):
        NgramOptions(prompt_lookup_min=4, prompt_lookup_max=3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (2, 5)), ({"prompt_lookup_min": 7}, (7, 7)), ({"prompt_lookup_max": 1}, (1, 1))],
)
def test_a_bound_that_is_left_out_makes_room_for_the_other(
    given: dict[str, int], expected: tuple[int, int]
) -> None:
    options = NgramOptions(**given)
    assert (options.shortest, options.longest) == expected
