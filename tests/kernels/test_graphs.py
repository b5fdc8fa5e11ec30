"""Recorded programs: the same bits as the function, nothing recorded that cannot be, and no end of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from draftproof.kernels import graphs, native
from draftproof.kernels.graphs import OFTEN, Recorded
from draftproof.kernels.ops import select


def rows(seed: int, count: int = 3) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def test_a_program_computes_what_was_recorded_on_what_it_is_given(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def function(x_TH: Tensor) -> tuple[Tensor, ...]:
        return (ops.silu_mul(ops.concat((x_TH, x_TH))),)

    for seed in range(3):
        (out,) = recorded.run(("key",), function, (rows(seed),))
        assert torch.equal(out, function(rows(seed))[0])
    assert recorded.program(("key",)) is not None


def test_a_function_that_computes_by_other_means_runs_as_it_is(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def function(x_TH: Tensor) -> tuple[Tensor, ...]:
        return (ops.silu_mul(x_TH) + x_TH.sum(),)

    for seed in range(3):
        assert torch.equal(recorded.run(("key",), function, (rows(seed),))[0], function(rows(seed))[0])
    assert recorded.program(("key",)) is None


def test_programs_stop_at_a_bound_on_memory(library: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    monkeypatch.setattr(graphs, "MOST_BYTES", 1)
    for count in (*[2] * OFTEN, *[3] * 2 * OFTEN):
        given = rows(0, count)
        (out,) = recorded.run(("rows", count), lambda x_TH: (ops.silu_mul(x_TH),), (given,))
        assert torch.equal(out, ops.silu_mul(given))
    assert recorded.program(("rows", 2)) is not None and recorded.program(("rows", 3)) is None


def test_a_function_s_own_runs_become_part_of_its_program(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    total_H = torch.zeros(2, 64)

    def inner(x_TH: Tensor) -> tuple[Tensor, ...]:
        return (ops.concat((x_TH, x_TH)),)

    def outer(x_TH: Tensor) -> dict[str, Tensor]:
        (wide,) = recorded.run(("inner",), inner, (x_TH,))
        return {"out": ops.silu_mul(wide), "constant": total_H}

    for _ in range(OFTEN):
        assert not recorded.holds(("outer",)), "what is run once is not worth recording"
        first = recorded.run(("outer",), outer, (rows(0),))
    assert recorded.holds(("outer",)) and not recorded.holds(("inner",))
    again = recorded.run(("outer",), outer, (rows(1),))
    assert again is first
    assert torch.equal(again["out"], ops.silu_mul(ops.concat((rows(1), rows(1)))))


def test_nothing_is_held_of_a_function_that_cannot_be_recorded(library: native.Library) -> None:
    recorded = Recorded(library)
    found = [recorded.run(("key",), lambda x_TH: x_TH + 1, (rows(seed),)) for seed in range(2)]
    assert not recorded.holds(("key",)) and torch.equal(found[1], rows(1) + 1)


def test_a_first_prompt_does_not_wait_for_torchs_compiler_to_be_imported() -> None:
    code = (
        "import sys; from draftproof import LLM, SamplingParams\n"
        "with LLM() as llm: llm.generate('def', SamplingParams(max_tokens=3), use_tqdm=False)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
