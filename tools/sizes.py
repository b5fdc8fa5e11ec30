"""Checks the size budget: lines per file, lines per function, lines of the serving core, no `global`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "bench", "examples")
SUFFIXES = (".py", ".cpp", ".h")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CORE_LINES = 8000  # of Python, kernels apart
MAX_KERNEL_LINES = 5000  # of Python: each operator as torch twin, as caller of C++, in Triton
NOT_CORE = ("train", "server", "cli", "bench", "kernels")


def source_files(root: Path) -> list[Path]:
    """Every source file of the project, sorted."""
    found = (p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)
    return sorted(p for p in found if "__pycache__" not in p.parts)


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def is_core(path: Path, root: Path) -> bool:
    """Whether `path` counts towards the serving core's budget: its Python, but for kernels, which have their own."""
    package = root / "src" / "draftproof"
    inside = path.is_relative_to(package) and path.suffix == ".py"
    return inside and not path.relative_to(package).as_posix().startswith(
        tuple(f"{name}/" for name in NOT_CORE)
    )


def file_faults(path: Path, name: str) -> Iterator[str]:
    """What is too long, or forbidden, in one file."""
    lines = count_lines(path)
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: `global {', '.join(node.names)}`: pass state as an argument"


def check(root: Path) -> tuple[list[str], int]:
    """All faults, and the number of lines of the serving core."""
    files = source_files(root)
    faults = [fault for path in files for fault in file_faults(path, str(path.relative_to(root)))]
    core = sum(count_lines(path) for path in files if is_core(path, root))
    kernels = sum(count_lines(path) for path in (root / "src" / "draftproof" / "kernels").rglob("*.py"))
    for what, lines, most in (("serving core", core, MAX_CORE_LINES), ("kernels", kernels, MAX_KERNEL_LINES)):
        if lines > most:
            faults.append(f"{what}: {lines} lines, at most {most}")
    return faults, core


def main() -> int:
    faults, core = check(Path(__file__).resolve().parents[1])
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"sizes: serving core {core} of {MAX_CORE_LINES} lines, {len(faults)} over budget")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
