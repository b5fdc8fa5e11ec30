"""Compilation of the C++ library, for this machine or for one of the processor variants that a wheel contains.

Imports only the standard library: `hatch_build.py` runs this file where torch is not installed, and `tools/setup.sh`
uses it to compile the library while packages are being installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, int, int], None]  # task, steps done, total steps

SOURCES = Path(__file__).parents[
    1
]  # root of the C++ sources, which lie beside the Python code, and of their includes
COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract=off: a multiply-add is fused only where the source says so, so bits do not depend on how the compiler
# arranged a loop. The last two flags change no value; they allow comparisons and square roots to be vectorised.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-Wno-psabi",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# The first flags that build are used: not every compiler knows the machine.
THIS_MACHINE: tuple[tuple[str, ...], ...] = (("-march=native",), ())
WIDENED = "-DDP_WIDENED"  # does not use the processor's bf16 instructions
# A portable library depends only on the C library: the C++ runtime is linked in and hidden, and unused parts of it,
# which may need newer C libraries, are removed.
PORTABLE_LINK = (
    "-static-libstdc++",
    "-Wl,--exclude-libs,ALL",
    "-Wl,-Bsymbolic",
    "-Wl,--gc-sections",
    "-Wl,-z,defs",
    "-s",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A processor variant: the compiler's flags, and the required CPU features, as named in /proc/cpuinfo.

    `widened`: has no bf16 instructions, so bf16 is computed as fp32.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    widened: bool


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
_DOT = _V4 | {"avx512_bf16"}
_TILES = ("-mamx-tile", "-mamx-bf16")
# By machine, in ascending order of speed.
VARIANTS = {
    "x86_64": (
        Variant("x86-64-v3", ("-march=x86-64-v3",), _V3, widened=True),
        Variant("x86-64-v4", ("-march=x86-64-v4",), _V4, widened=True),
        Variant("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _DOT, widened=False),
        Variant(
            "x86-64-v4-amx",
            ("-march=x86-64-v4", "-mavx512bf16", *_TILES),
            _DOT | {"amx_tile", "amx_bf16"},
            widened=False,
        ),
    ),
    "aarch64": (Variant("armv8-a", ("-march=armv8-a",), frozenset(), widened=True),),
}


def runnable() -> list[Variant]:
    """The variants that this processor can run, fastest last."""
    has = set(processor().split())
    return [variant for variant in VARIANTS.get(platform.machine(), ()) if variant.needs <= has]


def default_cache_dir() -> Path:
    """Where built code and certificates are kept: $XDG_CACHE_HOME/draftproof, else ~/.cache/draftproof."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "draftproof"


def file_name(key: str) -> str:
    """The cache's file name for the library with this `build_key`."""
    return f"ops-{key}.so"


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def source_files() -> list[Path]:
    """All C++ sources and headers, sorted."""
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))


def build_key(compiler: str, extra: Sequence[str] = ()) -> str:
    """Hash of everything the binary depends on: sources, flags, compiler, processor."""
    digest = hashlib.sha256(repr((FLAGS, THIS_MACHINE, *extra, compiler)).encode())
    for path in source_files():
        digest.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    digest.update(version + processor().encode())
    return digest.hexdigest()[:20]


def processor() -> str:
    """The processor's name and instruction sets, as reported by the system."""
    lines = [platform.machine(), platform.processor()]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return " ".join(lines)
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    found = {line.split(":")[0].strip(): line for line in text.splitlines() if line.startswith(wanted)}
    return " ".join([*lines, *found.values()])


def compile_library(
    compiler: str,
    flags: Sequence[str],
    folder: Path,
    progress: Progress | None = None,
    *,
    sources: Sequence[Path] | None = None,
    link: Sequence[str] = (),
) -> Path:
    """Compile `sources` (default: this package's) with `flags`, one process per file, and link them into a file in
    `folder`.

    Raises CalledProcessError with the compiler's messages.
    """
    if sources is None:
        sources = [path for path in source_files() if path.suffix == ".cpp"]
    objects = [folder / f"{number}-{source.stem}.o" for number, source in enumerate(sources)]
    commands = [
        [compiler, *FLAGS, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    failed: subprocess.CalledProcessError | None = None
    for number, process in enumerate(running):
        if progress is not None:
            progress("compiling operators, once for this machine", number, len(running))
        _, errors = process.communicate()
        if process.returncode and failed is None:
            failed = subprocess.CalledProcessError(process.returncode, commands[number], stderr=errors)
    if failed is not None:
        raise failed
    built = folder / "ops.so"
    command = [compiler, *FLAGS, *flags, "-shared", *map(str, objects), "-o", str(built), *link]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    if progress is not None:
        progress("compiling operators, once for this machine", len(running), len(running))
    return built


def build(compiler: str, path: Path, progress: Progress | None = None, extra: Sequence[str] = ()) -> None:
    """Compile and link for this machine into `path`. Atomic: if two processes build at once, the later rename wins."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        for number, flags in enumerate(THIS_MACHINE):
            try:
                built = compile_library(compiler, (*flags, *extra), Path(folder), progress)
                break
            except subprocess.SubprocessError:
                if number == len(THIS_MACHINE) - 1:
                    raise
        os.replace(built, path)


def main() -> None:
    """Compile this machine's library into the cache, where the first use looks for it. Without a compiler, do nothing:
    the first use warns about it.
    """
    compiler = find_compiler()
    if compiler is None:
        return
    path = default_cache_dir() / file_name(build_key(compiler))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        build(compiler, path)


if __name__ == "__main__":
    main()
