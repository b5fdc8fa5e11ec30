"""Acceptance of trained heads equals that of an independent reference implementation: a convention that is off shows
here, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftproof import assets
from tests.drafters import golden
from tests.drafters.derived import compressed_fp8, eagle_from_mtp, flat_from_speculators

# More models than the repository holds: DRAFTPROOF_TEST_MODELS=folder with `small`, `small-eagle3`, ...
EXTRA = os.environ.get("DRAFTPROOF_TEST_MODELS")


@pytest.mark.parametrize("name", golden.SUPPORTED)
def test_acceptance_equals_the_reference(name: str) -> None:
    found = golden.folders(name, Path(EXTRA) if EXTRA else None)
    if found is None:
        pytest.skip("set DRAFTPROOF_TEST_MODELS to the folder that holds this model")
    measured, expected = golden.measure(*found)
    assert measured == expected


def test_the_same_head_in_another_form_is_accepted_as_often(tmp_path: Path) -> None:
    """An MTP head as an EAGLE head: another tap and another format, but for the first draft the same numbers."""
    target, head = assets.path("tiny"), golden.DATA / "tiny-mtp"
    other = eagle_from_mtp(head, target, tmp_path)
    first, second = (golden.acceptance(golden.drafting(target, h, 1), 1, 24) for h in (head, other))
    assert first == second
    assert first["tau_accepted"] > 1.3


def test_fp8_weights_cost_little_acceptance() -> None:
    """Of 2.244 tokens a round they took nothing: 2.249. The two differ draft by draft, so it is no copy."""
    found = golden.folders("tiny-eagle3", None)
    assert found is not None
    rounded, expected = golden.measure(*found, quantization="fp8")
    assert rounded["tau_accepted"] == pytest.approx(expected["tau_accepted"], rel=0.03)
    assert rounded["accepted_per_position"] != expected["accepted_per_position"]


def test_a_head_stored_in_fp8_is_accepted_as_often(tmp_path: Path) -> None:
    """compressed-tensors' form: 2.244 tokens a round before."""
    found = golden.folders("tiny-eagle3", None)
    assert found is not None
    head = compressed_fp8(found[1], tmp_path / "tiny-eagle3", "channel")
    stored, expected = golden.measure(found[0], head)
    assert stored["tau_accepted"] == pytest.approx(expected["tau_accepted"], rel=0.03)
    assert stored["accepted_per_position"] != expected["accepted_per_position"]


def test_a_flat_p_eagle_is_accepted_as_often_as_the_reference(tmp_path: Path) -> None:
    found = golden.folders("tiny-peagle", Path(EXTRA) if EXTRA else None)
    if found is None:
        pytest.skip("set DRAFTPROOF_TEST_MODELS to the folder that holds this model")
    keys = {"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 3}
    head = flat_from_speculators(found[1], tmp_path / "tiny-peagle", keys)
    measured, expected = golden.measure(found[0], head)
    assert measured == expected
