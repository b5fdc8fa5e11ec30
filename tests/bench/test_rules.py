"""The rules that ours is compared with in bench/adaptive.py, and the comparison itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import adaptive, matrix
from bench.rules import AverageAcceptance, BatchTable
from draftproof.bench import internals
from draftproof.engine.acceptance import POOL_WEIGHT, Acceptance
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.costs import Curve, StepCosts, StepOutcome
from draftproof.engine.progress import Round
from tests.engine.test_policy import costs
from tests.engine.test_scheduler import request


def ask(rule: Any, num_requests: int) -> int:
    numbers = rule.choose([request(4, i) for i in range(num_requests)], 0)
    assert len(numbers) == num_requests and len(set(numbers)) == 1
    return int(numbers[0])


def test_a_table_goes_by_the_number_of_requests() -> None:
    rule = BatchTable([(4, 5), (16, 2)])
    assert [ask(rule, n) for n in (1, 4, 5, 16, 17)] == [5, 5, 2, 2, 0]


@pytest.mark.parametrize(("accepted", "ends"), [(0, 1), (5, 5)])
def test_average_acceptance_moves_the_number(accepted: int, ends: int) -> None:
    rule = AverageAcceptance(5)
    assert rule.report_every == 1, "its average is over all steps"
    for _ in range(100):
        k = ask(rule, 1)
        rule.verified(request(4), k, min(accepted, k))
        rule.finished(StepOutcome(1, 1 + k, k, 1, 0, 1.0, 0.0))
    assert ask(rule, 1) == ends
    assert ask(rule, 64) == 0


def test_a_ratio_comes_with_an_interval() -> None:
    ours, theirs = (adaptive.Way(name, llm=None) for name in "ab")  # type: ignore[arg-type]
    ours.seconds, ours.tokens = [1.0, 2.0, 1.0, 2.0], [10] * 4
    theirs.seconds, theirs.tokens = [2.0, 2.0, 2.0, 2.0], [10] * 4
    middle, low, high = adaptive.ratio(ours, theirs, range(4))
    assert middle == pytest.approx(8 / 6) and 1 <= low < middle < high <= 2


def test_the_comparison_runs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small model of a published shape, replayed drafts: outputs are equal, and every way has a speed."""
    flags = [
        "--shape",
        "8b",
        "--small",
        str(tmp_path),
        "--device",
        "cpu",
        "--rates",
        "0.8",
        "--batches",
        "1,2",
    ]
    monkeypatch.setattr(adaptive, "HOPELESS", 0.0)  # so that no number is left out by the clock
    file = tmp_path / "rows.json"
    more = [
        "--num-turns",
        "2",
        "--tokens",
        "12",
        "--waves",
        "1",
        "--measured-seconds",
        "0",
        "--json",
        str(file),
    ]
    monkeypatch.setattr("sys.argv", ["adaptive", *flags, *more])
    adaptive.main()
    out = capsys.readouterr().out
    assert out.count("same: True") == 2 and "K=5" in out and "SGLang's" in out and "of 2 cells hold" in out
    rows = json.loads(file.read_text())
    assert [row["batch"] for row in rows] == [1, 2] and out.count("| 8b, right at 0.8 | ") == 2


def test_every_cell_s_process_is_named_and_its_drafter_is_there() -> None:
    drafters = matrix.tiny()
    assert {"n-gram", "suffix", "eagle3", "mtp", "dflash", "dflash2", "dspark", "peagle", "chain"} < set(
        drafters
    )
    assert all(Path(config["model"]).is_dir() for config in drafters.values() if "model" in config)
    named = [name for name, _ in matrix.processes()]
    assert len(set(named)) == len(named) and {f"tiny, {name}" for name in drafters} < set(named)


def test_a_table_says_what_fails() -> None:
    ratio = {"ratio": 0.9, "low": 0.8, "high": 0.95, "bound": 0.97, "ok": False}
    names = ("auto/plain", "new/plain", "auto/best (K=1)", matrix.VLLM, matrix.SGLANG)
    row = {"cell": "x", "batch": 4, "num_turns": 5, "same": True, "ratios": dict.fromkeys(names, ratio)}
    row |= {"predicted": 1.2, "measured": 1.0, "predicted_k": 1}
    assert not matrix.holds(row) and not matrix.is_predicted(row) and "**fails**" in matrix.table([row])
    good = {**row, "ratios": {n: {**ratio, "ok": True} for n in names}, "predicted": 1.05}
    assert matrix.holds(good) and matrix.is_predicted(good) and "fails" not in matrix.table([good])
    assert not matrix.holds({**good, "same": False})
    off = {**good, "predicted": 1.15}
    assert (
        matrix.is_fast(off)
        and not matrix.holds(off)
        and "1.15 / 1.00 (K=1) **off** | no" in matrix.table([off])
    )


