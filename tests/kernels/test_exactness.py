"""Certificates of operators: right versions pass, each check's wrong twin fails, and verdicts are kept.

Shapes: T rows, H width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.attention import registry
from draftproof.attention.base import FunctionBackend
from draftproof.attention.chunked import TREES, ChunkedAttention
from draftproof.attention.exactness import scores_check, split_by_the_batch, values_check
from draftproof.kernels import exactness, ops
from draftproof.kernels import operator_checks as checks
from draftproof.kernels.exactness import Case, Check, NoPowerError, OperatorCertifier
from draftproof.kernels.experts.spec import Routing
from draftproof.kernels.norm.reference import rms_norm_torch
from draftproof.runtime import native
from tests.helpers import is_exact
from tests.kernels.cases import ATTENTION, MADE
from tests.slow import few

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", few([FP32, BF16, torch.float16], BF16))
@pytest.mark.parametrize("kind", list(MADE))
def test_operators_of_both_tables_are_certified(table: ops.Ops, kind: str, dtype: torch.dtype) -> None:
    """A certificate requires that the check's wrong twin fails, so this also tests the checks."""
    operator, make = MADE[kind]
    assert is_exact(make(dtype, CPU), getattr(table, operator), 2)


@pytest.mark.parametrize("dtype", few([FP32, BF16, torch.float16], BF16))
@pytest.mark.parametrize("name", few(ATTENTION, "few heads"))
@pytest.mark.parametrize("backend", few(["compiled", "elementwise", "reference"], "compiled"))
def test_attention_that_is_exact_by_construction_is_certified(
    library: native.Library, backend: str, name: str, dtype: torch.dtype
) -> None:
    version, shape = registry.BACKENDS[backend].build(library), ATTENTION[name]
    assert is_exact(scores_check(shape, 16, dtype, CPU), version, 2)
    assert is_exact(values_check(shape, 16, dtype, CPU), version, 2)


def test_a_wrong_twin_that_passes_voids_the_certificate() -> None:
    check = checks.rms_norm_check(64, BF16, CPU, BF16)
    toothless = dataclasses.replace(check, wrong=rms_norm_torch)
    with pytest.raises(NoPowerError, match="does not show"):
        is_exact(toothless, rms_norm_torch, 1)


