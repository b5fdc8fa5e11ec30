"""Code in a checkpoint's folder is never run, even if stdin would answer `y` to a question whether to trust it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slow import few, slow

DATA = Path(__file__).parent.parent / "data"
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Harmful: pass\n"
TARGETS = ("mtp_mimo_a", "mtp_deepseek_v3_a", "target_gemma4_a", "target_qwen3")
MAPS: dict[str, dict[str, Any]] = {
    "by name": {"auto_map": {"AutoTokenizer": ["harmful.Harmful", "harmful.Harmful"]}},
    "older form": {"auto_map": ["harmful.Harmful", "harmful.Harmful"]},
    "another folder's": {"auto_map": {"AutoTokenizer": [None, "owner/other--harmful.Harmful"]}},
    "a class that is not known": {
        "auto_map": {"AutoTokenizer": [None, "harmful.Harmful"]},
        "tokenizer_class": "Harmful",
    },
}
LOAD = """
import sys
from draftproof import LLM
from draftproof.frontend.text import Tokenizer
for folder in sys.argv[1:]:
    for make in (Tokenizer, lambda folder: LLM(folder, max_model_len=32)):
        try:
            make(folder)
        except ValueError as error:
            print(str(error))
        else:
            print("loaded")
"""


def harmful(to: Path, target: str, keys: dict[str, Any]) -> Path:
    """A target's folder without tokenizer.json, with code that each of transformers' auto classes would run."""
    shutil.copytree(DATA / "oracle" / target, to)
    (to / "harmful.py").write_text(CODE.format(marker=str(to / "ran")))
    (to / "tokenizer_config.json").write_text(json.dumps(keys))
    raw = json.loads((to / "config.json").read_text())
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    raw["auto_map"] = dict.fromkeys(classes, "harmful.Harmful")
    (to / "config.json").write_text(json.dumps(raw))
    return to


@slow
@pytest.mark.parametrize("target", few(TARGETS, "target_qwen3"))
def test_code_of_a_folder_is_not_run_and_nobody_is_asked(tmp_path: Path, target: str) -> None:
    folders = [harmful(tmp_path / str(i), target, keys) for i, keys in enumerate(MAPS.values())]
    command = [sys.executable, "-c", LOAD, *map(str, folders)]
    done = subprocess.run(command, input="y\n" * 50, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*/ran"))
    assert "run the custom code" not in done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 * len(folders)
    for number, line in enumerate(said):
        assert (str(folders[number // 2]) in line and "tokenizer.json" in line) or line == "loaded", line
