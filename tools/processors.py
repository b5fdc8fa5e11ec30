"""Runs the tests that promise bits as on other processors, which libraries and compilers can imitate, in one table.

python tools/processors.py [--quick] [--slow] [--setting NAME]... [TEST ...]
python tools/processors.py --run 'python -m tests.chunk_sizes'    another command under each setting
Exit status 1 where a test failed. Each setting has processes and a cache folder of its own: certificates made under one
say nothing about another.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
COMPILERS = ("c++", "g++", "clang++")
MARCH = "-march=x86-64-v3"  # AVX2 and no more


@dataclass(frozen=True)
class Setting:
    """An imitated processor. `narrow`: our own code is compiled for `MARCH`."""

    environment: dict[str, str] = field(default_factory=dict)
    narrow: bool = False


MKL = {"MKL_CBWR": "AVX2"}
ONEDNN = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
ATEN = {"ATEN_CPU_CAPABILITY": "avx2"}
SETTINGS = {
    "default": Setting(),
    "mkl-avx2": Setting(MKL),
    "mkl-compatible": Setting({"MKL_CBWR": "COMPATIBLE"}),
    "onednn-avx2": Setting(ONEDNN),
    "aten-avx2": Setting(ATEN),
    "march-v3": Setting(narrow=True),
    "all-avx2": Setting({**MKL, **ONEDNN, **ATEN}, narrow=True),
    "openblas-haswell": Setting({"OPENBLAS_CORETYPE": "Haswell"}),
}
TESTS = (
    "tests/conformance",
    "tests/attention",
    "tests/runtime",
    "tests/kernels",
    "tests/matmul",
    "tests/models",
    "tests/drafters",
)
# Triton's interpreter computes with numpy, and its sums are made without BLAS: no library has a say in them.
LEFT_OUT = ("--deselect=tests/kernels/test_triton_interpreter.py",)
QUICK = ("mkl-avx2", "all-avx2")
QUICK_TESTS = (
    "tests/attention/test_attention.py",
    "tests/conformance/test_fallback.py::test_torch_operators_are_as_exact",
    "tests/conformance/test_chunk_sizes.py::test_chunks_and_batches_change_nothing[False-float32]",
    "tests/kernels/test_experts.py",
    "tests/models/test_against_transformers.py",
    "tests/drafters/test_oracle_gemma4.py",
    "tests/conformance/test_drafters.py::test_output_equals_plain_decoding[eagle3-one batch-float32]",
    "tests/conformance/test_drafters.py::test_output_equals_plain_decoding[eagle3-chunks of 7-bfloat16]",
)


@dataclass(frozen=True)
class Outcome:
    """The result of one run. `failures`: names of tests, or why none ran."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]

    def row(self, name: str) -> str:
        first = ", ".join(self.failures[:3]) + (" ..." if len(self.failures) > 3 else "")
        return f"{name:<18}{self.passed:>7}{self.failed:>7}{self.skipped:>8}{self.seconds:>8.0f}  {first}".rstrip()


HEAD = f"{'setting':<18}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>8}  first failures"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help=f"default: {' '.join(TESTS)}")
    parser.add_argument(
        "--setting", action="append", choices=SETTINGS, help="one of them; repeat it for more"
    )
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} only, a few tests")
    parser.add_argument(
        "--slow", action="store_true", help="tests marked slow too: a quarter of an hour a setting"
    )
    parser.add_argument("--run", metavar="COMMAND", help="a command to run in place of the tests")
    parser.add_argument("--pytest-args", default="", help="more arguments for pytest, such as '-n 2'")
    given = parser.parse_args(argv)
    tests = given.tests or (QUICK_TESTS if given.quick else TESTS)
    names = given.setting or (QUICK if given.quick else SETTINGS)
    if given.run is not None:
        return max([run_command(name, shlex.split(given.run)) for name in names])
    marks = () if given.slow or given.quick or given.tests else ("-m", "not slow")
    failed = False
    print(HEAD, flush=True)
    for name in names:
        outcome = run(name, [*shlex.split(given.pytest_args), *LEFT_OUT, *marks, *tests])
        print(outcome.row(name), flush=True)
        failed |= outcome.failed > 0
    return int(failed)


def run(name: str, arguments: Sequence[str]) -> Outcome:
    """The outcome of pytest with these arguments under the setting `name`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(name, Path(folder))
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        start = time.monotonic()
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        return read(report, done, time.monotonic() - start)


def run_command(name: str, command: Sequence[str]) -> int:
    """Run a command under the setting `name`, with its output where ours goes; returns its exit status."""
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(name, Path(folder))
        if command[0] == "python":
            command = [sys.executable, *command[1:]]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def environment_of(name: str, folder: Path) -> dict[str, str]:
    """The environment of processes; `folder` is for a compiler that knows nothing wider than `MARCH`."""
    setting = SETTINGS[name]
    environment = dict(os.environ)
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftproof-processors" / name
    cache.mkdir(parents=True, exist_ok=True)
    environment |= setting.environment
    environment["XDG_CACHE_HOME"] = str(cache)
    if setting.narrow:
        environment["PATH"] = f"{narrow_compilers(folder)}{os.pathsep}{environment['PATH']}"
    return environment


def narrow_compilers(folder: Path) -> Path:
    """A folder of compilers that take -march=native for `MARCH`."""
    for name in COMPILERS:
        real = shutil.which(name)
        if real is not None:
            script = folder / name
            script.write_text(f'#!/bin/bash\nexec {shlex.quote(real)} "${{@/#-march=native/{MARCH}}}"\n')
            script.chmod(0o755)
    return folder


def read(report: Path, done: subprocess.CompletedProcess[str], seconds: float) -> Outcome:
    """The outcome in the junit report; a run without one has failed."""
    if done.returncode not in (0, 1) or not report.exists():
        said = (done.stdout + done.stderr).strip().splitlines()
        return Outcome(0, 1, 0, seconds, [f"pytest ended with {done.returncode}: {said[-1] if said else ''}"])
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failures = [f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in bad]
    return Outcome(len(cases) - len(bad) - skipped, len(bad), skipped, seconds, failures)


if __name__ == "__main__":
    sys.exit(main())
