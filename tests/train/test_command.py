"""`draftproof train`: its messages before it starts, its output files, and its requirements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from draftproof.cli.main import main
from tests.train.library import needs_library

FEW = [
    "--max-tokens",
    "6",
    "--num-steps",
    "2",
    "--tokens-per-step",
    "64",
    "--checkpoint-every",
    "1",
    "--draft-vocab-size",
    "256",
    "--intermediate-size",
    "32",
    "--num-held-out",
    "1",
    "--device",
    "cpu",
    "--dtype",
    "float32",
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Flags that name files of training prompts and of held-out prompts."""
    prompts, held_out = tmp_path / "prompts.jsonl", tmp_path / "held_out.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{i}(x):"}) for i in range(4)))
    lines = [{"prompt": "import os", "domain": "code"}, {"prompt": "Once", "domain": "prose"}]
    held_out.write_text("\n".join(map(json.dumps, lines)))
    return ["--prompt-file", str(prompts), "--held-out-file", str(held_out)]


@needs_library
def test_a_dry_run_says_time_and_disk_and_writes_nothing(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "head"), *files, *FEW, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "hidden states: 0.00 GB on disk; time: answers " in said and "training " in said
    assert not (tmp_path / "head").exists()


@needs_library
def test_the_command_trains_and_checks_a_head(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    assert main(["train", str(folder), *files, *FEW]) == 0
    said = capsys.readouterr()
    assert "| code | 0.0 | head |" in said.out and "| prose | 0.8 | plain |" in said.out
    assert "step 2 of 2: loss " in said.err and "files of states" in said.err
    assert {"config.json", "model.safetensors", "train.json", "report.md"} <= {
        p.name for p in folder.iterdir()
    }
    assert main(["train", str(folder), *files, *FEW, "--learning-rate", "0.5", "--stages", "train"]) == 2
    said = capsys.readouterr().err
    assert "train.json: head.learning_rate=" in said and "but 0.5 is asked for" in said


def test_without_the_library_it_says_what_to_install(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "speculators", None)
    monkeypatch.delitem(sys.modules, "draftproof.train.library", raising=False)
    assert main(["train", str(tmp_path / "head"), *files]) == 2
    assert "pip install 'draftproof[train]'" in capsys.readouterr().err


def test_a_drafter_is_what_is_trained(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "head"), *files, "--speculative-config", "ngram"]) == 2
    assert "--speculative-config: is what is trained here" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_part_is_one_of_so_many(
    files: list[str], tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "head"), *files, *FEW, "--part", part]) == 2
    assert f"--part {part!r}: must be I/N" in capsys.readouterr().err
