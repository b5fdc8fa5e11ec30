"""`make test-processors`: its settings reach the processes that run the tests, and what fails there is said."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slow import slow
from tools import processors

ONE_PASSES = """
import os
import pytest

def test_passes():
    assert os.environ["MKL_CBWR"] == "AVX2"

def test_fails():
    assert "MKL_CBWR" not in os.environ

@pytest.mark.skip
def test_skipped():
    pass
"""


def test_a_setting_is_a_row_and_a_failure_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    test = tmp_path / "test_one.py"
    test.write_text(ONE_PASSES)
    assert processors.main(["--setting", "mkl-avx2", "--pytest-args=-p no:xdist", str(test)]) == 1
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["setting", "passed", "failed", "skipped", "seconds"]
    assert row.split()[:4] == ["mkl-avx2", "1", "1", "1"] and row.endswith("test_one::test_fails")
    assert (tmp_path / "cache" / "draftproof-processors" / "mkl-avx2").is_dir()


@slow
def test_a_run_without_tests_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert processors.main(["--setting", "default", str(tmp_path / "test_none.py")]) == 1
    assert "pytest ended with 4" in capsys.readouterr().out


def test_every_test_that_is_named_exists() -> None:
    for name in (*processors.TESTS, *processors.QUICK_TESTS):
        assert (processors.ROOT / name.partition("::")[0]).exists()


def test_a_narrow_setting_compiles_for_no_more_than_avx2(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    environment = processors.environment_of("march-v3", tmp_path)
    command = ["c++", "-march=native", "-###", "-x", "c++", "-E", "/dev/null"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert "-march=x86-64-v3" in said and "native" not in said
