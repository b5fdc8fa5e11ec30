"""How the library is compiled: for this machine, or for one of the kinds of processor that a wheel carries it for.

Imports nothing but the standard library: `hatch_build.py` runs this file where there is no torch, and so does
`tools/setup.sh`, which compiles the library for this machine while packages are being installed.
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

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all

SOURCES = Path(__file__).parents[
    1
]  # the C++ of each room lies in its folder; what it includes is named from here
COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract=off: a multiply-add is fused where the source says so and nowhere else, so bits do not depend on how
# the compiler laid out a loop. The last two flags change no value; they let comparisons and square roots be vectorised.
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
# The first that builds is used: not every compiler knows the machine.
THIS_MACHINE: tuple[tuple[str, ...], ...] = (("-march=native",), ())
WIDENED = "-DDP_WIDENED"  # leaves the processor's bf16 instructions alone
# A library that travels asks nothing of a system but its C library: what it uses of C++'s own is part of it and stays
# hidden in it, and what it does not use is left out, which newer C libraries only could serve.
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
    """A kind of processor: the compiler's flags for it, and what it must have, in the words of /proc/cpuinfo.

    `widened`: without instructions for bf16, so that it computes bf16 as fp32.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    widened: bool


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
_DOT = _V4 | {"avx512_bf16"}
_TILES = ("-mamx-tile", "-mamx-bf16")
# By machine; of those that a processor can run, the last is the fastest.
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
    """The variants that this processor can run, the fastest last."""
    has = set(processor().split())
    return [variant for variant in VARIANTS.get(platform.machine(), ()) if variant.needs <= has]


def default_cache_dir() -> Path:
    """Where built code and certificates are kept: $XDG_CACHE_HOME/draftproof, else ~/.cache/draftproof."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "draftproof"


def file_name(key: str) -> str:
    """The file in the cache that holds the library with this `build_key`."""
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
    """The processor's name and instruction sets, as far as the system tells."""
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
    """Compile `sources` (left out: ours) with `flags`, a process per file, and link them into a file in `folder`.

    Raises CalledProcessError with the compiler's words.
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
    """Compile for this machine and link into `path`. Atomic: two processes may build at once, the later rename wins."""
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
    """Put this machine's library into the cache, where the first use looks for it. Without a compiler nothing is done:
    the first use says so."""
    compiler = find_compiler()
    if compiler is None:
        return
    path = default_cache_dir() / file_name(build_key(compiler))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        build(compiler, path)


if __name__ == "__main__":
    main()