def test_a_cell_that_fails_is_measured_again_for_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What that shows counts, for or against."""
    commands = list[list[str]]()

    def run(program: str, name: str, arguments: list[str], cores: set[int]) -> list[dict[str, Any]]:
        commands.append(arguments)
        is_again = len(commands) > 2
        ok = {"ok": name == "good" or (is_again and name == "unlucky")}
        row = {"cell": name, "batch": 4, "num_turns": 48 if is_again else 12, "same": True}
        return [{**row, "ratios": {"auto/plain": ok}, "predicted": 1.0, "measured": 1.0}]

    named = [("good", ["--batches", "16,4"]), ("unlucky", ["--batches", "16,4", "--seconds", "9"])]
    assert not matrix.holds({"same": False, "ratios": {}}), "which is not tried again"
    monkeypatch.setattr(matrix, "processes", lambda: iter(named))
    monkeypatch.setattr(matrix, "_run", run)
    good, unlucky = matrix.rows("cpu", 1, "")
    assert commands[2:] == [[*named[1][1], "--batches", "4", "--num-turns", "48", "--seconds", "inf"]]
    assert matrix.holds(good) and "first_ratios" not in good
    assert matrix.holds(unlucky) and unlucky["first_ratios"] == {"auto/plain": {"ok": False}}
    printed = capsys.readouterr().out
    assert "1 of 2 cells are measured again" in printed and "0 predictions are" in printed


@pytest.mark.parametrize("alone", [["--predictions"], []])
@pytest.mark.parametrize("later", [1.05, 1.2])
def test_a_prediction_that_is_off_is_measured_again_for_longer(
    monkeypatch: pytest.MonkeyPatch, later: float, alone: list[str]
) -> None:
    """What that shows counts, for or against; the cell's speeds stay. An output that differs is not tried again."""
    commands = list[list[str]]()

    def run(program: str, name: str, arguments: list[str], cores: set[int]) -> list[dict[str, Any]]:
        commands.append(arguments)
        row = {"cell": name, "batch": 4, "same": name != "differs", "measured": 1.0, "predicted_k": 2}
        if "--measured-seconds" in arguments:
            return [{**row, "predicted": later}]
        return [{**row, "predicted": 1.0 if name == "good" else 0.8, "ratios": {"auto/plain": {"ok": True}}}]

    given = ["--batches", "1,4"] + ["--changing"] * (not alone)
    monkeypatch.setattr(matrix, "processes", lambda: ((name, given) for name in ("good", "off", "differs")))
    monkeypatch.setattr(matrix, "_run", run)
    good, off, differs = matrix.rows("cpu", 1, "")
    longer = str(matrix.AGAIN * matrix.MEASURED_SECONDS)
    assert commands[3:] == [[*given, "--batches", "4", *alone, "--measured-seconds", longer]]
    assert matrix.holds(good) and "first_predicted" not in good and not matrix.holds(differs)
    assert matrix.holds(off) == (later < 1.1) and off["predicted"] == later
    assert off["first_predicted"] == (0.8, 1.0) and off["ratios"] == {"auto/plain": {"ok": True}}


def test_that_no_drafts_are_predicted_later_does_not_make_an_off_prediction_right() -> None:
    row = {"predicted_k": 2, "predicted": 1.3, "measured": 1.0, "same": True}
    plain = {**row, "predicted_k": 0, "predicted": 1.0}
    assert not matrix.is_predicted(matrix._predicted_again(row, plain))
    assert matrix.is_predicted(matrix._predicted_again(row, {**row, "measured": 1.25}))


def test_a_cell_of_predictions_alone_holds_if_its_prediction_is_right() -> None:
    row = {"cell": "tiny", "batch": 4, "same": True, "predicted": 1.05, "measured": 1.0, "predicted_k": 2}
    wrong = {**row, "predicted": 1.2}
    assert matrix.holds(row) and not matrix.holds(wrong) and not matrix.holds({**row, "same": False})
    table = matrix.table([row, wrong]).splitlines()
    assert table[2:] == ["| tiny | 4 | 1.05 / 1.00 (K=2) |", "| tiny | 4 | 1.20 / 1.00 (K=2) **off** |"]


