"""Recorded programs: the same bits as the function, nothing recorded that cannot be, and no end of memory."""

from __future__ import annotations

import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor

from draftproof.kernels.ops import Ops, select
from draftproof.runtime import graphs, native
from draftproof.runtime.graphs import OFTEN, SOON, Recorded
from draftproof.runtime.room import CACHE_LINE


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


def often(recorded: Recorded, ops: Ops, count: int, times: int = OFTEN) -> None:
    """Run one function of so many rows until it is recorded."""
    given = rows(0, count)
    for _ in range(times):
        (out,) = recorded.run(("rows", count), lambda x_TH: (ops.silu_mul(x_TH),), (given,))
        assert torch.equal(out, ops.silu_mul(given))
        assert recorded.latest == recorded.holds(("rows", count))


def test_the_least_recently_used_program_gives_way_and_may_come_again(
    library: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    recorded._table.most = 2
    for count in (1, 2):
        often(recorded, ops, count)
    number = recorded.holds(("rows", 2))
    often(recorded, ops, 1, times=1)  # used again, so the other one is the older
    often(recorded, ops, 3)
    assert recorded.recorded_keys() == [("rows", 1), ("rows", 3)]
    often(recorded, ops, 2, times=OFTEN - 1)
    assert not recorded.holds(("rows", 2)), "it is counted from the start"
    often(recorded, ops, 2, times=1)
    assert recorded.recorded_keys() == [("rows", 3), ("rows", 2)]
    assert recorded.holds(("rows", 2)) not in (0, number), "what was recorded over the first one is stale"
    recorded.run(("others",), lambda x_TH: x_TH + 1, (rows(0),))
    assert recorded.latest == 0, "the run before is not the last one"


def held(*numbers: int) -> int:
    """Bytes of buffers for so many fp32 numbers each, powers of two: with room to align them."""
    return sum(4 * number + CACHE_LINE for number in numbers)


def test_memory_is_counted_and_bounded(library: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given, 64 columns a row, for each program, of which the older one goes; and what comes out, 32, in memory
    that they share."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    often(recorded, ops, 4)
    assert recorded.num_bytes == 4 * 64 * 4 + held(4 * 32)
    often(recorded, ops, 3)
    assert recorded.num_bytes == (4 + 3) * 64 * 4 + held(4 * 32)
    monkeypatch.setattr(graphs, "MOST_BYTES", 4 * 64 * 4)
    often(recorded, ops, 1)
    assert recorded.recorded_keys() == [("rows", 3), ("rows", 1)]
    assert recorded.num_bytes == 4 * 64 * 4 + held(4 * 32) + held(32)
    often(recorded, ops, 5, times=2 * OFTEN)
    assert recorded.recorded_keys() == [("rows", 3), ("rows", 1)], "larger than all may be together"


def test_what_cannot_be_recorded_takes_nobodys_place(
    library: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it tried again and again, nor are keys kept without end."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    recorded._table.most = 2
    often(recorded, ops, 1)
    tried = []

    def function(x_TH: Tensor) -> Tensor:
        tried.append(library.recorder is not None)
        return x_TH + 1

    for number in range(20):
        for _ in range(2 * OFTEN):
            recorded.run(("sum", number), function, (rows(0),))
    assert recorded.recorded_keys() == [("rows", 1)] and sum(tried) == 20
    monkeypatch.setattr(graphs, "MOST_MET", 5)
    for number in range(50):
        recorded.run(("once", number), function, (rows(0),))
    assert len(recorded._table._num_met) <= 20 + 5 and sum(tried) == 20


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
    assert recorded.holds(("outer",)) and recorded.holds(("inner",))
    again = recorded.run(("outer",), outer, (rows(1),))
    assert again is first
    assert torch.equal(again["out"], ops.silu_mul(ops.concat((rows(1), rows(1)))))


@pytest.mark.parametrize("num_runs", [0, OFTEN], ids=["as a part", "for itself"])
def test_a_part_is_recorded_once_for_all_that_run_it(library: native.Library, num_runs: int) -> None:
    """On its own buffers: what the others give it is copied there."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    calls = []

    def part(x_TH: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(x_TH))
        return (ops.silu_mul(x_TH),)

    def whole(times: int, x_TH: Tensor) -> tuple[Tensor, ...]:
        (out_TH,) = recorded.run(("part",), part, (ops.concat((x_TH,)),))
        return (ops.concat((out_TH,) * times),)

    for _ in range(num_runs):
        recorded.run(("part",), part, (rows(9),))
    for times in (2, 3):
        for seed in range(OFTEN):
            (out,) = recorded.run(("whole", times), partial(whole, times), (rows(seed),))
            assert torch.equal(out, torch.cat([ops.silu_mul(rows(seed))] * times, dim=1))
    assert recorded.holds(("whole", 2)) and recorded.holds(("whole", 3))
    assert len(calls) == OFTEN, "it is called to be counted, and to be recorded"
    for seed, times in enumerate((2, 3, 2, 3), 1):
        (out,) = recorded.run(("whole", times), partial(whole, times), (rows(seed),))
        assert torch.equal(out, torch.cat([ops.silu_mul(rows(seed))] * times, dim=1))
    (alone,) = recorded.run(("part",), part, (rows(7),))
    assert torch.equal(alone, ops.silu_mul(rows(7))) and len(calls) == OFTEN


@pytest.mark.parametrize("is_part", [False, True])
def test_what_a_set_flag_rules_out_is_left_out_of_a_replay(library: native.Library, is_part: bool) -> None:
    """And nothing else, whatever was recorded in it; also as a part of another program."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    flags = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    out_TH = torch.zeros((3, 64))

    def function(x_TH: Tensor) -> Tensor:
        library.copy(out_TH, x_TH)
        with recorded.unless(flags[0]):
            library.copy(out_TH, recorded.run(("part",), lambda y: ops.concat((y,)), (x_TH,)))
            library.copy(out_TH[0], x_TH[1])
            with recorded.unless(flags[1]):
                library.copy(out_TH[1], x_TH[2])
        library.copy(out_TH[2], x_TH[0])
        return out_TH

    def whole(x_TH: Tensor) -> Tensor:
        return recorded.run(("inner",), function, (x_TH,))

    for _ in range(OFTEN):
        recorded.run(("outer",), whole if is_part else function, (rows(0),))
    given = rows(1)
    for first, second, expected in (
        (0, 0, (1, 2, 0)),
        (0, 1, (1, 1, 0)),
        (1, 0, (0, 1, 0)),
        (1, 1, (0, 1, 0)),
    ):
        flags[0][0], flags[1][0] = first, second
        out_TH.zero_()
        recorded.run(("outer",), whole if is_part else function, (given,))
        assert torch.equal(out_TH, given[list(expected)]), (first, second)


def test_a_part_that_cannot_be_recorded_spoils_the_whole_and_no_other_part(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def whole(x_TH: Tensor) -> tuple[Tensor, ...]:
        (half_TH,) = recorded.run(("good",), lambda x_TH: (ops.silu_mul(x_TH),), (x_TH,))
        (sum_TH,) = recorded.run(("bad",), lambda x_TH: (x_TH + 1,), (half_TH,))
        return recorded.run(("last",), lambda x_TH: (ops.concat((x_TH, x_TH)),), (sum_TH,))

    for seed in range(OFTEN):
        (out,) = recorded.run(("whole",), whole, (rows(seed),))
        assert torch.equal(out, (ops.silu_mul(rows(seed)) + 1).repeat(1, 2))
    assert not recorded.holds(("whole",)) and not recorded.holds(("bad",))
    assert recorded.holds(("good",)) and recorded.holds(("last",))


def test_a_part_s_columns_of_something_wider_are_read_as_they_lie(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def whole(x_TH: Tensor) -> tuple[Tensor, ...]:
        return recorded.run(("part",), lambda x_TH: (ops.silu_mul(x_TH),), (x_TH[:, :32],))

    for seed in range(2 * OFTEN):
        (out,) = recorded.run(("whole",), whole, (rows(seed),))
        assert torch.equal(out, ops.silu_mul(rows(seed)[:, :32]))


def test_memory_that_programs_share_counts_once_and_as_long_as_one_is_there(
    library: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of 64 columns that makes 32; each of three programs is given 64 columns, and makes 64 in one place."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def whole(x_TH: Tensor) -> tuple[Tensor, ...]:
        (half_TH,) = recorded.run(("part",), lambda x_TH: (ops.silu_mul(x_TH),), (x_TH,))
        return (ops.concat((half_TH, half_TH)),)

    for number in range(3):
        assert recorded.prepare(("whole", number), whole, (rows(0, 1),))
        assert recorded.num_bytes == (number + 1) * 64 * 4 + held(64, 32, 64)
    recorded._table.most = 2
    assert recorded.prepare(("rows", 1), lambda x_TH: (ops.silu_mul(x_TH),), (rows(0, 1),))
    assert recorded.recorded_keys() == [("whole", 2), ("rows", 1)]
    assert recorded.num_bytes == 2 * 64 * 4 + held(64, 32, 64, 32), (
        "a program has not given up what it is given"
    )


def layers(ops: Ops, num_layers: int, x_TH: Tensor) -> tuple[Tensor, ...]:
    """Each reads the layer before it. A view holds rows of the first one until the end."""
    late_TH = ops.concat((x_TH, x_TH))[1:]
    for _ in range(num_layers):
        x_TH = ops.silu_mul(ops.concat((x_TH, x_TH)))
    return (ops.concat((x_TH[1:], ops.silu_mul(late_TH))),)


def test_layers_write_over_each_other_and_not_over_what_is_still_read(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    for num_layers in (1, 2, 9):
        function = partial(layers, ops, num_layers)
        for seed in range(OFTEN + 2):
            (out,) = recorded.run(("layers", num_layers), function, (rows(seed),))
            assert torch.equal(out, function(rows(seed))[0])
        assert recorded.holds(("layers", num_layers))
    before = recorded.num_bytes
    for num_layers in (50, 5):
        assert recorded.prepare(("layers", num_layers), partial(layers, ops, num_layers), (rows(0),))
    assert recorded.num_bytes == before + 2 * rows(0).nbytes, "more layers take more memory"
    for num_layers in (2, 50, 1, 9, 5):
        (out,) = recorded.run(("layers", num_layers), partial(layers, ops, num_layers), (rows(7),))
        assert torch.equal(out, layers(ops, num_layers, rows(7))[0]), num_layers


def test_a_function_cannot_run_one_that_would_write_over_its_memory(library: native.Library) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def whole(x_TH: Tensor) -> tuple[Tensor, ...]:
        return recorded.run(("both", 1), lambda x_TH: (ops.silu_mul(x_TH),), (x_TH,))

    with pytest.raises(AssertionError, match="would write over"):
        recorded.prepare(("both", 2), whole, (rows(0),))
    assert library.recorder is None


def test_a_function_cannot_pass_results_on_to_another_of_their_kind(library: native.Library) -> None:
    """It would read them where it writes."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def whole(x_TH: Tensor) -> tuple[Tensor, ...]:
        given = recorded.run(("part", 1), lambda x_TH: (ops.concat((x_TH, x_TH)),), (x_TH,))
        return recorded.run(("part", 2), lambda x_TH: (ops.silu_mul(x_TH),), given)

    with pytest.raises(AssertionError, match="returned is given"):
        recorded.prepare(("whole",), whole, (rows(0),))


def test_a_part_that_was_evicted_keeps_the_memory_that_a_program_copies_to(
    library: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the program would write into whatever has that memory now."""
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)
    inputs: list[weakref.ref[Tensor]] = []

    def part(x_TH: Tensor) -> tuple[Tensor, ...]:
        inputs.append(weakref.ref(x_TH))
        return (ops.silu_mul(x_TH),)

    def whole(x_TH: Tensor) -> tuple[Tensor, ...]:
        return recorded.run(("part",), part, (ops.concat((x_TH,)),))

    recorded._table.most = 2
    recorded.prepare(("part",), part, (rows(9),))
    recorded.prepare(("whole",), whole, (rows(0),))
    recorded.prepare(("other",), lambda x_TH: (ops.silu_mul(x_TH),), (rows(0),))
    assert recorded.holds(("whole",)) and not recorded.holds(("part",))
    assert inputs[-1]() is not None
    (out,) = recorded.run(("whole",), whole, (rows(5),))
    assert torch.equal(out, ops.silu_mul(rows(5)))


def test_what_is_prepared_is_recorded_at_once_and_what_is_asked_for_soon_the_second_time(
    library: native.Library,
) -> None:
    ops, recorded = select(torch.device("cpu"), library), Recorded(library)

    def function(x_TH: Tensor) -> tuple[Tensor, ...]:
        return (ops.silu_mul(x_TH),)

    recorded.run(("key",), function, (rows(0),), when=lambda: SOON)
    assert not recorded.holds(("key",)) and recorded.num_warming == 1
    recorded.run(("key",), function, (rows(0),), when=lambda: SOON)
    number = recorded.holds(("key",))
    assert number and recorded.num_warming == 2, "recording takes a few runs' time"
    recorded.run(("key",), function, (rows(0),), when=lambda: SOON)
    assert recorded.num_warming == 2
    assert recorded.prepare(("key",), function, (rows(0),)) and recorded.holds(("key",)) == number
    tried = []

    def other(x_TH: Tensor) -> tuple[Tensor, ...]:
        tried.append(library.recorder is not None)
        return (x_TH + 1,)

    assert not recorded.prepare(("other",), other, (rows(0),))
    for _ in range(2 * OFTEN):
        recorded.run(("once",), other, (rows(0),), when=lambda: SOON)
    assert tried == [True, False, True] + [False] * (2 * OFTEN - 2), "what failed is not tried again"


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
