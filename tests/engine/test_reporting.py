"""Log lines about drafting, and the acceptance rate in the counters."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from draftproof import LLM, SamplingParams
from draftproof.engine.reporting import INTERVAL, AcceptanceReport, speculation_line
from draftproof.metrics import Prediction, SpeculationStats
from tests.conformance.cases import CASES, REPEATS, Case
from tests.made.shared import DFLASH, EAGLE3, fewer_tokens

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}


def lines(caplog: pytest.LogCaptureFixture, config: dict[str, Any], **settings: Any) -> list[str]:
    with caplog.at_level(logging.INFO, "draftproof"):
        LLM(**{**SETTINGS, **settings}, speculative_config=config)
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("drafter ")]


EXPECTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no checkpoint": (
        {"method": "ngram"},
        [r"drafter ngram: K=16 \(the method's\); taps: none"],
    ),
    "a head": (
        {"model": EAGLE3, "num_speculative_tokens": 3},
        [
            r"drafter eagle3: K=3 \(as asked\); taps: \d \d \d \(.*config.*\); embedding: the target's; "
            r"lm_head: the target's; vocabulary: \d+ of the target's 8192 ids, by d2t; from .*tiny-eagle3.*"
        ],
    ),
    "a block": (
        {"model": DFLASH},
        [
            r"drafter dflash: K=7 \(its checkpoint's\); taps: [\d ]+ \(its config's\); embedding: .*; lm_head: .*; "
            r"vocabulary: .*"
        ],
    ),
    "a model with other tokens": (
        {"model": fewer_tokens},
        [
            r"drafter draft_model: K=5 \(the method's\); taps: none; embedding: own; lm_head: own; vocabulary: \d+ of "
            r"the target's \d+ tokens, by their text; from .*"
        ],
    ),
    "a chain": (
        {
            "method": "chain",
            "drafters": [{"method": "suffix"}, {"model": EAGLE3}],
            "num_speculative_tokens": 2,
        },
        [
            r"drafter suffix: K=2 \(what its chain allows\); taps: none",
            r"drafter eagle3: K=2 \(.*\); taps: .*",
        ],
    ),
    "a user's": (
        {"method": "examples.custom_drafter.LastSeen"},
        [r"drafter examples.custom_drafter.LastSeen: K=5 \(the method's\); taps: none"],
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_each_drafter_says_what_it_is(case: str, caplog: pytest.LogCaptureFixture) -> None:
    config, expected = EXPECTED[case]
    found = lines(caplog, Case(config).config)
    assert len(found) == len(expected)
    for line, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_a_head_that_borrows_says_so(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["gemma4_mtp"]
    (line,) = lines(caplog, case.config, model=case.target)
    assert "taps: final (the method sets them); embedding: the target's; lm_head: own" in line


@pytest.mark.parametrize(
    ("speedups", "line"),
    [
        ([(1, 3, 1.9), (8, 2, 1.4), (48, 1, 1.02), (64, 0, 1.0)],
         "speculation on: predicted 1.9x at batch 1 with K=3, off above 48"),
        ([(1, 5, 2.0), (4, 5, 2.25)],
         "speculation on: predicted 2.0x at batch 1 with K=5, 2.2x at batch 4 with K=5"),
        ([(1, 3, 1.9), (2, 0, 1.0), (4, 1, 1.1), (8, 0, 1.0)],
         "speculation on: predicted 1.9x at batch 1 with K=3, off at 2, off above 4"),
        ([(1, 0, 1.0)], "speculation off: plain decoding is predicted to be faster; drafts are tried now and then"),
    ],
)  # fmt: skip
def test_what_is_expected_of_speculation_is_one_line(speedups: list[Any], line: str) -> None:
    assert speculation_line([Prediction(*numbers) for numbers in speedups]) == line


def test_an_engine_says_what_it_expects(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "draftproof"):
        llm = LLM(**SETTINGS, speculative_config={"model": EAGLE3})
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("speculation o")]
    assert said == [speculation_line(llm.stats.predictions)]
    assert llm.stats.predictions[0].num_requests == 1
    caplog.clear()
    with caplog.at_level(logging.INFO, "draftproof"):
        fixed = LLM(**SETTINGS, speculative_config={"model": EAGLE3, "num_speculative_tokens": 2})
    assert not fixed.stats.predictions and "speculation o" not in caplog.text


def test_acceptance_is_reported_at_intervals() -> None:
    stats = SpeculationStats()
    report = AcceptanceReport(lambda: stats, now=100.0)
    stats.record(2, 1)
    assert report.due(100.0 + INTERVAL / 2) is None
    stats.record(3, 2)
    line = report.due(100.0 + INTERVAL)
    assert line is not None
    assert "last 10 s: 3 of 5 drafts accepted (60 %), 2.50 tokens a round in 2 rounds" in line
    assert line.endswith("1.00 0.50 0.00")
    stats.record(4, 0)
    assert "last 12 s: 0 of 4 drafts accepted (0 %)" in str(report.due(112.0 + INTERVAL))
    assert report.due(200.0 + INTERVAL) is None  # nothing was drafted meanwhile


def test_the_engine_reports_while_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftproof.engine.reporting.INTERVAL", 0.0)
    llm = LLM(**SETTINGS, speculative_config={"model": EAGLE3, "policy": "fixed"})
    with caplog.at_level(logging.INFO, "draftproof"):
        llm.generate(REPEATS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert any("drafts accepted" in r.getMessage() for r in caplog.records)


def test_the_acceptance_rate_is_counted_by_request_and_engine() -> None:
    llm = LLM(**SETTINGS, speculative_config={"model": EAGLE3, "policy": "fixed"})
    params = SamplingParams(temperature=0, max_tokens=30)
    output = llm.generate(REPEATS, params, use_tqdm=False)[0]
    own, all_ = output.metrics.speculation, llm.stats.speculation
    assert own.num_draft_tokens > own.num_accepted_tokens > 0
    assert own.acceptance_rate == own.num_accepted_tokens / own.num_draft_tokens == all_.acceptance_rate
    assert SpeculationStats().acceptance_rate == 0
