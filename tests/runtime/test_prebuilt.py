"""The library of a wheel that is loaded: the fastest that the processor can run and the system load."""

from __future__ import annotations

import itertools
import platform
import shutil
from pathlib import Path

import pytest
import torch

from draftproof.runtime import compiling, environment, native
from draftproof.runtime.compiling import Variant

PLAIN = Variant("plain", (), frozenset(), widened=True)
QUICK = Variant("quick", (), frozenset({"fma"}), widened=True)
QUICKEST = Variant("quickest", (), frozenset({"fma", "dot"}), widened=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    source = folder / "tiny.cpp"
    source.write_text('extern "C" long long answer() { return 42; }\n')
    compiler = compiling.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    return compiling.compile_library(compiler, (), folder, sources=[source])


@pytest.fixture
def wheel(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The libraries of a wheel, on a processor that runs them all and has no compiler."""
    for variant in (PLAIN, QUICK, QUICKEST):
        shutil.copyfile(tiny, tmp_path / f"{variant.name}.so")
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    monkeypatch.setattr(compiling, "VARIANTS", {platform.machine(): (PLAIN, QUICK, QUICKEST)})
    monkeypatch.setattr(compiling, "processor", lambda: "a name fma dot")
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("DRAFTPROOF_NATIVE", raising=False)
    return tmp_path


def loaded(*, widened: bool = False) -> str:
    found = native.load(widened=widened)
    assert found is not None and found.function("answer", "", "i")() == 42
    assert found.description == f"{found.build_key}, from the wheel"
    return found.build_key.rpartition("-")[0]


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(("flags", "name"), [("fma dot", "quickest"), ("fma", "quick"), ("", "plain")])
def test_the_last_that_the_processor_can_run_is_loaded(
    monkeypatch: pytest.MonkeyPatch, flags: str, name: str
) -> None:
    monkeypatch.setattr(compiling, "processor", lambda: flags)
    assert loaded() == name


@pytest.mark.usefixtures("wheel")
def test_widened_is_one_without_instructions_for_bf16() -> None:
    assert loaded(widened=True) == "quick"


def test_one_that_cannot_be_loaded_is_passed_over(wheel: Path) -> None:
    (wheel / "quickest.so").write_bytes(b"made for another system")
    assert loaded() == "quick"


def test_where_none_can_be_run_the_compiler_is_looked_for(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel / "plain.so").unlink()
    monkeypatch.setattr(compiling, "processor", lambda: "a processor of long ago")
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler found"):
        assert native.load() is None


def test_a_certificate_is_for_one_variant_and_one_file(wheel: Path) -> None:
    """Though the processor is the same: two wheels, or two libraries of a wheel, share none."""
    keys = set()
    for variant in (QUICKEST, QUICK, QUICK):
        library = native.load()
        assert library is not None and library.build_key.startswith(f"{variant.name}-")
        keys.add(environment.key(torch.device("cpu"), library))
        (wheel / "quickest.so").unlink(missing_ok=True)
        with (wheel / "quick.so").open("ab") as file:
            file.write(b"\0")  # another file, which loads as well
    assert len(keys) == 3


def test_each_variant_demands_more_than_the_one_before() -> None:
    """So the last one that runs is the fastest."""
    for variants in compiling.VARIANTS.values():
        for one, other in itertools.pairwise(variants):
            assert one.needs < other.needs
