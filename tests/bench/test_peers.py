"""Other engines beside ours: processes, turns, foreign load, the report; GGUF files are in test_gguf.py."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftproof import assets
from draftproof.bench import peers, report
from draftproof.bench.peers import comparison, load, plan
from draftproof.bench.peers.comparison import Comparison, Work
from draftproof.bench.peers.engine import Ids, Spec
from draftproof.bench.peers.processes import Answer, EngineFailedError, EngineProcess, busy
from draftproof.cli.main import main
from draftproof.models.config import read_config
from tests.slow import slow

ROOT = Path(__file__).parents[2]
WORK = Work(
    dtypes=["bfloat16"], batch_sizes=[1, 2], num_new=4, length=6, num_rounds=3, num_threads=1,
    source=list(range(100, 150)), vocab_size=1000, weight_bytes={"bfloat16": 2e6},
)  # fmt: skip
FULL = Spec(where="tests.bench.fake_engine:Fake", model="known", dtype="float32", num_threads=2)


# processes


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    started = EngineProcess("fake", FULL)
    yield started
    started.close()


def test_an_engine_answers_from_a_process_of_its_own(process: EngineProcess) -> None:
    assert process.version == "1.0" and process.ways == {"backwards": "single"}
    assert process.settings == {"threads": 2, "omp": "2"} and process.weight_bytes == 1e6
    found = process.generate([[[5, 9], [6, 20]], [[7, 30]]], 2)
    assert found.outputs == [[[10, 11], [21, 22]], [[31, 32]]] and found.seconds == [0.5, 0.5]
    assert 0 <= found.cpu_seconds < 5
    assert process.generate([[[5, 9]]], 2, "backwards").outputs == [[[8, 7]]]
    with pytest.raises(EngineFailedError, match=r"^RuntimeError: out of fuel$"):
        process.generate([[[1]]], 2)
    assert process.is_alive and process.generate([[[5, 9]]], 1).outputs == [[[10]]]
    with pytest.raises(EngineFailedError, match=r"^its process ended with status 7 \(a check failed\)$"):
        process.generate([[[2]]], 2)
    assert not process.is_alive


def test_an_engine_that_hangs_is_ended(process: EngineProcess) -> None:
    with pytest.raises(EngineFailedError, match="took more than 0 s"):
        process.generate([[[3]]], 2, limit_s=0.1)


def test_a_model_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    with pytest.raises(EngineFailedError) as caught:
        EngineProcess("fake", Spec(where=FULL.where, model="unknown", dtype="float32"))
    assert str(caught.value) == "KeyError: 'no such model\\nat all'"


def test_busy_processes_compute_and_end() -> None:
    with busy(2) as pids:
        assert len(set(pids)) == 2
        before = load.sample(pids)
        while (now := load.sample(pids)) is not None and before is not None and now.ours <= before.ours:
            pass  # ends as soon as the clock of their time has ticked
    assert not any((Path("/proc") / str(pid)).exists() for pid in pids)


# turns


class FakeProcess:
    """Writes down what it is asked. `speed`: tokens a second; `fails`: how."""

    settings: Mapping[str, Any] = {}
    version = "1"
    weight_bytes: float | None = None

    def __init__(
        self, name: str, log: list[Any], speed: float, ways: Mapping[str, str], fails: str = ""
    ) -> None:
        self.name, self.log, self.speed, self.ways, self.fails = name, log, speed, ways, fails
        self.is_alive, self.is_closed = True, False

    def generate(self, batches: Sequence[Ids], num_new: int, way: str = "") -> Answer:
        self.log.append((self.name, way, len(batches), [p for b in batches for p in b], num_new))
        if self.fails == "raises" and num_new == WORK.num_new and len(batches[0]) == 2:
            raise EngineFailedError("too large")
        short = self.fails == "is short"
        outputs = [[[p[0]] * (num_new - short) for p in batch] for batch in batches]
        if self.name == "other":
            outputs[0][0] = [0] * num_new
        seconds = [(len(batch) * num_new or 1) / self.speed for batch in batches]
        return Answer(outputs, seconds, sum(seconds))

    def close(self) -> None:
        self.is_closed = True


def compared(
    log: list[Any], work: Work = WORK, together: bool = True, **fails: str
) -> tuple[Comparison, dict[str, FakeProcess]]:
    speeds = {peers.OURS: 100.0, "other": 50.0, "third": 25.0, peers.MEMORY: 10.0}
    made: dict[str, FakeProcess] = {}

    def start(name: str, dtype: str) -> Any:
        if name == "missing":
            raise EngineFailedError("ValueError: knows no such model")
        assert together or all(process.is_closed for process in made.values())
        ways = {"lookup": "single", "continuous": "largest"} if name == "other" else {}
        made[name] = FakeProcess(name, log, speeds[name], ways, fails.get(name, ""))
        made[name].weight_bytes = 1.5e6 if name == peers.OURS else None
        return made[name]

    names = [peers.OURS, "other", "missing", "third", peers.MEMORY]
    found = Comparison(work, names, start, together=together, pause_s=0)
    found.run()
    return found, made


def test_engines_take_turns_on_prompts_that_nobody_has_read() -> None:
    log: list[Any] = []
    found, made = compared(log)
    assert all(process.is_closed for process in made.values())
    per_round = len(log) // 4
    rounds = [log[i : i + per_round] for i in range(0, len(log), per_round)]
    assert [[(name, way, num_new) for name, way, _, _, num_new in turns] for turns in rounds] == [
        [
            ("draftproof", "", 4), ("other", "", 4), ("other", "lookup", 4), ("third", "", 4),
            ("memory", "", 0),
            ("draftproof", "", 4), ("other", "", 4), ("other", "continuous", 4), ("third", "", 4),
            ("draftproof", "", 2), ("other", "", 2), ("third", "", 2),
            ("draftproof", "", 2), ("other", "", 2), ("third", "", 2),
        ]
    ] * 4  # fmt: skip
    by_engine = {
        name: [p for who, way, _, asked, _ in log if (who, way) == (name, "") for p in asked] for name in made
    }
    ours = by_engine[peers.OURS]
    assert by_engine["other"] == by_engine["third"] == ours
    assert all(len(prompt) == 6 for prompt in ours)
    assert len({tuple(prompt[:2]) for prompt in ours}) == len(ours) == 4 * (1 + 2 + 4 + 2)
    assert found.notes == ["missing, bfloat16: ValueError: knows no such model"]


def test_rows_are_medians_without_the_first_round() -> None:
    found, _ = compared([])
    rows = {(row["name"], row["batch_size"]): row for row in found.rows()}
    assert list(rows) == [
        ("draftproof", 1), ("other", 1), ("other, lookup", 1), ("third", 1),
        ("draftproof", 2), ("other", 2), ("other, continuous", 2), ("third", 2),
    ]  # fmt: skip
    ours, other = rows["draftproof", 1], rows["other", 2]
    assert ours["output_throughput"] == pytest.approx(100) and ours["prompt_ms"] == pytest.approx(20)
    assert ours["plain_over_it"] == 1 and ours["num_compared"] == 0 and len(ours["calls"]) == 3
    assert other["output_throughput"] == pytest.approx(50) and other["plain_over_it"] == pytest.approx(2)
    assert (other["num_compared"], other["num_identical"]) == (6, 3)
    assert (rows["third", 2]["num_compared"], rows["third", 2]["num_identical"]) == (6, 6)
    rate = found.read_rate("bfloat16")
    assert rate == pytest.approx(comparison.NUM_BYTES * 10)
    # two tokens more than the prompt's two take 20 ms: 10 ms a step
    assert ours["read_rate_share"] == pytest.approx(1.5e6 / 0.01 / rate), "what the engine says that it reads"
    assert rows["other", 1]["read_rate_share"] == pytest.approx(2e6 / 0.02 / rate), "what the dtype says"
    assert other["read_rate_share"] is None, "only one request's steps read each weight once a token"


@pytest.mark.parametrize(
    ("fails", "note"),
    [
        ("raises", "other, bfloat16, batch 2: too large"),
        ("is short", "other, bfloat16, batch 2: gave 3 tokens, was asked for 4"),
    ],
)
def test_an_engine_that_fails_is_noted_and_the_others_go_on(fails: str, note: str) -> None:
    log: list[Any] = []
    found, _ = compared(log, other=fails)
    assert sum(line.startswith(note) for line in found.notes) == 1
    asked = [entry for entry in log if entry[:2] == ("other", "") and len(entry[3]) == 2 and entry[4] == 4]
    assert len(asked) <= 1, "who failed is not asked again"
    assert {row["name"] for row in found.rows() if row["batch_size"] == 2} >= {"draftproof", "third"}


def test_one_engine_after_the_other_where_they_do_not_fit_together() -> None:
    log: list[Any] = []
    found, _ = compared(log, together=False)
    assert [name for i, (name, *_) in enumerate(log) if not i or log[i - 1][0] != name] == [
        "draftproof", "other", "third", "memory",
    ]  # fmt: skip
    assert {row["num_compared"] for row in found.rows() if row["name"] == "third"} == {3, 6}


def test_a_slow_cell_gets_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "CELL_SECONDS", 0.1)
    found, _ = compared([])
    counts = {row["name"]: len(row["calls"]) for row in found.rows() if row["batch_size"] == 1}
    assert counts["draftproof"] == 3 and counts["third"] == 1


def test_busy_rows_say_what_is_left_of_the_quiet_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "num_cores", lambda: 2)
    work = Work(**{**{f: getattr(WORK, f) for f in WORK.__slots__}, "busy": [1], "num_threads": 2})
    found, _ = compared([], work)
    rows = [row for row in found.busy_rows() if row["name"] == "draftproof"]
    assert [(row["num_busy"], row["batch_size"], row["num_rounds"]) for row in rows] == [(1, 1, 3), (1, 2, 3)]
    assert rows[0]["of_quiet"] == pytest.approx(1) and rows[0]["of_fair_share"] == pytest.approx(3 / 2)


# foreign load


def test_foreign_load_is_what_neither_the_engine_nor_our_processes_took() -> None:
    before, after = load.Sample(10.0, 100.0, 5.0), load.Sample(12.0, 103.5, 6.0)
    assert load.foreign_share(before, after, 2.0, 2) == pytest.approx((3.5 - 1 - 2) / 4)
    assert load.foreign_share(before, after, 3.0, 2) == 0, "clocks tick apart: never less than nothing"
    assert load.foreign_share(None, after, 2.0, 2) is None


def test_processor_time_is_read_from_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "cpu  100 20 30 4000 50 6 7 8 90 10\ncpu0 1 1 1 1\n"
    assert load.machine_seconds(stat, 100) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 100)
    own = "42 (a (b) c) S 1 1 1 0 -1 4194304 9 0 0 0 250 50 0 0 20 0 3 0 7 8 9"
    assert load.process_seconds(own, 100) == pytest.approx(3)
    monkeypatch.setattr(load, "PROC", tmp_path)
    assert load.sample() is None, "no such system"


# the command


def test_a_peer_that_is_not_installed_is_answered_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "throughput", "--against", "llama.cpp", "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "--against llama.cpp: llama-cpp-python is not installed; pip install 'draftproof[peers]'" in said


def test_weights_of_a_step_are_counted_in_the_dtype() -> None:
    model = read_config(assets.path(assets.TARGET))
    assert plan.weight_bytes(model, "float32") == 2 * plan.weight_bytes(model, "bfloat16") > 1e7


def test_the_page_shows_engines_and_what_they_rest_on() -> None:
    found, _ = compared([])
    beside = plan.Beside(
        rows=found.rows(),
        busy=[],
        engines=found.engines,
        bytes_per_second={"float32": 35e9},
        notes=found.notes,
    )
    lines = report.beside_others({field: getattr(beside, field) for field in beside.__slots__})
    page = "\n".join(lines)
    assert "| other | bfloat16 | 2 | 50 | 2.00 |" in page and "| 3 of 6 |" in page
    assert (
        "The machine reads 35.0 GB/s beside float32." in page
        and "Note: missing, bfloat16: ValueError" in page
    )
    assert "other 1: " in page and "memory" not in page


@slow
def test_transformers_is_compared_with_the_same_random_weights(tmp_path: Path) -> None:
    arguments = (
        "bench throughput --batch-sizes 1,2 --load-format dummy --random-input-len 9 --against transformers "
        "--output-len 12 --num-prompts 2 --num-iters 1 --dtype float32 --threads 1 --output-dir"
    )
    assert main([*arguments.split(), str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["against"]
    assert [(r["name"], r["batch_size"]) for r in found["rows"]] == [
        ("draftproof", 1), ("transformers", 1), ("transformers, prompt lookup", 1),
        ("draftproof", 2), ("transformers", 2),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["num_identical"] == row["num_compared"], "fp32, and no ties in random weights"
        assert row["output_throughput"] > 0
    assert set(found["engines"]) == {"draftproof", "transformers", "memory"}
