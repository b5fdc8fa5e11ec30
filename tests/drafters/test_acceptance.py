"""Acceptance of trained heads equals that of an independent reference implementation. A wrong convention, such as an
off-by-one position, shows only here."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from draftproof import assets
from tests.drafters import golden
from tests.made.derived import compressed_fp8, eagle_from_mtp, flat_from_speculators, with_tables
from tests.slow import few, slow


def models() -> Path | None:
    """A folder with models that are not in the repository: `small`, 57 MB, and its heads. DRAFTPROOF_TEST_MODELS names
    it, else it is beside the checkout; None if there is none."""
    named = os.environ.get("DRAFTPROOF_TEST_MODELS")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "models"
    return folder if folder.is_dir() else None


def required(head: str) -> tuple[Path, Path]:
    """(target, head). If one is not available, the test fails in CI and is skipped with a warning elsewhere."""
    found = golden.folders(head, models())
    if found is not None:
        return found
    said = f"{head} is NOT compared with the reference: set DRAFTPROOF_TEST_MODELS to a folder with it and its target"
    if os.environ.get("CI", "") not in ("", "0", "false"):
        pytest.fail(said)
    warnings.warn(said, stacklevel=2)
    pytest.skip(said)


@pytest.mark.parametrize("name", few(golden.SUPPORTED, "tiny-mtp"))
def test_acceptance_equals_the_reference(name: str) -> None:
    measured, expected = golden.measure(*required(name))
    assert measured == expected


@pytest.mark.parametrize("ci", [True, False])
def test_a_head_that_is_not_at_hand_is_not_passed_over_in_silence(
    ci: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of the embedded target are embedded, too, so they are always available."""
    monkeypatch.setenv("DRAFTPROOF_TEST_MODELS", str(tmp_path))
    monkeypatch.setenv("CI", "true" if ci else "")
    for head in golden.SUPPORTED:
        if head.startswith("tiny"):
            assert required(head)[1].name == head
        elif ci:
            with pytest.raises(pytest.fail.Exception, match=f"{head} is NOT compared"):
                required(head)
        else:
            with pytest.raises(pytest.skip.Exception), pytest.warns(UserWarning, match=f"{head} is NOT"):
                required(head)


@slow
def test_the_same_head_in_another_form_is_accepted_as_often(tmp_path: Path) -> None:
    """An MTP head converted to an EAGLE head: another tap and format, but the same numbers for the first draft."""
    target, head = assets.path("tiny"), golden.DATA / "tiny-mtp"
    other = eagle_from_mtp(head, target, tmp_path)
    first, second = (golden.acceptance(golden.drafting(target, h, 1), 1, 24) for h in (head, other))
    assert first == second
    assert first["tau_accepted"] > 1.3


@slow
def test_fp8_weights_cost_little_acceptance() -> None:
    """2.249 tokens per round, 2.244 without fp8. Single drafts differ, so fp8 is really used."""
    found = golden.folders("tiny-eagle3", None)
    assert found is not None
    rounded, expected = golden.measure(*found, quantization="fp8")
    assert rounded["tau_accepted"] == pytest.approx(expected["tau_accepted"], rel=0.03)
    assert rounded["accepted_per_position"] != expected["accepted_per_position"]


@slow
def test_a_head_stored_in_fp8_is_accepted_as_often(tmp_path: Path) -> None:
    """Stored in compressed-tensors' format; 2.244 tokens per round before conversion."""
    found = golden.folders("tiny-eagle3", None)
    assert found is not None
    head = compressed_fp8(found[1], tmp_path / "tiny-eagle3", "channel")
    stored, expected = golden.measure(found[0], head)
    assert stored["tau_accepted"] == pytest.approx(expected["tau_accepted"], rel=0.03)
    assert stored["accepted_per_position"] != expected["accepted_per_position"]


@slow
def test_a_flat_p_eagle_is_accepted_as_often_as_the_reference(tmp_path: Path) -> None:
    found = required("tiny-peagle")
    keys = {"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 3}
    tensors = with_tables(found[1], found[0])
    head = flat_from_speculators(found[1], tmp_path / "tiny-peagle", keys, tensors)
    measured, expected = golden.measure(found[0], head)
    assert measured == expected