def test_acceptance_is_that_of_the_steps_that_are_compared() -> None:
    """Two requests. Before their first step alike one still had its prompt; in the last one is alone."""
    auto = AutoPolicy(costs(), Acceptance(8))
    asker = internals.together(auto, num_together=2, num_asked=1)
    both = [request(4, i) for i in range(2)]
    for asked, num_accepted in ((both[:1], 0), (both, 1), (both, 1), (both[:1], 0)):
        assert asker.choose(asked, 0) == [1] * len(asked)
        for one in asked:
            asker.verified(one, 1, num_accepted)
        for one in asked:
            asker.proposed(one, 1, 1)
        asker.finished(StepOutcome(len(asked), 2 * len(asked), 1, len(asked), 0, 1.0))
    assert asker.predict(2) and asker.acceptance.accepted.least[0] == 4 / (4 + POOL_WEIGHT)


def bench_without_engines() -> adaptive.Bench:
    never: Any = None
    drafting: Any = SimpleNamespace(core=SimpleNamespace(runner=SimpleNamespace(async_depth=0)))
    return adaptive.Bench(
        plain=never,
        drafting=drafting,
        batches=(1,),
        waves=1,
        num_tokens=4,
        num_turns=2,
        seconds=0.0,
        measured_seconds=0.0,
        temperature=0.0,
        new=never,
    )


