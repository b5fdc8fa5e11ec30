"""Checks what keeps code readable and can be counted: functions of at most 60 lines, no `global` statement.

A file of more than 500 lines is named as a question ("is it one idea?"), never as a fault.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "bench", "examples")
SUFFIXES = (".py", ".cpp", ".h")
MAX_FUNCTION_LINES = 60
LONG_FILE_LINES = 500


def source_files(root: Path) -> list[Path]:
    """Every source file of the project, sorted."""
    found = (p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)
    return sorted(p for p in found if "__pycache__" not in p.parts)


def faults_in(path: Path, name: str) -> Iterator[str]:
    """Functions that are too long and `global` statements in one Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.Global):
            yield f"{name}:{node.lineno}: `global {', '.join(node.names)}`: pass state as an argument"


def check(root: Path) -> tuple[list[str], list[str]]:
    """(faults, questions), a line each."""
    faults: list[str] = []
    questions: list[str] = []
    for path in source_files(root):
        name = str(path.relative_to(root))
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > LONG_FILE_LINES:
            questions.append(f"{name}: {num_lines} lines: is it one idea?")
        if path.suffix == ".py":
            faults += faults_in(path, name)
    return faults, questions


def main() -> int:
    faults, questions = check(Path(__file__).resolve().parents[1])
    for line in [*questions, *faults]:
        print(line, file=sys.stderr)
    print(f"sizes: {len(faults)} faults, {len(questions)} long files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
