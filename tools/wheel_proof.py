"""Shows that the wheel in dist/ needs no compiler: installs it into a fresh environment, runs the demo with none on the
path, and compares its speed with the library compiled for this machine, in turns.

  python tools/wheel_proof.py                   what draftproof needs is taken from this environment: no network
  python tools/wheel_proof.py --fetch           pip fetches it, as a user's would
  python tools/wheel_proof.py --rounds 0        without the comparison
Exit status 1 where the demo's outputs differ, no library of the wheel was loaded, or the wheel's is slower than 0.9.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEAST_RATIO = 0.9
CASES = (("batch 1", 1), ("batch 8", 8))
# Answers each line on its input, the size of a batch, with the seconds that generating took. Without a drafter, whose
# policy would follow the clock.
WORKER = """
import sys, time
from draftproof import LLM, SamplingParams
llm = LLM(max_num_seqs=8, max_model_len=1024)
params = SamplingParams(temperature=0.0, max_tokens=192, ignore_eos=True)
prompts = [f"def function_{i}(values):\\n    return" for i in range(8)]
print(llm.operators, llm.arithmetic, sep="; ", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    llm.generate(prompts[: int(line)], params, use_tqdm=False)
    print(time.perf_counter() - start, flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", nargs="?", type=Path, help="default: the one in dist/")
    parser.add_argument("--fetch", action="store_true", help="let pip fetch torch and the rest")
    parser.add_argument("--rounds", type=int, default=15, help="of the comparison, default 15")
    given = parser.parse_args(argv)
    wheel = given.wheel or only_wheel(ROOT / "dist")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = environment_without_compiler(folder)
        install(wheel.resolve(), folder, fetch=given.fetch)
        python = str(folder / "venv" / "bin" / "python")
        shown = demo(folder, bare)
        print(shown)
        installed = Worker([python, "-c", WORKER], bare, folder)
        print(f"in the fresh environment: {installed.operators}")
        good = "identical: yes" in shown and "from the wheel" in installed.operators
        if given.rounds:
            here = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(folder / "compiled")}
            compiled = Worker([sys.executable, "-c", WORKER], here, folder)
            print(f"beside it: {compiled.operators}")
            good &= all(ratio >= LEAST_RATIO for ratio in compare(installed, compiled, given.rounds))
    print("the wheel is as promised" if good else "the wheel is NOT as promised")
    return int(not good)


def only_wheel(folder: Path) -> Path:
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"{folder}: has {len(found)} wheels, one is wanted; run make wheel")
    return found[0]


def environment_without_compiler(folder: Path) -> dict[str, str]:
    """Variables of a user whose path leads to the fresh environment and nothing else."""
    own = {"PATH": str(folder / "venv" / "bin"), "HOME": str(folder / "home")}
    (folder / "home").mkdir()
    kept = ("LANG", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    return {**own, **{name: os.environ[name] for name in kept if name in os.environ}}


def install(wheel: Path, folder: Path, *, fetch: bool) -> None:
    """The wheel into a fresh environment; `fetch`: with all that it asks for, from where pip fetches things."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    subprocess.run([*pip, *([] if fetch else ["--no-deps", "--no-index"]), str(wheel)], check=True)
    if not fetch:
        paths = {"base": str(venv), "platbase": str(venv)}
        site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        # a folder named in such a file is searched last, and links of editable packages in it are not followed
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def demo(folder: Path, environment: dict[str, str]) -> str:
    command = [str(folder / "venv" / "bin" / "draftproof"), "demo"]
    done = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


class Worker:
    """An engine in a process of its own, which generates when told to."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            command, env=environment, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.operators = self._line()

    def seconds(self, batch_size: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch_size}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}; its words are above")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(installed: Worker, compiled: Worker, num_rounds: int) -> list[float]:
    """Speed of the wheel's library over that of the compiled one, for each of CASES; ends both."""
    ratios = []
    for name, batch_size in CASES:
        for worker in (installed, compiled):
            worker.seconds(batch_size)
        pairs = []
        for number in range(num_rounds):
            both = (installed, compiled) if number % 2 else (compiled, installed)
            took = {worker: worker.seconds(batch_size) for worker in both}
            pairs.append(took[compiled] / took[installed])
        ratios.append(statistics.median(pairs))
        print(
            f"{name}: {ratios[-1]:.3f} of the speed of the compiled one ({min(pairs):.3f} to {max(pairs):.3f})"
        )
    installed.close()
    compiled.close()
    return ratios


if __name__ == "__main__":
    sys.exit(main())
