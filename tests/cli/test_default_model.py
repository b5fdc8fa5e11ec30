"""The model that is taken where none is named: the variable's, the installed package's, the embedded one."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from draftproof import LLM, assets
from draftproof.cli import options
from draftproof.cli.main import main
from tests.cli.fake_llm import Engines

EMBEDDED = str(assets.path(assets.TARGET))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's file in a package whose code must not run, and an installation that has the gguf library."""
    folder = tmp_path / "model_of_the_demo"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('must not be imported')")
    (folder / "small.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(assets, "_PACKAGE", folder.name)
    monkeypatch.delenv(assets.VARIABLE)
    monkeypatch.setitem(sys.modules, "gguf", sys)  # found, whether it is there or not
    return folder / "small.gguf"


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one: None if one == name else real(one))


def test_the_package_is_found_and_not_run(package: Path) -> None:
    found = assets.default_model()
    assert (found.where, found.is_packaged, found.is_embedded, found.note) == (str(package), True, False, "")
    assert package.parent.name not in sys.modules


@pytest.mark.parametrize("missing", ["gguf", "model_of_the_demo"])
def test_the_embedded_model_says_what_would_bring_another(
    missing: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, missing)
    found = assets.default_model()
    assert (found.where, found.is_embedded) == (EMBEDDED, True)
    assert "taking tiny" in found.note and "draftproof[demo]" in found.note and "\n" not in found.note


def test_the_variable_names_any_model(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(assets.VARIABLE, "owner/name")
    assert assets.default_model() == assets.DefaultModel("owner/name", is_embedded=False)
    monkeypatch.setenv(assets.VARIABLE, "tiny")
    assert assets.default_model() == assets.DefaultModel(EMBEDDED, is_embedded=True)


def test_a_server_calls_it_by_its_file() -> None:
    assert assets.DefaultModel("/x/Some-135M.Q4_1.gguf", is_embedded=False).served_name == "Some-135M.Q4_1"
    assert assets.default_model().served_name == assets.TARGET


def test_each_default_model_has_a_head_of_its_own(
    package: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "x"]) == 0
    assert Path(engines[0].engine["speculative_config"]["model"]).name == options.SMOLLM2_DRAFTER
    monkeypatch.setenv(assets.VARIABLE, "owner/name")
    assert main(["generate", "x"]) == 0
    assert engines[1].engine["speculative_config"] == {"method": "ngram"}
    monkeypatch.delenv(assets.VARIABLE)
    without(monkeypatch, "gguf")
    assert main(["generate", "x"]) == main(["generate", "x", "--no-speculation"]) == 0
    assert Path(engines[2].engine["speculative_config"]["model"]).name == options.EMBEDDED_DRAFTER
    assert "speculative_config" not in engines[3].engine


def test_the_heads_of_the_default_model_leave_a_wheel_small() -> None:
    heads = [assets.path(options.SMOLLM2_DRAFTER), assets.path("smollm2-dflash")]
    assert sum(file.stat().st_size for head in heads for file in head.iterdir()) <= 40e6


def test_a_command_says_once_which_model_it_takes(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "gguf")
    assert main(["verify", "x", "--max-tokens", "8", "--batch-sizes", "1"]) == 0
    assert capsys.readouterr().err.count("taking tiny") == 1
    monkeypatch.setenv(assets.VARIABLE, "tiny")
    assert main(["generate", "x", "--max-tokens", "2"]) == 0
    assert "taking tiny" not in capsys.readouterr().err


def test_the_library_says_it_in_the_log(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without(monkeypatch, "gguf")
    with caplog.at_level(logging.WARNING), LLM(max_model_len=32, max_num_seqs=1):
        pass
    assert [record.message for record in caplog.records] == [assets.default_model().note]
