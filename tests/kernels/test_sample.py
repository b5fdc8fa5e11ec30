"""`sample`, torch twin and compiled: the hash, the distribution, ties, filters, and rows' independence.

Shapes: M rows, V columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log

import pytest
import scipy  # imports scipy.stats lazily
import torch
from torch import Tensor

from draftproof.kernels.row_params import RowParams, pack_row
from draftproof.kernels.sample import Sample
from draftproof.kernels.sample.compiled import SampleCompiled
from draftproof.kernels.sample.noise import (
    LANE_A,
    LANE_B,
    MASK,
    MULTIPLIERS,
    derive,
    gumbel,
    token_bits,
    uniform,
)
from draftproof.kernels.sample.reference import probabilities_torch, sample_torch
from draftproof.runtime import native

FILTERS = [
    {},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.02},
]


@pytest.fixture(scope="module")
def library() -> native.Library:
    found = native.load()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(params=["torch", "compiled"])
def sample(request: pytest.FixtureRequest) -> Sample:
    if request.param == "torch":
        return sample_torch
    return SampleCompiled(request.getfixturevalue("library"))


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def alike(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> RowParams:
    row = pack_row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    return RowParams(torch.tensor([row]).expand(rows, -1).contiguous())


def draw(
    sample: Sample, logits_MV: Tensor, ids_V: Tensor | None = None, seed: int = 0, **params: float
) -> Tensor:
    rows = len(logits_MV)
    return sample(logits_MV, alike(rows, seed=seed, **params), torch.arange(rows), ids_V)


def random_logits(rows: int, width: int, scale: float = 4.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


# ---- the hash


def mix_in_python(word: int) -> int:
    word ^= word >> 16
    word = word * MULTIPLIERS[0] & MASK
    word ^= word >> 15
    word = word * MULTIPLIERS[1] & MASK
    return word ^ (word >> 16)


def bits_in_python(seed: int, position: int, token: int) -> int:
    keys = []
    for start in (LANE_A, LANE_B):
        state = mix_in_python((seed & MASK) ^ start)
        state = mix_in_python((state + LANE_A & MASK) ^ (seed >> 32 & MASK))
        keys.append(mix_in_python((state + LANE_A & MASK) ^ position))
    return mix_in_python(mix_in_python(token ^ keys[0]) ^ keys[1])


EXTREMES = (
    torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]),
    torch.tensor([0, 1, 5, 2**31 - 1, 77, 131071]),
    torch.tensor([0, 1, 2, 151935, 2**31 - 1]),
)


def test_torch_hash_is_the_integer_hash_written_with_python_integers() -> None:
    seeds_M, positions_M, ids_V = EXTREMES
    expected = [
        [bits_in_python(s, p, t) for t in ids_V.tolist()]
        for s, p in zip(seeds_M.tolist(), positions_M.tolist(), strict=True)
    ]
    assert token_bits(*EXTREMES).tolist() == expected


def test_compiled_hash_is_the_same_integer(library: native.Library) -> None:
    seeds_M, positions_M, ids_V = EXTREMES
    out_MV = torch.empty(6, 5, dtype=torch.int64)
    run = library.function("dp_token_bits", "ppppii")
    run(seeds_M.data_ptr(), positions_M.data_ptr(), ids_V.data_ptr(), out_MV.data_ptr(), 6, 5)
    assert torch.equal(out_MV, token_bits(*EXTREMES))


def test_noise_is_finite_at_both_ends_of_the_hash() -> None:
    u = uniform(torch.tensor([0, 1, 2**31, MASK - 1, MASK]))
    assert (u > 0).all()
    assert (u < 1).all()
    noise = -torch.log(-torch.log1p(-u))
    assert noise.isfinite().all()
    assert noise[0].item() == pytest.approx(33 * log(2), abs=1e-4)  # resolution is 32 bits near u = 0
    assert u[1].item() == pytest.approx(1.5 * 2**-32)


def test_derived_seeds_differ_by_seed_domain_and_round() -> None:
    seeds_M = torch.arange(1000)
    every = [derive(seeds_M, d, torch.full_like(seeds_M, r)) for d in range(3) for r in range(3)]
    assert len(set(torch.cat([seeds_M, *every]).tolist())) == 10 * 1000


# ---- greedy, ties, rows without a number


def test_greedy_takes_the_lowest_id_of_a_tie(sample: Sample) -> None:
    logits_MV = random_logits(3, 37)
    logits_MV[0, [5, 20, 36]] = 50.0
    logits_MV[1, [0, 36]] = 50.0
    logits_MV[2] = 0.25
    assert draw(sample, logits_MV, temperature=0).tolist() == [5, 0, 0]


def test_a_tie_in_a_reduced_vocabulary_goes_to_the_lowest_target_id(sample: Sample) -> None:
    logits_MV = torch.tensor([[1.0, 7.0, 7.0, 0.0]])
    ids_V = torch.tensor([3, 900, 12, 40])
    assert draw(sample, logits_MV, ids_V, temperature=0).tolist() == [12]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", [{}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}])
def test_rows_without_a_number_give_minus_one(
    sample: Sample, temperature: float, params: dict[str, float]
) -> None:
    logits_MV = random_logits(5, 37)
    logits_MV[0, 17] = torch.nan
    logits_MV[1, 36] = torch.nan
    logits_MV[2] = -torch.inf
    logits_MV[3, 4] = torch.inf
    tokens = draw(sample, logits_MV, temperature=temperature, **params).tolist()
    assert tokens[:4] == [-1] * 4
    assert 0 <= tokens[4] < 37


def test_a_masked_token_is_never_drawn(sample: Sample) -> None:
    logits_MV = torch.zeros(2000, 5).index_fill_(1, torch.tensor([1, 4]), -torch.inf)
    assert set(draw(sample, logits_MV).tolist()) == {0, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44, 1e30])
def test_extreme_temperatures_still_give_a_token(sample: Sample, temperature: float) -> None:
    logits_MV = random_logits(200, 50)
    tokens_M = draw(sample, logits_MV, temperature=temperature)
    assert ((tokens_M >= 0) & (tokens_M < 50)).all()
    if temperature <= 1e-30:
        assert torch.equal(tokens_M, logits_MV.argmax(-1))


# ---- the distribution


def brute_force(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """Probabilities after temperature, min-p, top-k and top-p as vLLM defines them, keeping all ties at a boundary."""
    weight = [exp((x - max(logits)) / temperature) for x in logits]
    weight = [w if w >= min_p * max(weight) else 0.0 for w in weight]
    if 0 < top_k < len(weight):
        kth = sorted(weight, reverse=True)[top_k - 1]
        weight = [w if w >= kth else 0.0 for w in weight]
    if top_p < 1:
        total = sum(weight)
        likelier = [sum(v for v in weight if v > w) for w in weight]
        weight = [w if more < top_p * total else 0.0 for w, more in zip(weight, likelier, strict=True)]
    return [w / sum(weight) for w in weight]


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_probabilities_are_those_of_the_definition(params: dict[str, float], temperature: float) -> None:
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    logits_MV = random_logits(40, 12, scale=2.0)
    logits_MV[:, 7] = logits_MV[:, 3]  # a tie somewhere, at the boundary in some rows
    expected = [brute_force(row, temperature, **full) for row in logits_MV.tolist()]  # type: ignore[arg-type]
    probs_MV = probabilities_torch(logits_MV, alike(40, temperature=temperature, **params))
    assert torch.equal(probs_MV > 0, torch.tensor(expected) > 0)
    torch.testing.assert_close(probs_MV, torch.tensor(expected), rtol=1e-5, atol=1e-7)


def chi_square(counts_V: Tensor, probs_V: Tensor) -> float:
    """p-value of the counts under the probabilities; 0 if a token of probability 0 was counted."""
    if counts_V[probs_V == 0].any():
        return 0.0
    counts_V, probs_V = counts_V[probs_V > 0].double(), probs_V[probs_V > 0].double()
    expected_V = probs_V / probs_V.sum() * counts_V.sum()
    statistic = float(((counts_V - expected_V) ** 2 / expected_V).sum())
    return float(scipy.stats.chi2.sf(statistic, max(len(probs_V) - 1, 1)))


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_draws_follow_the_probabilities(sample: Sample, params: dict[str, float], temperature: float) -> None:
    logits_1V = torch.tensor([[1.0, 0.2, -0.5, 1.0, 0.1, -2.0, 0.7]])
    probs_V = probabilities_torch(logits_1V, alike(1, temperature=temperature, **params))[0]
    tokens_M = draw(sample, logits_1V.expand(20000, -1), seed=11, temperature=temperature, **params)
    assert chi_square(tokens_M.bincount(minlength=7), probs_V) > 1e-3


def test_draws_follow_the_probabilities_far_into_the_tail(sample: Sample) -> None:
    """Skipping tokens that cannot win must not skip the rare ones that can."""
    logits_1V = torch.cat([torch.tensor([8.0, 5.0]), torch.linspace(0.0, -3.0, 498)])[None]
    tokens_M = draw(sample, logits_1V.expand(8000, -1), seed=3)
    probs_V = torch.softmax(logits_1V[0], 0)
    groups = torch.cat([torch.tensor([0, 1]), 2 + torch.arange(498) // 50])
    counts = torch.zeros(12).index_add_(0, groups[tokens_M], torch.ones(8000))
    assert chi_square(counts, torch.zeros(12).index_add_(0, groups, probs_V)) > 1e-3


def test_the_draw_is_keyed_by_the_target_id_not_the_column(sample: Sample) -> None:
    """A reduced vocabulary gets the same noise: permuting columns together with their ids changes nothing."""
    logits_MV = random_logits(500, 40, scale=1.0)
    ids_V = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(sample, logits_MV[:, ids_V], ids_V), draw(sample, logits_MV))


@pytest.mark.parametrize("width", [5, 37, 8191])
@pytest.mark.parametrize(
    "params",
    [*FILTERS, {"temperature": 0.0}, {"temperature": 0.4, "top_p": 0.95}, {"top_k": 2000}, {"top_p": 0.999}],
)
def test_compiled_and_torch_agree(library: native.Library, width: int, params: dict[str, float]) -> None:
    """Scores may differ in the last bit, which changes about one draw in a million; thresholds agree."""
    for scale in (1.0, 6.0):
        logits_MV = random_logits(48, width, scale)
        logits_MV[:, 1] = logits_MV[:, 4]
        torch_M = draw(sample_torch, logits_MV, **params)
        assert torch.equal(draw(SampleCompiled(library), logits_MV, **params), torch_M)


def test_equal_logits_at_the_boundary_all_stay(sample: Sample) -> None:
    logits_1V = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.6}, {"min_p": exp(-1)}):
        assert set(draw(sample, logits_1V.expand(3000, -1), **params).tolist()) == {0, 1, 2, 3}, params


# ---- law 2


def mixed(rows: int) -> tuple[Tensor, ...]:
    """Greedy and sampled rows, with and without filters, side by side."""
    return (
        torch.tensor([1.0, 0.0, 0.7, 1.3])[torch.arange(rows) % 4],
        torch.tensor([0, 0, 20, 0, 3])[torch.arange(rows) % 5],
        torch.tensor([1.0, 0.9, 1.0])[torch.arange(rows) % 3],
        torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.0])[torch.arange(rows) % 6],
    )


@pytest.mark.parametrize("width", [5, 37, 8191, 50001])
def test_a_row_depends_on_nothing_but_itself(sample: Sample, width: int) -> None:
    rows = 9 if width > 10000 else 33
    logits_MV = random_logits(rows, width, scale=1.0)
    params, positions_M = RowParams.of(*mixed(rows), torch.arange(rows) * 7919 - 5), torch.arange(rows)
    torch.set_num_threads(1)
    alone_M = torch.cat(
        [sample(logits_MV[m : m + 1], params[m : m + 1], positions_M[m : m + 1], None) for m in range(rows)]
    )
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for size in (2, 3, rows):
            parts = [slice(i, i + size) for i in range(0, rows, size)]
            tokens = [sample(logits_MV[s], params[s], positions_M[s], None) for s in parts]
            assert torch.equal(torch.cat(tokens), alone_M)


@pytest.mark.parametrize("width", [5, 37, 8191, 50001])
def test_noise_and_probabilities_of_a_row_have_the_same_bits_in_any_batch(width: int) -> None:
    rows = 4
    logits_MV = random_logits(rows, width, scale=1.0)
    seeds_M, ids_V = torch.arange(rows), torch.arange(width)
    params = RowParams.of(*mixed(rows), seeds_M)
    torch.set_num_threads(1)
    noise = [gumbel(seeds_M[m : m + 1], seeds_M[m : m + 1], ids_V)[0] for m in range(rows)]
    probs = [probabilities_torch(logits_MV[m : m + 1], params[m : m + 1])[0] for m in range(rows)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(gumbel(seeds_M, seeds_M, ids_V), torch.stack(noise))
        assert torch.equal(probabilities_torch(logits_MV, params), torch.stack(probs))
