"""The table of trained heads beside golden.json's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import trained_heads
from draftproof import assets
from tests.drafters import golden

NAME = "tiny-eagle3"


def test_a_head_stands_beside_goldens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(golden.GOLDEN, NAME, {**golden.GOLDEN[NAME], "max_new": 4})
    assert trained_heads.main([str(assets.path(NAME)), "--like", NAME]) == 0
    name, found, shares, like, wanted, _ = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    llm = golden.drafting(assets.path(assets.TARGET), assets.path(NAME), 5)
    counted = golden.acceptance(llm, 5, 4)
    assert (name, like, wanted) == (NAME, NAME, "2.244")
    assert found == f"{counted['tau_accepted']:.3f}" != "1.000"
    assert shares == " ".join(f"{share:.2f}" for share in counted["accepted_per_position"])


@pytest.mark.parametrize("like", ["tiny-eagle3,tiny-dflash", "tiny-eagle9"])
def test_each_head_needs_one_of_golden(like: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        trained_heads.main([str(tmp_path), "--like", like])
    assert f"--like {like}: must name one of" in capsys.readouterr().err
