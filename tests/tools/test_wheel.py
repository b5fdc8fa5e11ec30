"""`make wheel`: what is in the wheels, that one runs without a compiler, and that aarch64 can be compiled for."""

from __future__ import annotations

import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from draftproof.runtime import compiling
from tests.slow import slow
from tools import wheel, wheel_proof

VARIANTS = compiling.VARIANTS.get(platform.machine(), ())
CROSS = "aarch64-linux-gnu-g++"
# Beside the C library and its loader a library asks for the compiler's unwinder alone, which Python's own modules need.
SYSTEM = ("libc.so", "libm.so", "ld-linux", "libgcc_s.so", "libpthread.so")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not VARIANTS:
        pytest.skip(f"no variant is known for {platform.machine()}")
    return wheel.build(tmp_path_factory.mktemp("dist"), compiler=None)


def libraries(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {
            Path(name).stem for name in archive.namelist() if "/prebuilt/" in name and name.endswith(".so")
        }


@slow
def test_a_wheel_of_this_machine_has_every_variant_and_says_what_it_runs_on(built: Path) -> None:
    assert libraries(built) == {variant.name for variant in VARIANTS}
    assert f"py3-none-{'manylinux' if wheel.has_auditwheel() else 'linux'}_" in built.name
    assert built.stem.endswith(platform.machine())


@slow
def test_its_libraries_need_nothing_but_the_system(built: Path, tmp_path: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path)
    found = sorted(tmp_path.rglob("*.so"))
    assert len(found) == len(VARIANTS)
    for path in found:
        shown = subprocess.run([readelf, "-d", str(path)], capture_output=True, text=True, check=True).stdout
        needed = [line.partition("[")[2].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line]
        assert needed and all(name.startswith(SYSTEM) for name in needed), needed


@slow
def test_it_runs_the_demo_where_there_is_no_compiler(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wheel_proof.main([str(built), "--rounds", "0"]) == 0
    assert "identical: yes" in capsys.readouterr().out


@slow
def test_a_wheel_for_any_machine_has_no_library(tmp_path: Path) -> None:
    path = wheel.build(tmp_path, compiler=None, pure=True)
    assert path.name.endswith("py3-none-any.whl") and not libraries(path)


@slow
def test_the_sources_compile_for_aarch64(tmp_path: Path) -> None:
    """`python tools/wheel.py --all` makes a wheel of it; this machine does not run it."""
    compiler = shutil.which(CROSS)
    if compiler is None:
        pytest.skip(f"not compiled for aarch64: there is no {CROSS}")
    for variant in compiling.VARIANTS["aarch64"]:
        flags = (*variant.flags, "-Werror")
        path = compiling.compile_library(compiler, flags, tmp_path, link=compiling.PORTABLE_LINK)
        assert path.read_bytes()[18:20] == b"\xb7\0"  # the ELF header's machine: AArch64