@pytest.mark.parametrize("differs", [False, True])
def test_auto_learns_for_as_long_as_the_other_two_run(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn with drafts takes one second, one without two, and one of `auto` one. `differs`: its fifth output."""
    took, runs = {"drafted": 1.0, "plain": 2.0, "auto": 1.0}, Counter[str]()

    def run(way: adaptive.Way, prompts: list[list[int]], params: Any) -> None:
        runs[way.name] += 1
        way.seconds.append(took[way.name])
        way.starts.append(len(way.steps))
        way.steps.append(StepOutcome(1, 1, 0, 1, 0, took[way.name]))
        way.outputs.append((8 if differs and way.name == "auto" and runs["auto"] == 5 else 7,))

    monkeypatch.setattr(adaptive.Way, "run", run)
    never: Any = None
    bench = bench_without_engines()
    found = bench._speedup(never, lambda: never, StepCosts((0, 1)), num_turns=2, batch=1, prompts=[[1]])
    assert runs == {"drafted": 2, "plain": 2, "auto": 6} and len(found.believed) == 2
    assert found.speedup == 2.0 and found.same == (not differs)


@pytest.mark.parametrize(("gained", "measured"), [(0.8, 1.0), (1.2, 1.2)])
def test_if_no_drafts_are_predicted_to_pay_the_fewest_are_measured(
    gained: float, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They gain more than was predicted, or lose: then none are best, which gains nothing."""
    auto = AutoPolicy(costs(row=1.0, step=1.0), Acceptance(8, expected=0.1))

    def speedup(bench: adaptive.Bench, auto: Any, told: Any, *given: Any) -> adaptive.Speedup:
        assert told().choose([request(4)], 0) == [1]
        return adaptive.Speedup(gained, 0, same=True, believed=[], steps={})

    monkeypatch.setattr(adaptive.Bench, "_speedup", speedup)
    monkeypatch.setattr(internals, "knowing", lambda auto, asked: auto)
    asked: Any = None
    found = bench_without_engines()._predicted(auto, 1, [[1]], asked, 2)
    assert (found["predicted_k"], found["predicted"], found["measured"]) == (0, 1.0, measured)
    assert matrix.is_predicted(found) == (gained < 1.1)


def test_steps_are_shown_by_size_with_what_is_believed_of_them() -> None:
    its = costs()
    steps = [
        StepOutcome(2, 4, 1, 3, 0, 0.5),
        StepOutcome(2, 3, 1, 2, 0, 0.7),
        StepOutcome(1, 1, 0, 1, 0, 0.1),
    ]
    drafted, plain = adaptive.by_size(steps, its)
    assert (drafted["requests"], drafted["drafts"], drafted["steps"]) == (2, 1, 2)
    assert (drafted["rows"], drafted["ms"]) == (3.5, 600.0)
    believed = (its.step(2, 4, 1, 0) + its.step(2, 3, 1, 0)) / 2
    assert drafted["believed_ms"] == pytest.approx(1e3 * believed, abs=1e-3)
    assert (plain["requests"], plain["drafts"], plain["steps"], plain["ms"]) == (1, 0, 1, 100.0)


def test_a_chain_s_lookups_are_asked_how_many_drafts_they_make() -> None:
    """Four asked for, two made in each round, both right."""
    auto = AutoPolicy(costs(), Acceptance(8))
    both = [internals.together(auto, num_together=1, num_asked=number) for number in (4, 0)]
    asker = internals.AskingLookups(*both)
    its = request(4)
    for _ in range(200):
        assert asker.choose([its], 0) == [4]
        asker.learn(its, [Round(2, 2, 4, 2, 0)])
        asker.finished(StepOutcome(1, 3, 4, 3, 0, 1.0))
    found = asker.lookups.acceptance
    assert found.longer[1] > 0.9 and found.longer[2] < 0.1
    assert 2.5 < asker.lookups.chooser.tokens(1.0, 0)[4] < 3.1
    assert not asker.models.acceptance.accepted.least[0]


def test_what_is_predicted_counts_all_turns_alike() -> None:
    """Plain steps seem to take twice as long after the second turn, and steps with drafts no longer."""
    first, second = (StepCosts((0, 1), target=Curve({1: base, 2: 1.5})) for base in (1.0, 2.0))
    acceptance = Acceptance(1, expected=0.9)
    alone = [AutoPolicy(its, acceptance).predict(1).speedup for its in (first, second)]
    measured = adaptive.Speedup(1.0, 0, same=True, believed=[first, second], steps={})
    both = measured.predicted(acceptance, 1, 1, 10**9)
    assert alone[0] < both < alone[1]
    assert both == pytest.approx((1.0 + 2.0) / (1.0 / alone[0] + 2.0 / alone[1]), rel=1e-6)


def test_a_single_disturbance_is_left_out_of_a_step_s_time_and_slow_seconds_are_not() -> None:
    assert adaptive._middle_mean([1.0, 50.0]) == 25.5
    assert adaptive._middle_mean([1.0, 50.0, 2.0]) == 2.0
    assert adaptive._middle_mean([1.0] * 19 + [50.0]) == 1.0
    assert adaptive._middle_mean([1.0] * 10 + [2.0] * 10) == 1.5


def test_steps_after_a_prompt_take_what_others_of_their_size_do() -> None:
    """They count with their tokens. A size that has no others takes what it took."""
    way = adaptive.Way("drafted", llm=None)  # type: ignore[arg-type]
    step = StepOutcome(1, 3, 2, 2, 0, 1.0)
    way.steps = [step._replace(seconds=9.0, num_tokens=1, is_typical=False), step, step]
    assert way.decoding_speed(1) == pytest.approx((1 + 2 + 2) / 3.0)
    way.steps.append(step._replace(num_rows=2, num_tokens=1, seconds=3.0, is_typical=False))
    assert way.decoding_speed(1) == pytest.approx((1 + 2 + 2 + 1) / 6.0)


def test_what_a_prompt_adds_to_plain_steps_is_taken_off_those_of_a_size_that_has_no_others() -> None:
    """After each of two prompts the first plain step takes 5 seconds, the second 3 and then 4, others 2."""
    plain, drafted = (adaptive.Way(name, llm=None) for name in ("plain", "drafted"))  # type: ignore[arg-type]
    step, late = StepOutcome(1, 1, 0, 1, 0, 2.0), StepOutcome(1, 1, 0, 1, 0, 2.0, is_typical=False)
    both = StepOutcome(2, 2, 0, 2, 0, 9.0, is_typical=False)
    plain.steps = [late._replace(seconds=5.0), late._replace(seconds=3.0), step, step, both]
    plain.steps += [step, late._replace(seconds=5.0), late._replace(seconds=4.0), step]
    assert plain.slowed(1) == [3.0, 1.5] and plain.slowed(2) == []
    drafts = StepOutcome(1, 3, 2, 2, 0, 8.0, is_typical=False)
    drafted.starts = [0, 3]
    drafted.steps = [
        drafts,
        drafts._replace(num_rows=2, seconds=6.0),
        drafts._replace(num_rows=4, seconds=9.0),
    ]
    assert drafted.decoding_speed(1, plain.slowed(1)) == pytest.approx(6 / (5.0 + 4.5 + 9.0))
    drafted.steps.append(drafts)  # the first of another turn
    assert drafted.decoding_speed(1, plain.slowed(1)) == pytest.approx(8 / (2 * 5.0 + 4.5 + 9.0))
