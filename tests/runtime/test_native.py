"""Building and loading the library: once, safely, and portable."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.attention.compiled.backend import CompiledAttention
from draftproof.attention.reference import reference_attention
from draftproof.kernels import ops
from draftproof.matmul import certify, products
from draftproof.matmul.spec import Shape
from draftproof.runtime import compiling, native
from tests.slow import slow

Threads = Callable[[int], contextlib.AbstractContextManager[None]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY = 'extern "C" long long answer() { return 42; }\n'
CONVERSIONS = """
#include "{header}"
extern "C" void widen(const dp::fp16* from, float* to, int64_t count) {{
    for (int64_t i = 0; i < count; i += dp::LANES) dp::store(to + i, dp::load(from + i));
}}
extern "C" void narrow(const float* from, dp::fp16* to, int64_t count) {{
    for (int64_t i = 0; i < count; i += dp::LANES) dp::store(to + i, dp::load(from + i));
}}
"""
EVERY_FP16 = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.float16)


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one function instead of ours: builds in no time."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(compiling, "SOURCES", folder)
    monkeypatch.setattr(native, "PREBUILT", folder)
    monkeypatch.delenv("DRAFTPROOF_NATIVE", raising=False)
    return folder


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory, library: native.Library) -> native.Library:
    """The library as a machine without wide vectors builds it."""
    folder = tmp_path_factory.mktemp("portable")
    compiler = compiling.find_compiler()
    assert compiler is not None and library is not None
    return native.Library(compiling.compile_library(compiler, (), folder), "portable")


ONE_RUNTIME = """
from pathlib import Path
import torch
from draftproof.kernels import ops
from draftproof.runtime import native
library = native.load()
ops.select(torch.device("cpu"), library).silu_mul(torch.randn(200, 600))  # large enough for several threads
files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
assert str(library.path) in files
print(*{name for name in files if "gomp" in name or "iomp" in name or "libomp" in name}, sep="\\n")
"""


@slow
@pytest.mark.usefixtures("library")
def test_no_openmp_runtime_is_loaded_beside_torchs() -> None:
    """In a process of its own: what other tests import brings runtimes along."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    command = [sys.executable, "-c", ONE_RUNTIME]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 1, found


