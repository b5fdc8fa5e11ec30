"""Acceptance of trained heads equals that of an independent reference implementation: a convention that is off shows
here, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.drafters import golden

# More models than the repository holds: DRAFTPROOF_TEST_MODELS=folder with `small`, `small-eagle3`, ...
EXTRA = os.environ.get("DRAFTPROOF_TEST_MODELS")


@pytest.mark.parametrize("name", golden.SUPPORTED)
def test_acceptance_equals_the_reference(name: str) -> None:
    found = golden.folders(name, Path(EXTRA) if EXTRA else None)
    if found is None:
        pytest.skip("set DRAFTPROOF_TEST_MODELS to the folder that holds this model")
    measured, expected = golden.measure(*found)
    assert measured == expected
