"""Writes docs/structure.md, the annotated file tree, from each file's header; `--check` only compares."""

from __future__ import annotations

import ast
import sys
from itertools import groupby
from pathlib import Path

SUFFIXES = (".py", ".cpp", ".h", ".typed")
INTRO = """# Where things are

One line for each source file of the package, taken from its header. `make structure` rewrites this page.
"""


def package_files(package: Path) -> list[str]:
    """Paths of all source files relative to the package, in order of folders."""
    found = [p.relative_to(package) for p in package.rglob("*") if p.suffix in SUFFIXES]
    found = [p for p in found if "__pycache__" not in p.parts]
    return [str(p) for p in sorted(found, key=lambda p: (len(p.parts) > 1, p.parts))]


def summary(path: Path) -> str:
    """The first paragraph of a file's header, on one line; empty where there is none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        header = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = text.splitlines()
        header = "\n".join(line.lstrip("/ ") for line in lines[:1] if line.startswith("//"))
    return " ".join(header.split("\n\n")[0].split())


def render(package: Path) -> str:
    """The page's whole text."""
    parts = [INTRO]
    for folder, names in groupby(package_files(package), key=lambda name: str(Path(name).parent)):
        title = "draftproof" if folder == "." else folder
        parts.append(f"\n## {title}/\n\n| file | what it owns |\n|---|---|\n")
        parts += [f"| `{name}` | {summary(package / name)} |\n" for name in names]
    return "".join(parts)


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    page, text = root / "docs" / "structure.md", render(root / "src" / "draftproof")
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print("docs/structure.md is out of date: run `make structure`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