def test_the_second_load_builds_nothing(tiny_sources: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    for _ in range(2):
        found = native.load(lambda what, done, total: steps.append(what), cache_dir=tmp_path)
        assert found is not None and found.function("answer", "", "i")() == 42
    assert len(steps) == 2  # one file: at its start and at the end
    (tiny_sources / "tiny.cpp").write_text(TINY.replace("42", "43"))
    changed = native.load(cache_dir=tmp_path)
    assert changed is not None and changed.function("answer", "", "i")() == 43


@slow
def test_two_processes_may_build_at_once(tiny_sources: Path, tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        from pathlib import Path
        from draftproof.runtime import compiling, native
        compiling.SOURCES = Path({str(tiny_sources)!r})
        library = native.load(cache_dir=Path({str(tmp_path / "cache")!r}))
        raise SystemExit(library.function("answer", "", "i")() - 42)
    """)
    running = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half-built is left behind


def test_the_environment_variable_switches_it_off(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    assert native.load() is None
    assert not recwarn.list


def test_no_compiler_gives_none_and_one_warning(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "COMPILERS", ("no-such-compiler",))
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler found \(no-such-compiler\)") as caught:
        assert native.load() is None
    assert len(caught) == 1


def test_code_that_does_not_compile_gives_none_and_one_warning(tiny_sources: Path, tmp_path: Path) -> None:
    (tiny_sources / "tiny.cpp").write_text("this is not C++")
    with pytest.warns(UserWarning, match=r"could not be built.*error") as caught:
        assert native.load(cache_dir=tmp_path / "cache") is None
    assert len(caught) == 1
    assert not list((tmp_path / "cache").iterdir())


def test_a_spoilt_library_is_built_anew(tiny_sources: Path, tmp_path: Path) -> None:
    compiler = compiling.find_compiler()
    assert compiler is not None
    path = tmp_path / f"ops-{compiling.build_key(compiler)}.so"
    path.write_bytes(b"spoilt")
    found = native.load(cache_dir=tmp_path)
    assert found is not None and found.path == path
    assert found.function("answer", "", "i")() == 42


def test_a_flag_the_compiler_refuses_is_left_out(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "THIS_MACHINE", (("-march=no-such-machine",), ()))
    found = native.load(cache_dir=tmp_path)
    assert found is not None and found.function("answer", "", "i")() == 42


@slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_portable_build_is_slower_not_wrong(portable: native.Library, dtype: torch.dtype) -> None:
    table = ops.select(torch.device("cpu"), portable)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 100, generator=generator).to(dtype)
    weight = torch.randn(100, generator=generator).to(dtype)
    _close(table.rms_norm(x, weight, 1e-6), ops.TORCH.rms_norm(x, weight, 1e-6))
    _close(table.silu_mul(x), ops.TORCH.silu_mul(x))
    logits = torch.randn(3, 5000, generator=generator)
    _close(table.log_normalizer(logits), logits.logsumexp(-1))


@slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_portable_attention_is_right_and_row_safe(portable: native.Library, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(12, 2, 16, 32, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(9, 4, 32, generator=generator).to(dtype)
    blocks, slots = torch.arange(1, 11, dtype=torch.int32).view(2, 5), torch.arange(9) % 2
    ends = torch.tensor([1, 16, 17, 63, 64, 65, 79, 0, 80])
    attend = CompiledAttention(portable)
    together = attend(q, k, v, blocks, slots, ends, 0, 0.2)
    _close(together, reference_attention(q, k, v, blocks, slots, ends, 0, 0.2))
    for i in range(9):
        one = attend(q[i : i + 1], k, v, blocks, slots[i : i + 1], ends[i : i + 1], 0, 0.2)
        assert torch.equal(one[0], together[i])


def _close(actual: Tensor, expected: Tensor) -> None:
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_portable_product_is_exact(portable: native.Library, dtype: torch.dtype) -> None:
    x, weight = certify.cancelling(20, Shape(70, 130, dtype, dtype, False), seed=5)
    linear_fn = products.CompiledLinear(portable, weight, None, torch.float32)
    together = linear_fn(x)
    assert torch.equal(torch.cat([linear_fn(row) for row in x.split(1)]), together)
    torch.testing.assert_close(together, x.double().matmul(weight.double().T).float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("build", ["portable", "library"])
def test_a_product_takes_fp16_numbers_of_every_kind(request: pytest.FixtureRequest, build: str) -> None:
    weight, one = EVERY_FP16[:, None], torch.ones(1, 1, dtype=torch.float16)
    for out_dtype in (torch.float32, torch.float16):
        found = products.CompiledLinear(request.getfixturevalue(build), weight, None, out_dtype)(one)
        torch.testing.assert_close(found[0], EVERY_FP16.to(out_dtype), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("flag", ["", "-march=x86-64-v3", "-march=native"])
def test_fp16_is_widened_and_narrowed_as_torch_does_in_every_build(
    library: native.Library, tmp_path: Path, flag: str
) -> None:
    """With wide vectors, with F16C and in plain C++; also where subnormal numbers of fp32 are flushed to zero."""
    if flag == "-march=x86-64-v3" and not {"avx2", "f16c"} <= set(compiling.processor().split()):
        pytest.skip("this processor has no F16C")
    (tmp_path / "convert.cpp").write_text(
        CONVERSIONS.format(header=compiling.SOURCES / "runtime" / "common.h")
    )
    compiler, flags = compiling.find_compiler(), (flag,) if flag else ()
    assert compiler is not None
    built = compiling.compile_library(compiler, flags, tmp_path, sources=[tmp_path / "convert.cpp"])
    widen, narrow = (native.Library(built, "").function(name, "ppi") for name in ("widen", "narrow"))
    wide, numbers = EVERY_FP16.float(), _around_every_fp16()
    expected = numbers.half()
    for flush in (False, True):
        found_wide, found = torch.empty_like(wide), torch.empty_like(expected)
        torch.set_flush_denormal(flush)
        try:
            widen(EVERY_FP16.data_ptr(), found_wide.data_ptr(), wide.numel())
            narrow(numbers.data_ptr(), found.data_ptr(), numbers.numel())
        finally:
            torch.set_flush_denormal(False)
        _same_bits(found_wide, wide)
        _same_bits(found, expected)


def _around_every_fp16() -> Tensor:
    """fp32 numbers: all of fp16, the middles between neighbours and what lies beside them, and random bits."""
    numbers = EVERY_FP16.float().sort().values
    numbers = numbers[numbers.isfinite()]
    middles = torch.cat([(numbers[1:] + numbers[:-1]) / 2, torch.tensor([65520.0, -65520.0])])
    up, down = torch.full_like(middles, torch.inf), torch.full_like(middles, -torch.inf)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).to(torch.int32)
    parts = [numbers, middles, middles.nextafter(up), middles.nextafter(down), bits.view(torch.float32)]
    parts.append(torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40]))
    every = torch.cat(parts)
    return torch.nn.functional.pad(every, (0, -every.numel() % 16))


def _same_bits(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, but that any NaN will do for another."""
    as_int = torch.int32 if found.dtype == torch.float32 else torch.int16
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(found.view(as_int)[numbers], expected.view(as_int)[numbers])