def test_ordinary_data_would_see_nothing_in_half_precision() -> None:
    """The reason for the checks' special data: on plain random rows the wrong norm passes."""
    check = checks.rms_norm_check(64, BF16, CPU, BF16)
    x_TH = torch.randn(67, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ones_H = torch.ones(64).bfloat16()

    def run(version: Any, rows_T: Tensor) -> tuple[Tensor]:
        return (version(x_TH[rows_T], ones_H, 1e-6),)

    with pytest.raises(NoPowerError):
        is_exact(dataclasses.replace(check, run=run), rms_norm_torch, 1)


@pytest.mark.parametrize("kind", ["scores", "values"])
def test_attention_split_by_the_batch_is_refused_on_either_data(kind: str) -> None:
    make = scores_check if kind == "scores" else values_check
    assert not is_exact(make(ATTENTION["few heads"], 16, BF16, CPU), FunctionBackend(split_by_the_batch), 1)


def slow_from(rows: int) -> Callable[[Tensor, Tensor, float], Tensor]:
    """A norm that is right below `rows` rows, and sums in reverse order from there on."""

    def norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if len(x_TH) < rows:
            return rms_norm_torch(x_TH, weight_H, eps)
        return rms_norm_torch(x_TH.flip(-1), weight_H.flip(-1), eps).flip(-1)

    return norm


ROUTINGS = [
    (num_experts, Routing(top_k=top_k, sigmoid=sigmoid, normalize=normalize, scale=2.5 if sigmoid else 1.0))
    for num_experts in (2, 6, 8, 16, 60, 64, 128, 256)
    for top_k in (1, 2, 3, 4, 6, 8)
    for sigmoid in (False, True)
    for normalize in (False, True)
    if top_k <= num_experts
]


def test_the_data_of_experts_has_power_at_every_number_of_them() -> None:
    for num_experts, routing in ROUTINGS:
        exactness.prove_power(checks.route_check(num_experts, routing, CPU, biased=routing.sigmoid))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_the_data_of_sums_over_experts_has_power(dtype: torch.dtype, shared: bool) -> None:
    for width in (24, 64, 2048):
        for top_k in (1, 2, 3, 4, 6, 8):
            exactness.prove_power(checks.combine_check(width, top_k, dtype, CPU, shared=shared))


VOCABULARIES = (50, 32000, 32064, 49152, 128256, 151936, 200064, 256000, 262144)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_normalizers_data_has_power_at_every_vocabulary(vocab_size: int) -> None:
    exactness.prove_power(checks.log_normalizer_check(vocab_size, CPU))


@pytest.mark.parametrize("width", [*range(1, 41), 64, 576, 1536, 7168])
def test_norms_of_every_width_are_certified(width: int) -> None:
    assert is_exact(checks.rms_norm_check(width, BF16, CPU, BF16), rms_norm_torch, 1)


def test_a_row_alone_at_the_engines_own_threads_is_looked_at() -> None:
    def norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        odd = len(x_TH) == 1 and torch.get_num_threads() == 2
        return slow_from(0 if odd else 10**9)(x_TH, weight_H, eps)

    assert not is_exact(checks.rms_norm_check(64, BF16, CPU, BF16), norm, 2)


def test_attention_that_changes_with_a_prompts_rows_is_seen() -> None:
    """Torch's kernel may do so, depending on the number of rows with one padded length in a call."""

    def attention(q_THD: Tensor, *rest: Any) -> Tensor:
        context_lens_T = rest[4]
        many = len(q_THD) > 30 and int(context_lens_T.min()) > 500
        return split_by_the_batch(q_THD, *rest) if many else ChunkedAttention(TREES)(q_THD, *rest)

    assert not is_exact(values_check(ATTENTION["few heads"], 16, FP32, CPU), FunctionBackend(attention), 1)


@pytest.mark.parametrize("rows", [2, 3, 33, 60, 2000])
def test_an_order_that_changes_with_the_number_of_rows_is_seen(rows: int) -> None:
    assert not is_exact(checks.rms_norm_check(64, BF16, CPU, BF16), slow_from(rows), 1)


def test_an_order_that_changes_with_the_threads_is_seen() -> None:
    def norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return slow_from(0 if torch.get_num_threads() == 3 else 10**9)(x_TH, weight_H, eps)

    check = checks.rms_norm_check(64, BF16, CPU, BF16)
    assert not is_exact(check, norm, 3)
    assert not is_exact(check, norm, 1)  # the verdict holds for the machine, whatever the setting


def test_the_first_exact_version_is_taken_and_remembered(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> Check:
        made.append("made")
        return checks.rms_norm_check(64, BF16, CPU, BF16)

    case = Case("rms_norm", "64", make)
    versions = {"fast": slow_from(5), "slow": rms_norm_torch, "slower": rms_norm_torch}
    certifier = OperatorCertifier(CPU, None, cache_dir=tmp_path)
    assert not certifier.knows([case], versions)
    assert certifier.first_exact([case], versions) == "slow" and len(made) == 1  # for both versions
    again = OperatorCertifier(CPU, None, cache_dir=tmp_path)
    assert again.knows([case], versions)
    assert again.first_exact([case], versions) == "slow" and len(made) == 1
    fresh = OperatorCertifier(CPU, None, cache_dir=tmp_path, fresh=True)
    assert fresh.first_exact([case], versions) == "slow" and len(made) == 2
    assert fresh.first_exact([case], {"fast": slow_from(5)}) is None


@pytest.mark.parametrize("text", ["", "[]", '{"fast: rms_norm 64": 3}', "\x00", '{"a":' * 10_000])
def test_a_spoilt_file_of_verdicts_is_made_anew(tmp_path: Path, text: str) -> None:
    case = Case("rms_norm", "64", lambda: checks.rms_norm_check(64, BF16, CPU, BF16))
    OperatorCertifier(CPU, None, cache_dir=tmp_path).verdict(case, "fast", rms_norm_torch)
    (path,) = tmp_path.glob("operators-*.json")
    path.write_text(text)
    assert OperatorCertifier(CPU, None, cache_dir=tmp_path).verdict(case, "fast", rms_norm_torch)
    assert OperatorCertifier(CPU, None, cache_dir=tmp_path).knows([case], ["fast"])


def test_groups_cover_single_rows_many_rows_and_other_orders() -> None:
    check = checks.rms_norm_check(64, BF16, CPU, BF16)
    sizes = [len(rows_T) for rows_T in exactness._groups(check)]
    assert max(sizes) == exactness.MANY_ROWS and {*exactness.SIZES} <= {*sizes}
