"""The exact planner: rows that do not depend on their batch, certificates that mean something, and the cache.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import json
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.kernels.exactness import NoPowerError
from draftproof.matmul import certify, cpu_planner, linear, products
from draftproof.matmul.linear import LinearPlanner, PackedLinear
from draftproof.matmul.plan_cache import BucketLinear
from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.runtime import native
from tests.slow import few, slow

Threads = Callable[[int], contextlib.AbstractContextManager[None]]

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_COUNTS = (*range(1, 71), 100, 129, 257, 513, 600)
MAX_ROWS = 600
INPUTS = 520  # more than one of everybody's blocks


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["library", "onednn", "plain", "nothing"])
def find_candidates(request: pytest.FixtureRequest) -> linear.FindCandidates:
    """The candidates of a machine with a compiler, with oneDNN only, with neither, and with no exact product at all."""
    if request.param == "library":
        request.getfixturevalue("library")
        return products.candidates
    if request.param == "onednn":
        return lambda device, dtype, out, _: products.candidates(device, dtype, out, None)
    if request.param == "plain":
        return lambda device, dtype, out, _: products.candidates(device, dtype, out, None)[-1:]
    return lambda *_: [Candidate("moody", moody)]


def moody(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """Wrong on purpose: a row's order of summation depends on its place in the batch."""

    def run(x_TK: Tensor) -> Tensor:
        flipped = F.linear(x_TK.float().flip(1), weight_NK.float().flip(1), bias_N and bias_N.float())
        straight = F.linear(x_TK.float(), weight_NK.float(), bias_N and bias_N.float())
        odd = torch.arange(x_TK.shape[0])[:, None] % 2 == 1
        return torch.where(odd, flipped, straight).to(out_dtype)

    return run


