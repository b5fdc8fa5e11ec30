"""The Triton kernels against their torch twins on a CPU, in Triton's interpreter (fp32 and fp16 only)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow

pytestmark = slow

ROOT = Path(__file__).parents[2]
NAMES = (
    *("norm", "activation", "soft_cap", "rows", "rope", "log_normalizer", "sample", "process", "products"),
    *(
        "attention",
        "attention_adds_up_many_chunks",
        "attention_is_not_poisoned",
        "step",
        "lookup",
        "draft_rows",
    ),
    *("attention_of_prompts", "attention_of_unlike_layers", "attention_to_broken_values"),
    "attention_weighs_alike_whatever_kernel_adds",
    *("experts", "grouped_products", "shared_keys", "quantized"),
)


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    """Error text by check. Run in another process, since triton reads the variable only when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.checks"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,  # minutes on an idle machine
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_does_what_its_twin_does(outcome: dict[str, str], name: str) -> None:
    assert outcome[f"check_{name}"] == ""


def test_every_check_is_run(outcome: dict[str, str]) -> None:
    assert set(outcome) == {f"check_{name}" for name in NAMES}
