"""Experts on a GPU: in CUDA graphs replayed with other rows, at sizes of real models, without host synchronisation.

Shapes: T rows, E experts, H width of a row, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.kernels import ops
from draftproof.kernels.experts.spec import Routing
from draftproof.matmul import grouped
from draftproof.matmul.linear import LinearPlanner
from draftproof.runtime import gpu

if torch.cuda.is_available() and gpu.available(torch.device("cuda")):
    from draftproof.matmul.triton.grouped import Groups

BF16 = torch.bfloat16


def block(
    device: torch.device, folder: Path, num_experts: int, hidden: int, width: int, routing: Routing
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function (x [T, H], scores [T, E]) -> [T, H] of random experts, planned like a model's."""
    table = ops.select(device, None)
    planner = LinearPlanner(device, exact=True, max_rows=256, library=None, cache_dir=folder)
    generator = torch.Generator(device).manual_seed(0)

    def pack(outputs: int, inputs: int, out_dtype: torch.dtype) -> grouped.GroupedLinear:
        size = (num_experts, outputs, inputs)
        weights = torch.randn(size, generator=generator, device=device, dtype=BF16) * inputs**-0.5
        linear_fn = planner.pack_experts(num_experts, weights, out_dtype=out_dtype)
        assert isinstance(linear_fn, Groups), "the grouped product was not exact"
        return linear_fn

    gate_up, down = pack(2 * width, hidden, BF16), pack(hidden, width, torch.float32)
    planner.certify()

    def run(x_TH: Tensor, scores_TE: Tensor) -> Tensor:
        experts, weights = table.experts.route(scores_TE, None, routing)
        source, place, starts = table.experts.group(experts, num_experts)
        y = down(table.silu_mul(gate_up(table.gather(x_TH, source), starts)), starts)
        return table.experts.combine(y, place, weights, None, BF16)

    return run


@pytest.mark.parametrize(
    ("num_experts", "hidden", "width", "routing"),
    [
        (128, 2048, 768, Routing(top_k=8)),
        (8, 4096, 1792, Routing(top_k=2)),
        (64, 1000, 520, Routing(top_k=6, sigmoid=True, groups=8, top_groups=3)),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch_and_in_graphs(
    cuda: torch.device, tmp_path: Path, num_experts: int, hidden: int, width: int, routing: Routing
) -> None:
    run = block(cuda, tmp_path, num_experts, hidden, width, routing)
    generator = torch.Generator(cuda).manual_seed(1)
    x = torch.randn(600, hidden, generator=generator, device=cuda).to(BF16)
    scores = torch.randn(600, num_experts, generator=generator, device=cuda)
    together = run(x, scores)
    assert together.float().std() > 0.05
    for part in (slice(0, 1), slice(1, 9), slice(9, 90), slice(90, 600)):
        assert torch.equal(run(x[part], scores[part]), together[part])
    for rows in (1, 8, 64):
        held = x[:rows].clone(), scores[:rows].clone()
        run(*held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*held)
        for first in (0, 100, 300):
            part = slice(first, first + rows)
            torch.cuda.set_sync_debug_mode("error")
            try:
                held[0].copy_(x[part])
                held[1].copy_(scores[part])
                graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(out, together[part])


def test_all_rows_to_the_same_experts_and_each_row_to_its_own(cuda: torch.device, tmp_path: Path) -> None:
    """The two extreme groupings for a grid of fixed size."""
    run = block(cuda, tmp_path, 64, 512, 256, Routing(top_k=1))
    x = torch.randn(200, 512, generator=torch.Generator(cuda).manual_seed(1), device=cuda).to(BF16)
    same = torch.zeros(200, 64, device=cuda)
    apart = torch.nn.functional.one_hot(torch.arange(200, device=cuda) % 64, 64).float()
    same[:, 63] = 1.0
    for scores in (same, apart):
        together = run(x, scores)
        alone = torch.cat([run(x[i : i + 1], scores[i : i + 1]) for i in range(200)])
        assert torch.equal(together, alone)
    assert torch.equal(run(x, same)[63], run(x, apart)[63])
