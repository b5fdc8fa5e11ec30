"""The check of a head: its table shows the engine's counts, and a changed output ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof import assets
from draftproof.cli import options
from draftproof.train import check
from draftproof.train.check import HeldOutPrompt, Row

ENGINE = {"model": str(assets.path(assets.TARGET)), "device": "cpu", "max_num_seqs": 1}
HEAD = assets.path(options.EMBEDDED_DRAFTER)
PROMPTS = [HeldOutPrompt("code", [40, 50, 60]), HeldOutPrompt("prose", [70, 80, 90, 100])]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return check.check(ENGINE, HEAD, PROMPTS, [0.0, 0.8], max_tokens=16)


def test_every_domain_temperature_and_drafter_has_a_row(rows: list[Row]) -> None:
    drafters = [check.PLAIN, check.NGRAM, check.HEAD, check.ALL_DRAFTS]
    wanted = {(d, t, name) for d in ("code", "prose") for t in (0.0, 0.8) for name in drafters}
    assert {(row.domain, row.temperature, row.drafter) for row in rows} == wanted
    for row in rows:
        assert 1 <= row.num_tokens <= 16
        if row.drafter == check.PLAIN:
            assert row.stats.num_rounds == row.num_tokens - 1 and not row.stats.num_draft_tokens
        if row.drafter == check.ALL_DRAFTS:
            assert len(row.shares) == 5 and row.shares == sorted(row.shares, reverse=True)
            assert row.stats.num_accepted_tokens > 0


def test_the_report_has_the_rows_figures(rows: list[Row], tmp_path: Path) -> None:
    table = check.report(rows, tmp_path)
    assert (tmp_path / check.REPORT).read_text() == table + "\n"
    assert len(table.splitlines()) == 2 + len(rows)
    records = json.loads((tmp_path / "report.json").read_text())["rows"]
    for row, record in zip(rows, records, strict=True):
        assert record["tau"] == row.stats.acceptance_length
        assert record["against_plain"] == pytest.approx(row.speed / _plain_speed(rows, row))
    assert (tmp_path / "acceptance.png").stat().st_size > 1000


def _plain_speed(rows: list[Row], like: Row) -> float:
    found = [r for r in rows if (r.domain, r.temperature) == (like.domain, like.temperature)]
    return next(row.speed for row in found if row.drafter == check.PLAIN)


def test_a_changed_output_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check._params
    calls = []

    def other_seed(temperature: float, max_tokens: int, number: int) -> object:
        calls.append(number)
        return real(1.0, max_tokens, len(calls))

    monkeypatch.setattr(check, "_params", other_seed)
    with pytest.raises(ValueError, match="prompt 0: drafts changed the output"):
        check.check(ENGINE, HEAD, PROMPTS[:1], [1.0], max_tokens=16)


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to another target"):
        check.check(ENGINE, assets.path(options.SMOLLM2_DRAFTER), PROMPTS, [0.0], max_tokens=4)
