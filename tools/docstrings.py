"""Checks that docstrings and comments say what a thing is: none begins with "Of", "That" or "The same".

These beginnings leave out the noun ("Of one pass."), so a reader has to find it elsewhere.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("src", "tests", "tools", "bench", "examples")
NOUNLESS = re.compile(r"#?\s*(of|that|the same)\b", re.IGNORECASE)
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def faults_in(source: str, name: str) -> Iterator[str]:
    """Docstrings, and comments that begin a thought, which begin with one of the words."""
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, OWNERS):
            said = ast.get_docstring(node) or ""
            if NOUNLESS.match(said):
                yield f"{name}:{node.body[0].lineno}: docstring {said.splitlines()[0][:60]!r}: say what it is"
    after_comment = 0  # the line that would go on with the comment before it
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != after_comment and NOUNLESS.match(token.string):
                yield f"{name}:{line}: comment {token.string[:60]!r}: say what it is"
            after_comment = line + 1


def check(root: Path) -> list[str]:
    """The faults of every Python file of the project, a line each."""
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return [
        fault
        for path in files
        for fault in faults_in(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    ]


def main() -> int:
    faults = check(Path(__file__).resolve().parents[1])
    for line in faults:
        print(line, file=sys.stderr)
    print(f"docstrings: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
