"""The shape of the code: where a method's name may appear, what importing costs, which files are described."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import sizes, structure

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "draftproof"
METHODS = (
    "eagle",
    "eagle3",
    "peagle",
    "dflash",
    "dflash2",
    "dspark",
    "xpress",
    "suffix",
    "ngram",
    "pard",
    "mtp",
    "replay",
)
METHODS += ("gemma4mtp", "gemma4assistant")  # Gemma alone is a family of targets
ORDINARY = {"suffix": "Suffix", "replay": "Replay"}  # words of their own: Path.suffix, graph.replay()
FREE = ("checkpoints", "cli", "bench")  # folders in which formats and examples are named


def prose(tree: ast.AST) -> set[int]:
    """ids of the nodes that hold words for people: docstrings, and the texts of errors that are raised."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, owners)]
    found = {id(b[0].value) for b in bodies if b and isinstance(b[0], ast.Expr)}
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return found | {id(n) for exc in raised for n in ast.walk(exc) if isinstance(n, ast.Constant)}


def words(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, name or text, whether it is text) of all code; comments and prose are not in it."""
    skipped = prose(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for _, value in ast.iter_fields(node):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and id(node) not in skipped:
                    yield line, name, isinstance(node, ast.Constant)


def names_method(word: str, is_text: bool, method: str) -> bool:
    if method in ORDINARY:  # a method only as a whole string or in a class's name
        return word == method if is_text else word.startswith(ORDINARY[method])
    return method in re.sub("[-_]", "", word.lower()).replace("norepeatngram", "")  # a setting of generation


def misplaced(source: str, path: str) -> list[str]:
    """Where `source`, to stand at `path` in the package, names a method that it has no business to know."""
    folder, stem = path.split("/")[0], Path(path).stem
    if folder in FREE or path == "drafters/registry.py":
        return []
    own = [m for m in METHODS if folder == "drafters" and (m in stem or stem in m)]
    return [
        f"{path}:{line}: {word!r} names {method}"
        for line, word, is_text in words(ast.parse(source))
        for method in METHODS
        if method not in own and names_method(word, is_text, method)
    ]


def test_a_methods_name_appears_in_its_own_file_only() -> None:
    found = [
        fault
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in misplaced(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("engine/engine.py", "if spec.method == 'eagle3': pass", 2),  # eagle is in it, too
        ("engine/engine.py", "x = Eagle3Head", 2),
        ("engine/engine.py", "def run_n_gram(): ...", 1),
        ("engine/engine.py", "f'{x} is dflash'", 1),
        ("engine/engine.py", "import draftproof.drafters.mtp", 1),
        ("engine/engine.py", "name = 'suffix'", 1),
        ("engine/engine.py", "p.suffix", 0),
        ("engine/engine.py", "name = 'replay'", 1),
        ("engine/engine.py", "graph.replay()", 0),
        ("engine/engine.py", '"""Such as eagle3."""\nx = 1  # mtp', 0),
        ("engine/engine.py", "raise ValueError('give a method, such as ngram')", 0),
        ("engine/engine.py", "no_repeat_ngram_size = 0", 0),
        ("drafters/eagle3.py", "class Eagle3Head: ...", 0),
        ("drafters/eagle3.py", "x = 'dflash'", 1),
        ("drafters/rows.py", "x = 'mtp'", 1),
        ("drafters/registry.py", "x = 'mtp'", 0),
        ("checkpoints/speculators.py", "x = 'mtp'", 0),
    ],
)
def test_a_misplaced_name_is_found(path: str, source: str, count: int) -> None:
    assert len(misplaced(source, path)) == count


def test_structure_page_lists_exactly_the_files_there_are() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(structure.package_files(PACKAGE)), "run `make structure`"


def test_every_file_says_what_it_owns() -> None:
    silent = [name for name in structure.package_files(PACKAGE) if not structure.summary(PACKAGE / name)]
    assert [name for name in silent if not name.endswith(("__init__.py", "py.typed"))] == []


def test_sizes_stay_in_budget() -> None:
    faults, used = sizes.check(ROOT)
    assert faults == []
    assert all(lines > 1000 for lines in used.values())


def test_what_is_over_budget_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "draftproof" / "engine"
    folder.mkdir(parents=True)
    body = "    x = 1\n" * sizes.MAX_FUNCTION_LINES
    (folder / "long.py").write_text(
        f"def f():\n{body}\ndef g():\n    global x\n" + "\n" * sizes.MAX_FILE_LINES
    )
    faults, used = sizes.check(tmp_path)
    assert [fault.split(": ", 1)[1] for fault in faults] == [
        f"{used[sizes.CORE]} lines, at most {sizes.MAX_FILE_LINES}",
        f"f has {sizes.MAX_FUNCTION_LINES + 1} lines, at most {sizes.MAX_FUNCTION_LINES}",
        "`global x`: pass state as an argument",
    ]


def test_each_budget_counts_its_folders(tmp_path: Path) -> None:
    for folder in ("kernels/gpu", "drafters", "checkpoints", "engine", "cli"):
        path = tmp_path / "src" / "draftproof" / folder
        path.mkdir(parents=True)
        (path / "a.py").write_text("x = 1\n" * 10)
    assert sizes.check(tmp_path)[1] == {"kernels": 10, "methods and formats": 20, "models": 0, sizes.CORE: 10}


def test_a_budget_that_is_spent_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "draftproof" / "drafters"
    folder.mkdir(parents=True)
    most = sizes.BUDGETS["methods and formats"][1]
    for number in range(most // 400 + 1):
        (folder / f"m{number}.py").write_text("x = 1\n" * 400)
    (fault,) = sizes.check(tmp_path)[0]
    assert fault.startswith("methods and formats: ") and fault.endswith(f"at most {most}")


def test_a_methods_file_and_a_reader_are_kept_shorter(tmp_path: Path) -> None:
    """Beside the rows of the registry, a file of the same folder may be as long as any."""
    package = tmp_path / "src" / "draftproof"
    for folder in ("drafters", "checkpoints"):
        (package / folder).mkdir(parents=True)
    rows = (
        "METHODS = {'head': Method(build=head.build), 'other': Method(build=other.build, needs_model=False)}"
    )
    (package / "drafters" / "registry.py").write_text(rows)
    lengths = {
        "drafters/head.py": sizes.MAX_METHOD_LINES + 1,
        "drafters/other.py": sizes.MAX_METHOD_LINES,
        "drafters/guard.py": sizes.MAX_METHOD_LINES + 1,
        "checkpoints/flat.py": sizes.MAX_READER_LINES + 1,
        "checkpoints/nested.py": sizes.MAX_READER_LINES,
    }
    for name, lines in lengths.items():
        (package / name).write_text("x = 1\n" * lines)
    assert sizes.check(tmp_path)[0] == [
        f"src/draftproof/checkpoints/flat.py: {sizes.MAX_READER_LINES + 1} lines, at most {sizes.MAX_READER_LINES}",
        f"src/draftproof/drafters/head.py: {sizes.MAX_METHOD_LINES + 1} lines, at most {sizes.MAX_METHOD_LINES}",
    ]


def test_every_methods_file_is_known_to_the_check() -> None:
    from draftproof.drafters.registry import METHODS

    modules = {sys.modules[method.build.__module__].__file__ for method in METHODS.values()}
    assert sizes.method_files(ROOT) == {Path(str(file)) for file in modules} and len(modules) == len(METHODS)


def test_import_brings_no_slow_library() -> None:
    code = "import sys, draftproof; print(*[m for m in sys.argv[1:] if m in sys.modules])"
    slow = ["transformers", "huggingface_hub", "rich", "tqdm", "jinja2", "scipy", "pandas"]
    done = subprocess.run([sys.executable, "-c", code, *slow], capture_output=True, text=True, check=True)
    known_to_torch = subprocess.run(
        [sys.executable, "-c", code.replace("draftproof", "torch"), *slow],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) <= set(known_to_torch.stdout.split())


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from draftproof.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
