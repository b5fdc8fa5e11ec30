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
MAX_METHOD_LINES = 120  # a draft method's own file, which a row of the registry names
MAX_READER_LINES = 100  # of a checkpoint format
# Lines of Python, by folder of the package. Tools around the engine have no budget.
BUDGETS = {
    "kernels": (("kernels",), 6000),  # each operator as torch twin, as caller of C++, in Triton
    "methods and formats": (("drafters", "checkpoints"), 5000),
    "models": (("models",), 3000),
}
CORE, MAX_CORE_LINES = "engine", 5000  # the rest: scheduling, cache, attention, sampling, settings
NOT_CORE = ("train", "server", "cli", "bench")


def source_files(root: Path) -> list[Path]:
    """Every source file of the project, sorted."""
    found = (p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)
    return sorted(p for p in found if "__pycache__" not in p.parts)


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def budget_of(path: Path, root: Path) -> str | None:
    """The name of the budget that `path` counts towards."""
    package = root / "src" / "draftproof"
    if not path.is_relative_to(package) or path.suffix != ".py":
        return None
    folder = path.relative_to(package).parts[0]
    if folder in NOT_CORE:
        return None
    return next((name for name, (folders, _) in BUDGETS.items() if folder in folders), CORE)


def method_files(root: Path) -> frozenset[Path]:
    """The file of each method: rows of the registry say `build=module.build`."""
    registry = root / "src" / "draftproof" / "drafters" / "registry.py"
    if not registry.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(registry.read_text(encoding="utf-8")))
    given = (n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "build")
    modules = (v.value for v in given if isinstance(v, ast.Attribute))
    return frozenset(registry.with_name(f"{m.id}.py") for m in modules if isinstance(m, ast.Name))


def most_lines(path: Path, root: Path, methods: frozenset[Path]) -> int:
    """How long the file may be."""
    if path in methods:
        return MAX_METHOD_LINES
    is_reader = path.is_relative_to(root / "src" / "draftproof" / "checkpoints")
    return MAX_READER_LINES if is_reader else MAX_FILE_LINES


def file_faults(path: Path, name: str, most: int) -> Iterator[str]:
    """What is too long, or forbidden, in one file of at most `most` lines."""
    lines = count_lines(path)
    if lines > most:
        yield f"{name}: {lines} lines, at most {most}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: `global {', '.join(node.names)}`: pass state as an argument"


def check(root: Path) -> tuple[list[str], dict[str, int]]:
    """All faults, and the number of lines that count towards each budget."""
    files, methods = source_files(root), method_files(root)
    faults = [
        fault
        for path in files
        for fault in file_faults(path, str(path.relative_to(root)), most_lines(path, root, methods))
    ]
    limits = {CORE: MAX_CORE_LINES, **{name: most for name, (_, most) in BUDGETS.items()}}
    used = dict.fromkeys(limits, 0)
    for path in files:
        name = budget_of(path, root)
        if name is not None:
            used[name] += count_lines(path)
    faults += [
        f"{name}: {used[name]} lines, at most {most}" for name, most in limits.items() if used[name] > most
    ]
    return faults, used


def main() -> int:
    faults, used = check(Path(__file__).resolve().parents[1])
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"sizes: {', '.join(f'{name} {lines}' for name, lines in used.items())}; {len(faults)} over budget")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
