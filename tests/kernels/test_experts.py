"""Experts: routing, sorting rows by expert, products, weighted sum; compiled against twin, and rows' independence.

Shapes: T rows, E experts, K experts a row, P pairs of row and expert, H width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.kernels import ops
from draftproof.kernels.experts.compiled import CompiledExperts
from draftproof.kernels.experts.reference import TORCH_EXPERTS
from draftproof.kernels.experts.spec import Routing
from draftproof.kernels.sums import row_sum
from draftproof.matmul import certify, grouped
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.spec import Shape
from draftproof.runtime import native
from tests.slow import few

Threads = Callable[[int], contextlib.AbstractContextManager[None]]

CPU = torch.device("cpu")
ROUTINGS = {
    "softmax": (8, False, Routing(top_k=2)),
    "probabilities": (60, False, Routing(top_k=4, normalize=False)),
    "one": (1, False, Routing(top_k=1)),
    "all": (5, True, Routing(top_k=5, sigmoid=True)),
    "sigmoid": (37, True, Routing(top_k=3, sigmoid=True, scale=2.5)),
    "groups": (256, True, Routing(top_k=8, sigmoid=True, scale=2.5, groups=8, top_groups=4)),
    "pairs": (12, True, Routing(top_k=3, sigmoid=True, normalize=False, groups=6, top_groups=2)),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=list(ROUTINGS))
def routed(request: pytest.FixtureRequest) -> tuple[int, Tensor | None, Routing]:
    num_experts, biased, routing = ROUTINGS[request.param]
    return num_experts, 0.2 * randn(num_experts, seed=5) if biased else None, routing


def test_library_and_twin_choose_alike(
    library: native.Library, routed: tuple[int, Tensor | None, Routing]
) -> None:
    num_experts, bias, routing = routed
    for rows in (0, 1, 5, 70):
        logits = 2 * randn(rows, num_experts)
        experts, weights = TORCH_EXPERTS.route(logits, bias, routing)
        found_experts, found_weights = CompiledExperts(library).route(logits, bias, routing)
        assert torch.equal(found_experts, experts)
        torch.testing.assert_close(found_weights, weights, atol=1e-6, rtol=1e-5)


def test_experts_are_the_best_ascending_and_weighted_by_their_scores(
    table: ops.Ops, routed: tuple[int, Tensor | None, Routing]
) -> None:
    num_experts, bias, routing = routed
    logits = 2 * randn(9, num_experts)
    experts, weights = table.experts.route(logits, bias, routing)
    scores = logits.double().sigmoid() if routing.sigmoid else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias
    size = num_experts // routing.groups
    for row in range(9):
        groups = choice[row].view(routing.groups, size)
        of_group = groups.topk(min(2, size)).values.sum(-1)
        kept = of_group.topk(routing.top_groups).indices.tolist()
        open_ids = [e for e in range(num_experts) if e // size in kept or routing.groups == 1]
        best = sorted(open_ids, key=lambda e: -float(choice[row, e]))[: routing.top_k]
        assert experts[row].tolist() == sorted(best)
        expected = scores[row, experts[row]]
        expected = expected / expected.sum() if routing.normalize else expected
        torch.testing.assert_close(weights[row], (expected * routing.scale).float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_ties_go_to_the_lowest_expert_and_the_lowest_group(table: ops.Ops, sigmoid: bool) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 6] = 1.0
    experts, _ = table.experts.route(logits, None, Routing(top_k=3, sigmoid=sigmoid))
    assert experts.tolist() == [[0, 1, 2], [0, 1, 6]]
    experts, _ = table.experts.route(logits, None, Routing(top_k=2, sigmoid=sigmoid, groups=4, top_groups=1))
    assert experts.tolist() == [[0, 1], [6, 7]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_of_nonsense_still_name_experts_that_exist(table: ops.Ops, bad: float) -> None:
    logits = torch.full((3, 12), bad)
    logits[1, 5] = 0.0
    for routing in (Routing(top_k=4), Routing(top_k=4, sigmoid=True, groups=3, top_groups=2)):
        experts, _ = table.experts.route(logits, None, routing)
        assert all(
            len(set(row)) == 4 and sorted(row) == row and set(row) < set(range(12))
            for row in experts.tolist()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_is_routed_and_summed_alike_in_any_batch(
    table: ops.Ops, threads: Threads, routed: tuple[int, Tensor | None, Routing], dtype: torch.dtype
) -> None:
    num_experts, bias, routing = routed
    rows, width = 300, 200
    logits, base = 2 * randn(rows, num_experts), randn(rows, width, seed=2).to(dtype)
    outputs = randn(num_experts, width, seed=3)  # each expert's output, equal for all rows

    def run(i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts, weights = table.experts.route(logits[i], bias, routing)
        _, place, starts = table.experts.group(experts, num_experts)
        sorted_P = torch.repeat_interleave(torch.arange(num_experts), starts.diff())
        summed = table.experts.combine(outputs[sorted_P], place, weights, base[i], dtype)
        return experts, weights, summed

    every = torch.arange(rows)
    together = run(every)
    for count in (1, 2, 3, 6):
        with threads(count):
            for part in (every[:1], every[1:8], every[8:], every.flip(0), every[-3:]):
                for found, expected in zip(run(part), together, strict=True):
                    assert torch.equal(found, expected[part])


def test_pairs_are_sorted_by_expert_and_found_again(table: ops.Ops) -> None:
    experts = torch.tensor([[1, 4], [0, 1], [1, 4], [2, 4], [1, 2]])
    source, place, starts = table.experts.group(experts, 6)
    assert starts.tolist() == [0, 1, 5, 7, 7, 10, 10]
    assert sorted(place.flatten().tolist()) == list(range(10))
    for row in range(5):
        for expert, at in zip(experts[row].tolist(), place[row].tolist(), strict=True):
            assert source[at] == row and starts[expert] <= at < starts[expert + 1]
    source, place, starts = table.experts.group(experts[:0], 6)
    assert len(source) == place.numel() == 0 and starts.tolist() == [0] * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_agree_with_the_formula(table: ops.Ops, dtype: torch.dtype) -> None:
    for width in (1, 16, 77):
        y, weights = randn(12, width), randn(4, 3, seed=1)
        place = torch.randperm(12, generator=torch.Generator().manual_seed(2)).view(4, 3)
        base = randn(4, width, seed=3).to(dtype)
        expected = torch.einsum("tk,tkh->th", weights.double(), y.double()[place])
        for given, sums in ((None, expected), (base, expected + base.double())):
            found = table.experts.combine(y, place, weights, given, dtype)
            assert found.dtype == dtype
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found.double(), sums, atol=bound, rtol=bound)


SHAPES = [
    Shape(70, 130, torch.float32, torch.float32, False),
    Shape(50, 77, torch.bfloat16, torch.float32, False),
]
SHAPES += [
    Shape(288, 64, torch.bfloat16, torch.bfloat16, False),
    Shape(50, 77, torch.float16, torch.float32, False),
    Shape(288, 64, torch.float16, torch.float16, False),
    Shape(5, 3, torch.float32, torch.float32, False),
]


def pack(
    folder: Path, shape: Shape, library: native.Library | None, exact: bool = True
) -> tuple[grouped.GroupedLinear, list[Tensor]]:
    weights = [randn(shape.outputs, shape.inputs, seed=s).to(shape.dtype) for s in range(5)]
    planner = LinearPlanner(CPU, exact=exact, max_rows=64, library=library, cache_dir=folder)
    linear_fn = planner.pack_experts(5, iter(weights), out_dtype=shape.out_dtype)
    planner.certify()
    return linear_fn, weights


@pytest.mark.parametrize("shape", SHAPES, ids=Shape.key)
@pytest.mark.parametrize("compiled", few([True, False], True))
def test_each_row_meets_its_experts_weight_with_the_same_bits_in_any_grouping(
    shape: Shape, compiled: bool, library: native.Library, tmp_path: Path, threads: Threads
) -> None:
    """Certificates hold for the number of threads they were made with, so torch's products are certified for each."""
    x, _ = certify.cancelling(120, shape, seed=3)
    known: list[Tensor] = []  # compiled products also give the same bits at any number of threads
    for count in (1, 2, 3, 6):
        with threads(count):
            linear_fn, weights = pack(tmp_path, shape, library if compiled else None)
            assert isinstance(linear_fn, grouped.CompiledGroups if compiled else grouped.PerExpert)
            if not known or not compiled:
                known = [torch.cat([linear_fn(x[i : i + 1], ends(e)) for i in range(120)]) for e in range(5)]
            for e, weight in enumerate(weights):
                expected = x.double() @ weight.double().T
                torch.testing.assert_close(known[e].double(), expected, atol=0.5, rtol=0.02)
            for split in ([0, 0, 0, 0, 0], [1, 0, 7, 8, 9], [60, 0, 33, 17, 10], [0, 0, 0, 0, 120]):
                starts = torch.tensor([0, *split]).cumsum(0)
                found = linear_fn(x[: starts[-1]], starts)
                assert found.dtype == shape.out_dtype and found.shape == (starts[-1], shape.outputs)
                for e in range(5):
                    part = slice(int(starts[e]), int(starts[e + 1]))
                    assert torch.equal(found[part], known[e][part])


