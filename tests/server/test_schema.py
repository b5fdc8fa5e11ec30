"""Schemathesis with /openapi.json: every route gets data that its schema allows and data that it forbids."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import drafting, running

KEY = "key"
MOST_SECONDS = 60
CHECKS = "not_a_server_error,status_code_conformance"
# Every run has the same seed; cases beyond the time limit are left out.
SETTINGS = {
    "--phases": "coverage,fuzzing",
    "--max-examples": "12",
    "--max-time": str(MOST_SECONDS),
    "--seed": "1",
    "--mode": "all",
    "--checks": CHECKS,
    "--header": f"Authorization: Bearer {KEY}",
    "--exclude-path": "/pause",  # it would stop all answers
    "--generation-database": "none",
    "--suppress-health-check": "all",
}


@pytest.mark.slow
def test_every_answer_has_a_status_that_is_documented(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
    given = [part for pair in SETTINGS.items() for part in pair]
    command = [sys.executable, "-m", "schemathesis.cli", "run", *given, "--no-color", "--continue-on-failure"]
    with running(
        drafting(max_model_len=48), api_key=(KEY,), max_choices=4, chat_template_timeout=60
    ) as server:
        done = subprocess.run(
            [*command, f"{server.url}/openapi.json"],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=False,
        )
        server.check_nothing_left()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None and int(found[1]) > 300, done.stdout[-3000:]
