"""`draftproof bench`: what is swept and compared, what lies in the folder, what is refused."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, assets
from draftproof.bench import harness, plots, suite
from draftproof.bench.drive import Client, ClientResult, Job
from draftproof.cli import options
from draftproof.cli.main import main
from tests.slow import slow

SHAPE = str(Path(__file__).parents[2] / "bench" / "shapes" / "llama-3.1-8b")
SMALL = ["--output-len", "12", "--num-prompts", "3", "--num-iters", "1", "--dtype", "float32"]


def bench(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["bench", *arguments, *SMALL, "--output-dir", str(folder)])
    return status, json.loads((folder / "results.json").read_text())


def test_latency_sweeps_drafts_and_batches_and_finds_outputs_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    peaks = ("--peak-bandwidth", "1000", "--peak-flops", "100")
    status, results = bench(tmp_path, "latency", "--batch-sizes", "1,2", "--num-drafts", "1,3", *peaks)
    assert status == 0 and results["identical"] is True
    runs = results["runs"]
    assert [(r["name"], r["batch_size"]) for r in runs] == [
        (name, batch) for batch in (1, 2) for name in ("plain", "K=1", "K=3")
    ]
    for run in runs:
        assert run["total_output_tokens"] == 12 * run["batch_size"]
        assert 0 < run["roofline_share"] < 1
        assert sum(run["time_split"][part] for part in ("verify", "draft", "host")) == pytest.approx(1)
        assert run["median_ttft_ms"] > 0 and run["p99_tpot_ms"] > 0 and run["speedup"] > 0
    drafting = runs[5]
    assert 1 < drafting["spec_decode_acceptance_length"] <= 4
    assert len(drafting["acceptance_length_by_request"]) == 2
    assert len(drafting["spec_decode_per_position_acceptance_rates"]) == 3
    assert drafting["num_compared"] == 2
    assert results["environment"]["dtype"] == "float32" and results["environment"]["versions"]["torch"]
    page = (tmp_path / "results.md").read_text()
    assert "| K=3 | 2 |" in page and "identical: yes" in page
    said = capsys.readouterr()
    assert "identical: yes" in said.out
    assert "no plots: matplotlib is not installed (pip install draftproof[bench])" in said.err
    assert said.err.count("draft weights") == 1, "the memory line comes once"


@slow
def test_replayed_drafts_are_right_as_often_as_asked(tmp_path: Path) -> None:
    status, results = bench(
        tmp_path, "throughput", "--batch-sizes", "2", "--num-drafts", "2", "--replay-acceptance", "0,1"
    )
    _, never, always = results["runs"]
    assert status == 0 and results["identical"] is True
    assert never["spec_decode_acceptance_rate"] == 0 < never["spec_decode_draft_tokens"]
    assert always["spec_decode_acceptance_rate"] == 100
    assert always["spec_decode_acceptance_length"] > 2.5


def test_what_was_measured_before_an_interruption_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Client):
        left = 3  # two warm-ups, then plain decoding

        def run(self, jobs: Sequence[Job]) -> ClientResult:
            Interrupted.left -= 1
            if Interrupted.left < 0:
                raise KeyboardInterrupt
            return super().run(jobs)

    monkeypatch.setattr(harness, "Client", Interrupted)
    status, results = bench(tmp_path, "throughput", "--batch-sizes", "2")
    assert status == 130
    assert [run["name"] for run in results["runs"]] == ["plain"]
    assert results["identical"] is None and "interrupted" in results["notes"][0]


@slow
def test_engines_that_do_not_fit_together_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[LLM] = weakref.WeakSet()
    most = []

    def make(config: dict[str, Any]) -> LLM:
        llm = LLM(**config)
        alive.add(llm)
        most.append(len(alive))
        return llm

    monkeypatch.setattr(suite, "free_bytes", lambda device: 0)
    monkeypatch.setattr(options, "make_llm", make)
    status, results = bench(tmp_path, "throughput", "--batch-sizes", "2", "--num-drafts", "1,2")
    assert status == 0 and results["identical"] is True and len(results["runs"]) == 3
    assert most == [1, 1, 1]


@slow
def test_output_that_differs_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verification that keeps the distribution only."""
    status, results = bench(
        tmp_path, "throughput", "--batch-sizes", "2", "--verification", "rejection", "--temperature", "1"
    )
    assert status == 1 and results["identical"] is False
    plain, drafting = results["runs"]
    assert plain["identical"] and not drafting["identical"]
    assert "identical: NO" in capsys.readouterr().out


