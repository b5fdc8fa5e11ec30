"""A step's bookkeeping on a GPU: at the sizes of real batches, in one CUDA graph, compiled once.

Whether the kernels do what torch does is checked in checks.py, too.
"""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import Tensor

from draftproof.kernels.step.reference import TORCH_STEP
from draftproof.runtime import gpu
from draftproof.runtime.graphs import capture
from tests.gpu import step_cases
from tests.gpu.step_cases import LAYOUTS, Case

if torch.cuda.is_available() and gpu.available(torch.device("cuda")):
    from draftproof.kernels.step import triton_kernels as step_kernels
    from draftproof.kernels.step.triton import TritonStep

BIG = (
    Case(0, 64, 5, prompt=300),
    Case(1, 1, 5, prompt=8192, prefill=True),
    Case(2, 4096, 1, prompt=3),
    Case(3, 600, 7, prompt=20, padding=40),
    Case(4, 33, 64, prompt=100),
)


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
@pytest.mark.parametrize("case", BIG, ids=str)
def test_large_steps_are_those_of_torch(cuda: torch.device, case: Case, layout: step_cases.Layout) -> None:
    step_cases.compare(TritonStep(), case, layout, cuda)


def tensors(step: step_cases.Step) -> list[Tensor]:
    return [*step.state, step.work_3R, step.sampled_M, step.wanted_R, step.drafted_RK, step.count_R]


def test_a_graph_replays_a_step_with_other_numbers(cuda: torch.device) -> None:
    """Captured on one step, replayed with its requests in other orders and with other samples, without host
    synchronisation."""
    first = step_cases.make(Case(0, 9, 4))
    steps = [
        dataclasses.replace(
            first,
            work_3R=first.work_3R[:, torch.randperm(9, generator=torch.Generator().manual_seed(seed))],
            sampled_M=torch.randint(2, (first.num_sampled,), generator=torch.Generator().manual_seed(seed)),
        )
        for seed in range(20)
    ]
    width, layout, ops = 5, LAYOUTS[2], TritonStep()
    step_cases.run(ops, first.on(cuda), layout, width)
    held = first.on(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step_cases.run(ops, held, layout, width)
    for step in steps:
        for to, source in zip(tensors(held), tensors(step), strict=True):
            to.copy_(source)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = step_cases.run(TORCH_STEP, step.on(torch.device("cpu")), layout, width)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.cpu(), b)


def test_another_batch_compiles_nothing(cuda: torch.device) -> None:
    kernels = [value for name, value in vars(step_kernels).items() if name.endswith("_kernel")]

    def compiled() -> int:
        return sum(len(kernel.device_caches[cuda.index][0]) for kernel in kernels)

    base = Case(0, 16, 5, prompt=32)
    ops, layout = TritonStep(), LAYOUTS[0]
    step_cases.run(ops, step_cases.make(base).on(cuda), layout, 6)
    before = compiled()
    for requests in (1, 2, 7, 32, 100):
        step = step_cases.make(dataclasses.replace(base, requests=requests, seed=requests))
        step_cases.run(ops, step.on(cuda), layout, 6)
    assert before and compiled() == before


def test_a_graph_is_not_freed_while_another_is_captured(cuda: torch.device) -> None:
    """Freeing one during a capture makes the capture fail, and Python frees cycles at any allocation."""
    given, before = torch.zeros(4, device=cuda), gc.get_threshold()
    gc.collect()
    former: list[object] = [capture(lambda: given + 1)]
    former.append(former)  # a cycle, as the objects of an engine that nobody closed
    held = [former]
    del former

    def call() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            held.clear()
            gc.set_threshold(1)
            _ = [[] for _ in range(100)]
        return given + 2

    try:
        graph, result = capture(call)
    finally:
        gc.set_threshold(*before)
    given += 1
    graph.replay()
    assert result.tolist() == [3.0] * 4
