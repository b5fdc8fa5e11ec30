"""The shape of the code: where a method's name may appear, who imports whom and what that costs, words of files."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools import sizes

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
LARGE = 1 << 20
FREE = (
    "checkpoints",
    "cli",
    "bench",
    "train",
)  # folders in which formats, examples and kinds of heads are named


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
    plain = re.sub("[-_]", "", word.lower())
    for key in ("norepeatngram", "mtpnumhiddenlayers"):  # keys of files that name one, too
        plain = plain.replace(key, "")
    return method in plain


def misplaced(source: str, path: str) -> list[str]:
    """Where `source`, to stand at `path` in the package, names a method that it has no business to know."""
    folder, stem = path.split("/")[0], Path(path).stem
    if folder in FREE or path in ("drafters/registry.py", "drafters/vllm_names.py"):
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
        ("engine/core.py", "if spec.method == 'eagle3': pass", 2),  # eagle is in it, too
        ("engine/core.py", "x = Eagle3Head", 2),
        ("engine/core.py", "def run_n_gram(): ...", 1),
        ("engine/core.py", "f'{x} is dflash'", 1),
        ("engine/core.py", "import draftproof.drafters.mtp", 1),
        ("engine/core.py", "name = 'suffix'", 1),
        ("engine/core.py", "p.suffix", 0),
        ("engine/core.py", "name = 'replay'", 1),
        ("engine/core.py", "graph.replay()", 0),
        ("engine/core.py", '"""Such as eagle3."""\nx = 1  # mtp', 0),
        ("engine/core.py", "raise ValueError('give a method, such as ngram')", 0),
        ("engine/core.py", "no_repeat_ngram_size = 0", 0),
        ("drafters/eagle3.py", "class Eagle3Head: ...", 0),
        ("drafters/eagle3.py", "x = 'dflash'", 1),
        ("drafters/rows.py", "x = 'mtp'", 1),
        ("drafters/registry.py", "x = 'mtp'", 0),
        ("checkpoints/speculators.py", "x = 'mtp'", 0),
    ],
)
def test_a_misplaced_name_is_found(path: str, source: str, count: int) -> None:
    assert len(misplaced(source, path)) == count


def modules() -> dict[str, Path]:
    """The package's modules by name; a folder's name is that of its `__init__.py`."""
    paths = {path.relative_to(PACKAGE.parent).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in paths.items()}


def imports_of(source: str, known: Collection[str]) -> set[str]:
    """The modules among `known` that a source names, inside functions and for type checkers alone too."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in known else node.module for full in whole.values()}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(known)


def circles(needs: dict[str, set[str]]) -> set[str]:
    """What is left of modules when those that need no other are taken away again and again."""
    while free := {name for name, others in needs.items() if not others}:
        needs = {name: others - free for name, others in needs.items() if name not in free}
    return set(needs)


def test_no_modules_need_each_other() -> None:
    files = modules()
    del files["draftproof"]  # it only offers names of others, imported when they are asked for
    needs = {name: imports_of(path.read_text("utf-8"), files) - {name} for name, path in files.items()}
    assert sum(map(len, needs.values())) > 500, "imports were found"
    assert not circles(needs), "these import each other, or what does"


def test_a_circle_is_found() -> None:
    sources = {
        "p": "",
        "p.a": "import p.b",
        "p.b": "def f():\n    from p.c import g",
        "p.c": "from p import a",
        "p.d": "from p.e import x",
        "p.e": "from p import y",
    }
    needs = {name: imports_of(source, sources) - {name} for name, source in sources.items()}
    assert circles(needs) == {"p.a", "p.b", "p.c"}


def header(path: Path) -> str:
    """The docstring of a Python file, the first comment of a C++ file; empty where there is none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    first = text.split("\n", 1)[0]
    return first.removeprefix("//") if first.startswith("//") else ""


def test_every_file_says_what_it_owns() -> None:
    files = [p for p in sizes.source_files(ROOT) if p.is_relative_to(PACKAGE) and p.name != "__init__.py"]
    assert len(files) > 100
    assert [str(path) for path in files if not header(path).strip()] == []


def test_architecture_page_describes_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{room}/` |" not in page} == set()


def test_functions_are_short_and_nothing_is_global() -> None:
    faults, _ = sizes.check(ROOT)
    assert faults == []


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "draftproof" / "engine"
    folder.mkdir(parents=True)
    body = "    x = 1\n" * sizes.MAX_FUNCTION_LINES
    (folder / "long.py").write_text(
        f"def f():\n{body}\ndef g():\n    global x\n" + "\n" * sizes.LONG_FILE_LINES
    )
    faults, questions = sizes.check(tmp_path)
    assert [fault.split(": ", 1)[1] for fault in faults] == [
        f"f has {sizes.MAX_FUNCTION_LINES + 1} lines, at most {sizes.MAX_FUNCTION_LINES}",
        "`global x`: pass state as an argument",
    ]
    assert len(questions) == 1 and questions[0].endswith("is it one idea?")


def test_no_large_tensor_is_in_the_repository_twice() -> None:
    """A head's file leaves out the tables of its target; tests that need them put them in."""
    owners: dict[bytes, str] = {}
    for path in (*PACKAGE.rglob("*.safetensors"), *ROOT.glob("tests/data/**/*.safetensors")):
        for name, tensor in load_file(path).items():
            if tensor.nbytes >= LARGE:
                content = hashlib.sha256(tensor.flatten().view(torch.uint8).numpy()).digest()
                here = f"{path.relative_to(ROOT)}: {name}"
                assert owners.setdefault(content, here) == here
    assert len(owners) > 5


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
