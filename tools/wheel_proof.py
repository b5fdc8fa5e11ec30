"""Shows that the wheel in dist/ needs no compiler: installs it into a fresh environment, runs the demo with none on the
path, and compares its speed with the library compiled for this machine, in turns.

  python tools/wheel_proof.py                   what draftproof needs is taken from this environment: no network
  python tools/wheel_proof.py --fetch           pip fetches it, as a user's would
  python tools/wheel_proof.py --rounds 0        without the comparison
Exit status 1 where the demo's outputs differ, no library of the wheel was loaded, or the wheel's is slower than 0.9.
"""

from __future__ import annotations

import argparse
import json
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
BATCH_SIZES = (1, 8)
LOOK = (
    "from draftproof import LLM; llm = LLM(max_model_len=64); print(llm.operators, llm.arithmetic, sep='; ')"
)
# One process holds all engines, which take turns: two processes of the same code were seen to differ by half. The third
# engine is the second once more, so that what differs between them is the measurement's own error. No drafter: how many
# drafts its policy asks for follows the clock. Prints, for each size of batch and round, the seconds of each engine.
MEASURE = """
import json, sys, time
from pathlib import Path
from draftproof import LLM, SamplingParams
from draftproof.runtime import native
prebuilt, order, rounds, sizes = json.loads(sys.argv[1])
engines = {}
for name in order:
    native.PREBUILT = Path(prebuilt if name == "wheel" else "there-is-none")
    engines[name] = LLM(max_num_seqs=8, max_model_len=1024)
    assert ("from the wheel" in engines[name].operators) == (name == "wheel"), engines[name].operators
params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
prompts = [f"def function_{i}(values):\\n    return" for i in range(8)]
for size in sizes:
    for number in range(-1, rounds):
        seconds = {}
        for i in range(3):
            name = order[(i + number) % 3]
            start = time.perf_counter()
            engines[name].generate(prompts[:size], params, use_tqdm=False)
            seconds[name] = time.perf_counter() - start
        if number >= 0:
            print(json.dumps([size, seconds]), flush=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", nargs="?", type=Path, help="default: the one in dist/")
    parser.add_argument("--fetch", action="store_true", help="let pip fetch torch and the rest")
    parser.add_argument(
        "--rounds", type=int, default=20, help="of the comparison, in each of 3 processes, default 20"
    )
    given = parser.parse_args(argv)
    wheel = given.wheel or only_wheel(ROOT / "dist")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = environment_without_compiler(folder)
        install(wheel.resolve(), folder, fetch=given.fetch)
        python = str(folder / "venv" / "bin" / "python")
        shown = demo(folder, bare)
        print(shown)
        looked = subprocess.run([python, "-c", LOOK], env=bare, cwd=folder, capture_output=True, text=True)
        print(f"in the fresh environment: {looked.stdout.strip() or looked.stderr}")
        good = "identical: yes" in shown and "from the wheel" in looked.stdout
        if given.rounds:
            good &= all(ratio >= LEAST_RATIO for ratio in compare(folder, given.rounds))
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


def compare(folder: Path, num_rounds: int) -> list[float]:
    """Speed of the wheel's library over that of the compiled one, for each size of batch."""
    (prebuilt,) = (folder / "venv").rglob("draftproof/runtime/prebuilt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
    names = ["wheel", "compiled", "compiled again"]
    rounds = []
    for first in range(3):  # who is made first differs
        order = names[first:] + names[:first]
        asked = json.dumps([str(prebuilt), order, num_rounds, BATCH_SIZES])
        command = [sys.executable, "-c", MEASURE, asked]
        done = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
        )
        rounds += [json.loads(line) for line in done.stdout.splitlines()]
    ratios = []
    for size in BATCH_SIZES:
        found, control = (
            statistics.median(took["compiled"] / took[name] for at, took in rounds if at == size)
            for name in ("wheel", "compiled again")
        )
        print(f"batch {size}: {found:.3f} of the compiled one's speed; the compiled one again {control:.3f}")
        ratios.append(found)
    return ratios


if __name__ == "__main__":
    sys.exit(main())
