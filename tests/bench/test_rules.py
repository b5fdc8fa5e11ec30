"""The rules that ours is compared with in bench/adaptive.py, and the comparison itself."""

from __future__ import annotations

from typing import Any

import pytest

from bench import adaptive
from bench.rules import AverageAcceptance, BatchTable
from draftproof.engine.costs import StepOutcome
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
    monkeypatch.setattr("sys.argv", ["adaptive", *flags, "--num-turns", "2", "--tokens", "12"])
    adaptive.main()
    out = capsys.readouterr().out
    assert out.count("same: True") == 2 and "K=5" in out and "SGLang's" in out and "of 2 cells hold" in out