def ends(expert: int) -> Tensor:
    """Starts of the experts' groups, for one row that goes to `expert`."""
    return (torch.arange(6) > expert).long()


def test_a_grouped_product_of_another_order_at_some_lengths_is_refused(
    library: native.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: groups of 16 rows and more sum K in two halves. The planner then uses single products."""

    def split_k(count: int, weights: Iterable[Tensor], shape: Shape) -> grouped.GroupedLinear:
        kept = [weight.float() for weight in weights]

        def run(x_PK: Tensor, starts_E1: Tensor) -> Tensor:
            half, out = shape.inputs // 2, []
            for weight, part in zip(kept, x_PK.float().split(starts_E1.diff().tolist()), strict=True):
                terms = part[:, None] * weight
                halves = row_sum(terms[..., :half]) + row_sum(terms[..., half:])
                out.append((halves if len(part) >= 16 else row_sum(terms)).squeeze(-1))
            return torch.cat(out)

        return run

    shape = Shape(40, 520, torch.float32, torch.float32, False)
    made = grouped.find(CPU, shape, library)
    assert made is not None and grouped.is_exact(made, shape, CPU)
    assert not grouped.is_exact(split_k, shape, CPU)
    monkeypatch.setattr(grouped, "find", lambda *_: split_k)
    assert isinstance(pack(tmp_path, shape, library)[0], grouped.PerExpert)
    assert not isinstance(pack(tmp_path, shape, library, exact=False)[0], grouped.PerExpert)
