"""`draftproof verify`, over a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof import assets
from draftproof.cli.main import main
from tests.cli.fake_llm import Engines


class TestVerify:
    SHORT = ("verify", "--limit", "3", "--max-tokens", "4")

    def test_equal_runs_are_identical(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*self.SHORT]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        last = lines[-1]
        assert "compared with plain" in first and lines[1].split()[-3:] == ["drafted", "accepted", "equal"]
        assert last.startswith(
            "identical: yes (192 tokens and 384 log-probabilities of 48 outputs; 72 drafts"
        )
        assert [e.engine["max_num_seqs"] for e in engines] == [1, 1, 1, 1, 8, 8, 8, 8]
        assert [e.engine["max_num_batched_tokens"] for e in engines] == [2048, 2048, 48, 48] * 2
        assert [e.drafting for e in engines] == [False, True] * 4
        seeds = [params.seed for _, params in engines[0].seen]
        temperatures = [params.temperature for _, params in engines[0].seen]
        assert (seeds, temperatures) == ([0, 1, 2] * 2, [0.0] * 3 + [0.8] * 3)

    def test_help_shows_its_own_defaults_and_no_flag_that_it_refuses(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["verify", "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "Maximum length of the output, in tokens. [default: 64]" in shown
        for flag, instead in (("--temperature", "--temperatures"), ("--max-num-seqs", "--batch-sizes")):
            assert f"{flag} " not in shown
            assert main([*self.SHORT, flag, "1"]) == 2
            assert f"{flag} 1" in (err := capsys.readouterr().err) and f"give {instead} 1" in err
        assert main([*self.SHORT, "--verification", "block"]) == 2
        assert (
            "--verification block: gives outputs that are equal in distribution only"
            in capsys.readouterr().err
        )

    def test_one_wrong_token_is_found(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        engines.change = "token"
        assert main([*self.SHORT, "--batch-sizes", "2", "--chunk-sizes", "64", "--temperatures", "0"]) == 1
        out = capsys.readouterr().out
        assert "speculative, batch 2, chunk 64, temperature 0: prompt code-1" in out
        assert "request 1, choice 0, position 2: token differs" in out
        assert "rank 1: 77 'x' -0.25; rank 2: 9 'y' -1.5" in out
        assert out.splitlines()[-1] == "identical: NO, 1 of 6 outputs differ"

    def test_one_wrong_bit_of_a_logprob_is_found(
        self, engines: Engines, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engines.change = "logprob"
        assert main([*self.SHORT]) == 1
        assert "position 0: logprob differs" in capsys.readouterr().out

    def test_no_draft_proves_nothing(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        engines.drafts = 0
        assert main([*self.SHORT]) == 1
        assert "nothing was drafted" in capsys.readouterr().out

    def test_faults_of_the_drafter_are_told(
        self, engines: Engines, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engines.change, engines.drafts = "fault", 0
        assert main([*self.SHORT, "--batch-sizes", "2", "--temperatures", "0"]) == 1
        told = "faults of the drafter, whose drafts were left out: 4; the last: RuntimeError: boom"
        out = capsys.readouterr().out
        assert told in out and out.endswith(
            "nothing is proved; mend the drafter, whose fault is shown above\n"
        )

    def test_a_prompt_that_cannot_be_served_plainly_is_the_callers_mistake(
        self, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "p.txt"
        path.write_text("too long\nfine\n")
        assert main(["verify", "--prompt-file", str(path)]) == 2
        assert "1: prompt has 9 tokens, max_model_len=8" in capsys.readouterr().err

    def test_needs_a_drafter(self, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["verify", "--model", str(assets.path("tiny"))]) == 2
        assert "name the drafter" in capsys.readouterr().err

    @pytest.mark.parametrize("flag", ["--batch-sizes", "--chunk-sizes"])
    def test_a_number_that_is_too_small_is_told_with_its_flag(
        self, engines: Engines, flag: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*self.SHORT, flag, "2,0"]) == 2
        assert f"{flag} 2,0: must be above 0" in capsys.readouterr().err