def split_k(weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
    """Wrong on purpose: half of K, then the other half."""
    half = weight_NK.shape[1] // 2
    first, second = weight_NK[:, :half].float(), weight_NK[:, half:].float()

    def run(x_TK: Tensor) -> Tensor:
        sums = x_TK[:, :half].float() @ first.T + x_TK[:, half:].float() @ second.T
        return (sums if bias_N is None else sums + bias_N.float()).to(out_dtype)

    return run


def make(
    folder: Path,
    find_candidates: linear.FindCandidates = products.candidates,
    library: native.Library | None = None,
    max_rows: int = MAX_ROWS,
    progress: native.Progress | None = None,
    exact: bool = True,
) -> LinearPlanner:
    return LinearPlanner(
        CPU,
        exact=exact,
        max_rows=max_rows,
        library=library,
        cache_dir=folder,
        progress=progress,
        find_candidates=find_candidates,
    )


def check_rows_are_independent(product: PackedLinear, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    """Bit for bit on data where sums cancel, which shows any change of order."""
    x_TK, _ = certify.cancelling(max(counts), product.shape, seed=5)
    alone = torch.cat([product(x_TK[i : i + 1]) for i in range(max(counts))])
    for rows in counts:
        assert torch.equal(product(x_TK[:rows]), alone[:rows]), f"{rows} rows"
    shifted = x_TK[3:].contiguous()
    assert torch.equal(product(shifted[:9]), alone[3:12])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_number_of_rows(
    find_candidates: linear.FindCandidates, request: pytest.FixtureRequest, tmp_path: Path, dtype: torch.dtype
) -> None:
    kind = request.node.callspec.params["find_candidates"]
    library = request.getfixturevalue("library") if kind == "library" else None
    planner = make(tmp_path, find_candidates, library)
    shapes = [(96, INPUTS, None), (40, INPUTS, torch.float32)]
    made = []
    for outputs, inputs, out_dtype in shapes:
        _, weight = certify.cancelling(1, Shape(outputs, inputs, dtype, dtype, False), seed=5)
        made.append(planner.pack(weight, out_dtype=out_dtype))
    expectation = (
        pytest.warns(UserWarning, match="row by row") if kind == "nothing" else contextlib.nullcontext()
    )
    with expectation:
        planner.certify()
    for product in made:
        check_rows_are_independent(product, dtype, ROW_COUNTS if kind != "nothing" else (1, 2, 3, 8, 13))
        assert (planner.report()[0].candidate == "row by row") == (kind == "nothing")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs"), few([(33, 51), (1, 7), (64, 64), (100, 1), (257, 130)], (33, 51), (1, 7))
)
def test_products_are_right_at_odd_sizes_with_bias_and_wide_output(
    find_candidates: linear.FindCandidates,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
) -> None:
    kind = request.node.callspec.params["find_candidates"]
    library = request.getfixturevalue("library") if kind == "library" else None
    planner = make(tmp_path, find_candidates if kind != "nothing" else _only_slow, library, max_rows=8)
    weight, bias = randn(outputs, inputs, dtype=dtype), randn(outputs, dtype=dtype, seed=1)
    for out_dtype in {dtype, torch.float32}:
        for given in (None, bias):
            product = planner.pack(weight, given, out_dtype=out_dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                planner.certify()
            for rows in (0, 1, 2, 9):
                x = randn(rows, inputs, dtype=dtype, seed=2)
                expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
                found = product(x)
                assert found.dtype == out_dtype and found.shape == (rows, outputs)
                bound = 1e-4 if out_dtype == torch.float32 else 3e-2
                torch.testing.assert_close(found.double(), expected, atol=bound * inputs**0.5, rtol=bound)


def _only_slow(*_: object) -> list[Candidate]:
    return [products.SLOW]


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["library", "onednn"])
def test_processes_with_other_numbers_of_threads_agree(
    request: pytest.FixtureRequest, tmp_path: Path, threads: Threads, dtype: torch.dtype, kind: str
) -> None:
    library = request.getfixturevalue("library") if kind == "library" else None
    shape = Shape(192, INPUTS, dtype, dtype, False)
    x, weight = certify.cancelling(70, shape, seed=5)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            planner = make(tmp_path / str(count), library=library, max_rows=64)
            product = planner.pack(weight)
            planner.certify()
            found.append(torch.cat([product(x[:1]), product(x[1:7]), product(x[7:])]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_compiled_product_does_not_depend_on_threads(library: native.Library, threads: Threads) -> None:
    for dtype in DTYPES:
        x, weight = certify.cancelling(40, Shape(700, INPUTS, dtype, dtype, False), seed=5)
        linear_fn = products.CompiledLinear(library, weight, None, torch.float32)
        with threads(1):
            expected = torch.cat([linear_fn(row) for row in x.split(1)])
        for count in (1, 2, 3, 6, 14):
            with threads(count):
                assert torch.equal(linear_fn(x), expected)


def test_unaligned_and_strided_rows_give_the_same_bits(
    find_candidates: linear.FindCandidates, tmp_path: Path
) -> None:
    planner = make(tmp_path, find_candidates, max_rows=8)
    product = planner.pack(randn(48, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner.certify()
    x = randn(8, 64)
    expected = product(x)
    memory = torch.empty(8 * 64 + 1)
    memory[1:] = x.flatten()
    assert torch.equal(product(memory[1:].view(8, 64)), expected)
    assert torch.equal(product(x.T.contiguous().T), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_split_over_k_gets_no_certificate(dtype: torch.dtype) -> None:
    candidates = [*products.candidates(CPU, dtype, dtype, None)[:1], Candidate("split", split_k)]
    found = certify.certify(Shape(64, INPUTS, dtype, dtype, False), candidates, 64, CPU)
    assert found["split"] == ()
    assert found[candidates[0].name]


def test_a_way_that_splits_k_at_many_rows_is_kept_below(tmp_path: Path) -> None:
    """As cuBLAS does the other way round: one way, two orders, chosen by the number of rows."""

    def sometimes(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        plain = products.candidates(CPU, torch.float32, torch.float32, None)[0].make(weight, bias, out_dtype)
        split = split_k(weight, bias, out_dtype)
        return lambda x: split(x) if x.shape[0] >= 24 else plain(x)

    planner = make(tmp_path, lambda *_: [Candidate("sometimes", sometimes)], max_rows=64)
    _, weight = certify.cancelling(1, Shape(64, INPUTS, torch.float32, torch.float32, False), seed=5)
    product = planner.pack(weight)
    planner.certify()
    assert {row.candidate for row in planner.report()} == {"sometimes"}
    check_rows_are_independent(product, torch.float32, (2, 3, 8, 16, 17, 24, 33, 64, 70))


def test_a_certificate_that_costs_more_than_it_gains_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that looks fastest, but is for 24 rows and more: decoding would fill it up with zeros."""

    class Timed:
        def __init__(self, linear_fn: LinearFn, us: list[float]) -> None:
            self._linear_fn, self.us = linear_fn, us

        def __call__(self, x_TK: Tensor) -> Tensor:
            return self._linear_fn(x_TK)

    def always(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        return Timed(products.SLOW.make(weight, bias, out_dtype), [2.0, 2.0, 2.0, 2.0])

    def sometimes(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        right, wrong = (make(weight, bias, out_dtype) for make in (products.SLOW.make, split_k))
        return Timed(lambda x: right(x) if len(x) >= 24 else wrong(x), [1.0, 1.0, 1.0, 1.0])

    def times(linear_fn: LinearFn, x_TK: Tensor, rows: tuple[int, ...]) -> list[float]:
        return linear_fn.us  # type: ignore[attr-defined]

    def planned(candidate: Candidate, linear_fn: LinearFn, buckets: Sequence[int]) -> LinearFn:
        return Timed(
            linear_fn, [9.0, 9.0, 1.0, 1.0] if candidate.name == "sometimes" else [2.0, 2.0, 2.0, 2.0]
        )

    monkeypatch.setattr(cpu_planner, "_times", times)
    monkeypatch.setattr(cpu_planner, "planned", planned)
    shape = Shape(64, INPUTS, torch.float32, torch.float32, False)
    choice = cpu_planner.plan(shape, [Candidate("always", always), Candidate("sometimes", sometimes)])
    assert choice.candidate == "always"
    assert {v.candidate: v.exact == 1 for v in choice.results} == {"always": True, "sometimes": False}


def test_what_is_exact_by_construction_is_not_left_to_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's timings would stay on the disk, and steps would never be recorded."""
    slow = Candidate("ours", lambda w, b, out: products.SLOW.make(w, b, out), any_rows=True)
    quick = Candidate("theirs", lambda w, b, out: products.SLOW.make(w, b, out))
    us = iter([9.0, 1.0] * 9)
    monkeypatch.setattr(cpu_planner, "_times", lambda linear_fn, x_TK, rows: [next(us)] * len(rows))
    shape = Shape(64, INPUTS, torch.float32, torch.float32, False)
    assert cpu_planner.plan(shape, [slow, quick]).candidate == "ours"
    assert cpu_planner.plan(shape, [slow, quick], thorough=True).candidate == "ours"


def test_data_that_cannot_see_a_split_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def harmless(rows: int, shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
        return randn(rows, shape.inputs, dtype=shape.dtype), randn(
            shape.outputs, shape.inputs, dtype=shape.dtype
        )

    monkeypatch.setattr(certify, "cancelling", harmless)
    planner = make(tmp_path)
    planner.pack(randn(32, 64, dtype=torch.bfloat16))
    with pytest.raises(NoPowerError, match="unseen"):
        planner.certify()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_test_data_sees_a_split_at_every_width(dtype: torch.dtype) -> None:
    for inputs in (*range(1, 130), 512, 4096):
        for seed in certify.SEEDS:
            certify.prove_power(Shape(64, inputs, dtype, dtype, False), seed)


def test_a_second_start_reads_the_certificates(tmp_path: Path) -> None:
    steps: list[str] = []
    weight = randn(48, 64)
    found = []
    for _ in range(2):
        planner = make(tmp_path, max_rows=16, progress=lambda what, done, total: steps.append(what))
        product = planner.pack(weight)
        planner.certify()
        found.append((product(randn(5, 64, seed=3)), planner.report(), len(steps)))
    assert found[0][2] == found[1][2] > 0
    assert found[0][1] == found[1][1]
    assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"48x64 float32>float32": 3}',
        '{"48x64 float32>float32": {"candidate": "packed"}}',
        "\x00",
    ],
)
def test_a_spoilt_cache_is_made_anew(tmp_path: Path, text: str) -> None:
    def start() -> int:
        steps: list[int] = []
        planner = make(tmp_path, max_rows=16, progress=lambda what, done, total: steps.append(done))
        planner.pack(randn(48, 64))
        planner.certify()
        return len(steps)

    fresh = start()
    (path,) = tmp_path.glob("certificates-*.json")
    path.write_text(text)
    assert start() == fresh > 0
    assert json.loads(path.read_text())
    assert start() == 0


def test_a_way_that_is_gone_is_certified_anew(tmp_path: Path) -> None:
    planner = make(tmp_path, max_rows=16)
    planner.pack(randn(48, 64))
    planner.certify()
    (path,) = tmp_path.glob("certificates-*.json")
    path.write_text(
        path.read_text().replace(f'"candidate": "{planner.report()[0].candidate}"', '"candidate": "gone"')
    )
    planner = make(tmp_path, max_rows=16)
    product = planner.pack(randn(48, 64))
    planner.certify()
    assert product(randn(2, 64)).shape == (2, 48)


def test_a_cache_folder_that_cannot_be_written_does_no_harm_and_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    planner = make(blocked / "below", max_rows=16)
    product = planner.pack(randn(48, 64))
    with pytest.warns(
        UserWarning, match="below: cannot be written .*; set XDG_CACHE_HOME to a folder"
    ) as told:
        planner.certify()
    assert len(told) == 1
    assert product(randn(2, 64)).shape == (2, 48)


def test_inexact_products_need_no_certificate(tmp_path: Path) -> None:
    steps: list[str] = []
    planner = make(tmp_path, progress=lambda what, done, total: steps.append(what))
    drafter = planner.pack(randn(48, 64), exact=False)
    torch.testing.assert_close(drafter(randn(3, 64, seed=1)), randn(3, 64, seed=1) @ randn(48, 64).T)
    planner.certify()
    assert not steps
    free = make(tmp_path, exact=False).pack(randn(48, 64))
    assert free(randn(3, 64)).shape == (3, 48)


def test_the_original_weight_is_let_go(tmp_path: Path, library: native.Library) -> None:
    planner = make(tmp_path, library=library, max_rows=8)
    weight = randn(48, 64)
    gone = weakref.ref(weight)
    product = planner.pack(weight)
    del weight
    planner.certify()
    if planner.report()[0].candidate == "plain":
        pytest.skip("the plain product keeps its weight")
    assert gone() is None
    assert product(randn(2, 64)).shape == (2, 48)


def test_a_product_used_before_certification_says_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="certify"):
        make(tmp_path).pack(randn(48, 64))(randn(2, 64))


def test_the_report_tells_what_exactness_costs(tmp_path: Path, library: native.Library) -> None:
    planner = make(tmp_path, library=library, max_rows=64)
    planner.pack(randn(48, 64, dtype=torch.bfloat16), out_dtype=torch.float32)
    planner.certify()
    rows = planner.report()
    assert [row.rows for row in rows] == [2, 8, 64, 512]
    assert {row.shape for row in rows} == {"48x64 bfloat16>float32"}
    assert all(row.microseconds > 0 and row.cost >= 0 for row in rows)


def test_rows_are_split_rather_than_half_a_bucket_filled() -> None:
    seen: list[int] = []

    def linear_fn(x_TK: Tensor) -> Tensor:
        seen.append(len(x_TK))
        return 2 * x_TK

    product = BucketLinear({"a": linear_fn}, {"a": False}, (4, 8, 16), ("a", "a", "a"))
    for rows, expected in ((3, [4]), (8, [8]), (9, [8, 4]), (11, [16]), (20, [16, 4])):
        seen.clear()
        x_TK = torch.randn(rows, 5)
        assert torch.equal(product(x_TK), 2 * x_TK) and seen == expected
    x_TK, product = torch.randn(341, 5), BucketLinear({"a": linear_fn}, {"a": False}, (1, 512), ("a", "a"))
    assert torch.equal(product(x_TK), 2 * x_TK)


def test_a_gpu_tries_what_suits_the_weight_and_the_rows() -> None:
    gpu_linear = pytest.importorskip("draftproof.matmul.triton.linear")
    dtype = torch.bfloat16
    whole, cut = Shape(6144, 4096, dtype, dtype, False), Shape(4096, 4096, dtype, dtype, False)
    names = [*(tile.name for tile in gpu_linear.tiles(dtype)), "cublas"]
    tried = {s: {name for name in names if gpu_linear.suits(name, s, 1)} for s in (whole, cut)}
    assert not any("split_k" in name for name in tried[whole])
    assert any(" split_k" in name for name in tried[cut])
    assert all("cublas" in found for found in tried.values())
    assert all(" 16x" in name or "cublas" in name for found in tried.values() for name in found)


def test_a_gpu_that_copies_no_tiles_or_has_less_memory_gets_other_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_linear = pytest.importorskip("draftproof.matmul.triton.linear")

    def names() -> set[str]:
        found = gpu_linear.candidates(torch.device("cpu"), torch.bfloat16)
        assert found[0].name == gpu_linear.TILES_HALF[0].name  # the reference
        return {candidate.name for candidate in found}

    copied, older = (
        {tile.name for tile in tiles} for tiles in (gpu_linear.TILES_TMA, gpu_linear.TILES_OLDER)
    )
    assert copied <= names() and not older & names()
    monkeypatch.setattr(gpu_linear, "shared_bytes", lambda _: 99 << 10)
    assert older & names() and not copied <= names()
    monkeypatch.undo()
    monkeypatch.setattr(gpu_linear, "has_tma", lambda _: False)
    assert older <= names() and not copied & names()