def test_serve_like_counts_from_arrival_and_keeps_the_rate(tmp_path: Path) -> None:
    start = time.perf_counter()
    status, results = bench(
        tmp_path, "serve-like", "--batch-sizes", "2", "--request-rate", "20,inf", "--burstiness", "inf",
        "--goodput", "ttft:60000", "--speculative-config", "ngram",
    )  # fmt: skip
    took = time.perf_counter() - start
    assert status == 0 and [r["request_rate"] for r in results["runs"]] == [20, 20, "inf", "inf"]
    for run in results["runs"]:
        assert run["completed"] == 3 and run["request_goodput"] == run["request_throughput"]
    assert 0.1 < results["runs"][0]["duration"] < took, "the third request comes after 0.1 s"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("latency --batch-sizes 0,2", "--batch-sizes 0,2: must be above 0"),
        ("latency --batch-sizes 2,2", "names a number twice"),
        ("latency --num-drafts 99", "num_speculative_tokens=99"),
        ("latency --replay-acceptance 1.5", "must be probabilities"),
        ("latency --max-num-seqs 3", "use --batch-sizes here"),
        ("latency --prompt-file a --random-input-len 3", "give only one of them"),
        ("latency --peak-flops 3", "give both or none"),
        ("latency --output-len 100000", "the model was made for"),
        ("latency --speculative-config nonsense", "did you mean|known:"),
        ("latency --model DIR --num-drafts 2", "name the drafter"),
        ("latency --model SHAPE --load-format dummy", "use --random-input-len"),
        ("latency --model DIR --random-input-len 8 --output-dir FILE/x", "cannot be made"),
        ("throughput --busy 1", "--busy: is of use with --against only"),
        ("serve-like --against transformers", "engines get all requests at once"),
        ("throughput --against transformers --temperature 1", "at --temperature 0 with --ignore-eos only"),
        (
            "throughput --against vllm",
            "--against vllm: unknown; choose from transformers, llama.cpp, openvino",
        ),
        ("throughput --against transformers,transformers", "names transformers twice"),
        ("throughput --against transformers --against-dtypes int8", "must be one of bfloat16"),
        ("throughput --against transformers --num-prompts 1 --output-len 3900", "prompts of 200 ids"),
        ("serve-like --request-rate 0", "--request-rate 0: must be above 0"),
        ("serve-like --goodput ttlt:5", "must read NAME:MILLISECONDS"),
    ],
)
def test_bad_input_is_answered(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    words = [
        w.replace("DIR", str(assets.path(assets.TARGET))).replace("FILE", str(file)).replace("SHAPE", SHAPE)
        for w in line.split()
    ]
    if "--output-dir" not in words:
        words += ["--output-dir", str(tmp_path / "out")]
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|")), error
    assert "Traceback" not in error


@slow
def test_plots_are_drawn_where_something_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, results = bench(tmp_path, "latency", "--batch-sizes", "1,2", "--num-drafts", "2")
    names = {"speedup.png", "acceptance.png", "time_split.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == names, (
        "no roofline of a device whose peaks are not known"
    )
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert plots.draw_sweep(tmp_path, results["runs"][:1]) == ["time_split.png"]
    assert [p.name for p in tmp_path.glob("*.png")] == ["time_split.png"]
