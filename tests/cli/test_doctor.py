"""`draftproof doctor`, with the embedded pair and a head that is made for another model."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof import assets
from draftproof.bench import plots
from draftproof.cli.main import main
from draftproof.drafters.base import DraftSpec, Verified

FAST = ["--seconds", "1", "--max-tokens", "16", "--max-num-seqs", "4"]


class NeverRight:
    """A user's drafter that proposes token 3."""

    spec = DraftSpec()

    def __init__(self, config: object) -> None:
        pass

    def propose(self, verified: Verified, num_drafts: int) -> list[list[int]]:
        return [[3] * num_drafts for _ in range(verified.num_requests)]


def test_a_good_pair_is_measured_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *FAST]) == 0
    out = capsys.readouterr().out
    assert "requests at once" in out and "best K" in out and "measured:" in out and "wrong" not in out
    assert out.splitlines()[-1].startswith("speculation o")


def test_a_head_that_is_never_right_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    head = f'{{"method": "{__name__}.NeverRight", "num_speculative_tokens": 2}}'
    assert main(["doctor", str(assets.path(assets.TARGET)), head, *FAST]) == 1
    out = capsys.readouterr().out
    assert "wrong: the first draft is right in 0% of the rounds" in out and "faults" not in out


def test_a_drafter_that_has_fewer_drafts_than_asked_for_is_measured(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["doctor", str(assets.path(assets.TARGET)), "examples.custom_drafter.LastSeen", *FAST]) == 0
    out = capsys.readouterr().out
    assert "with all drafts (K=5), measured" in out and "wrong" not in out
    assert "a step raised" not in caplog.text


def test_a_pair_that_does_not_fit_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", str(assets.path(assets.TARGET)), str(tmp_path), *FAST]) == 2
    assert "config.json" in capsys.readouterr().err
    assert main(["doctor", str(assets.path(assets.TARGET)), "ngrams", *FAST]) == 2
    assert "did you mean 'ngram'" in capsys.readouterr().err
    assert main(["doctor", str(assets.path(assets.TARGET)), *FAST]) == 2
    assert "DRAFTER: name the drafter" in capsys.readouterr().err
    assert main(["doctor", "x", "--model", "y", *FAST]) == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed")
def test_the_plot_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", *FAST, "--plot", str(tmp_path / "speedup.png")]) == 0
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert main(["doctor", *FAST, "--plot", str(tmp_path / "no" / "speedup.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
