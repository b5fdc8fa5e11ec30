"""`draftproof bench`: when requests are sent, what the figures are, what is compared, what lies in the folder."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import against, figures, passes, plots, report, rooflines, workload
from draftproof.bench.drive import Client, Job, Run, Step, Timing
from draftproof.cli import bench_setup
from draftproof.cli.main import main
from draftproof.metrics import EngineStats, SpeculationStats
from draftproof.types import CompletionOutput, Delta, RequestMetrics, RequestOutput
from tests.unit.test_ahead import ahead

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
SMALL = ["--output-len", "12", "--num-prompts", "3", "--num-iters", "1", "--dtype", "float32"]


@dataclass
class FakeFrontend:
    """Gives each request 2 tokens a step, a step takes 1 second, a request 4 tokens."""

    now: float = 0.0
    most_seen: int = 0
    live: list[Any] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    loaded: Any = field(default_factory=lambda: SimpleNamespace(engine=SimpleNamespace(stats=EngineStats())))

    def add(self, prompt: dict[str, list[int]], params: SamplingParams) -> Any:
        tokens = list(prompt["prompt_token_ids"])
        sequence = SimpleNamespace(tokens=tokens, num_outputs=0)
        request = SimpleNamespace(
            sequences=[sequence], pending=deque(), finished=False, request_id=id(tokens)
        )
        self.live.append(request)
        return request

    def step(self) -> None:
        self.now += 1.0
        self.most_seen = max(self.most_seen, len(self.live))
        for request in self.live:
            request.pending.append(Delta("0", 0, "", [7, 8]))
            request.sequences[0].tokens += [7, 8]
            request.sequences[0].num_outputs += 2
            request.finished = request.sequences[0].num_outputs >= 4
        self.live = [r for r in self.live if not r.finished]

    def output(self, request: Any) -> RequestOutput:
        choice = CompletionOutput(0, "", request.sequences[0].tokens[-4:], finish_reason="length")
        return RequestOutput("0", None, [1], [choice], True, RequestMetrics(SpeculationStats()))

    def close(self, request_id: Any) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def drive(arrivals: Sequence[float | None], most: int) -> tuple[Run, FakeFrontend]:
    frontend = FakeFrontend()
    llm: Any = SimpleNamespace(_frontend=frontend)
    jobs = [Job(i, [1], PARAMS, arrival) for i, arrival in enumerate(arrivals)]
    return Client(llm, most, lambda: frontend.now, frontend.sleep).run(jobs), frontend


def test_no_more_requests_are_in_flight_than_asked_for() -> None:
    run, frontend = drive([None] * 5, 2)
    assert frontend.most_seen == 2
    assert run.seconds == 6.0
    assert [t.came for t in run.timings] == [0, 0, 2, 2, 4], (
        "without arrivals a request comes when it is sent"
    )
    assert [t.first_token for t in run.timings] == [1.0] * 5


def test_a_request_that_arrives_waits_for_room_on_the_clock() -> None:
    run, frontend = drive([0.0, 0.0, 10.0], 1)
    assert [t.first_token for t in run.timings] == [1.0, 3.0, 1.0]
    assert frontend.slept == [6.0], "nothing to do until the last one arrives"


def test_only_steps_past_all_prompts_are_decoding_steps() -> None:
    run, _ = drive([None, None], 2)
    assert run.steps == [Step(num_requests=2, context=6, num_tokens=4, seconds=1.0)]
    assert run.stepping == 2.0


def timing(came: float, times: list[float], counts: list[int]) -> Timing:
    return Timing(0, came, 10, times, counts)


def test_figures_are_those_of_vllm() -> None:
    """Request 0: first token after 1 s, 4 more in 2 s, in deliveries of 3 and 1; request 1: one token after 2 s."""
    run = Run(seconds=4.0, timings=[timing(0.0, [1.0, 2.5, 3.0], [1, 3, 1]), timing(1.0, [3.0], [1])])
    found = figures.summarise([run], figures.parse_goodput(["ttft:1500", "tpot:600"]))
    expected = {
        **{"completed": 2, "failed": 0, "duration": 4.0, "total_input_tokens": 20, "total_output_tokens": 6},
        **{"request_throughput": 0.5, "output_throughput": 1.5, "total_token_throughput": 6.5},
        **{"mean_ttft_ms": 1500.0, "median_ttft_ms": 1500.0, "p99_ttft_ms": 1990.0, "std_ttft_ms": 500.0},
        **{"mean_tpot_ms": 500.0, "p99_tpot_ms": 500.0, "mean_itl_ms": 1000.0, "median_itl_ms": 1000.0},
        **{"mean_e2el_ms": 2500.0, "max_concurrent_requests": 2, "request_goodput": 0.25},
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_a_failed_request_counts_as_failed_and_nothing_else() -> None:
    bad = timing(0.0, [], [])
    bad.failed = True
    found = figures.summarise([Run(seconds=1.0, timings=[bad, timing(0.0, [1.0], [1])])], {})
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 1, 1)
    assert found["request_goodput"] is None


def test_arrivals_come_at_the_rate() -> None:
    assert workload.arrivals(4, 2.0, math.inf, 0) == [0.0, 0.5, 1.0, 1.5]
    assert workload.arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    poisson = workload.arrivals(4001, 5.0, 1.0, 0)
    gaps = torch.tensor(poisson).diff()
    assert poisson == sorted(poisson) and poisson != workload.arrivals(4001, 5.0, 1.0, 1)
    assert gaps.mean().item() == pytest.approx(0.2, rel=0.05)
    assert gaps.std().item() == pytest.approx(0.2, rel=0.1), (
        "exponential gaps spread as widely as they are long"
    )


def test_random_prompts_have_the_lengths_asked_for() -> None:
    prompts = workload.random_prompts(200, 20, 0.5, 50, 0)
    assert {len(p) for p in prompts} == set(range(10, 31))
    assert {token for p in prompts for token in p} == set(range(10, 50))
    assert prompts == workload.random_prompts(200, 20, 0.5, 50, 0)
    assert {len(p) for p in workload.random_prompts(5, 20, 0.0, 50, 0)} == {20}


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


def test_replayed_drafts_are_right_as_often_as_asked(tmp_path: Path) -> None:
    status, results = bench(
        tmp_path, "throughput", "--batch-sizes", "2", "--num-drafts", "2", "--replay-acceptance", "0,1"
    )
    _, never, always = results["runs"]
    assert status == 0 and results["identical"] is True
    assert never["spec_decode_acceptance_rate"] == 0 < never["spec_decode_draft_tokens"]
    assert always["spec_decode_acceptance_rate"] == 100
    assert always["spec_decode_acceptance_length"] > 2.5


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
        ("latency --model DIR --random-input-len 8 --output-dir FILE/x", "cannot be made"),
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
        w.replace("DIR", str(assets.path(assets.TARGET))).replace("FILE", str(file)) for w in line.split()
    ]
    if "--output-dir" not in words:
        words += ["--output-dir", str(tmp_path / "out")]
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|")), error
    assert "Traceback" not in error


def test_transformers_is_measured_beside_with_the_same_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, prompts: Any, num_new: int) -> Any:
        raise NotImplementedError("not on this device\nat all")

    monkeypatch.setattr(against.Transformers, "generate_batch", fails)
    status, results = bench(
        tmp_path, "throughput", "--batch-sizes", "1,2", "--load-format", "dummy", "--random-input-len", "9",
        "--against", "transformers", "--speculative-config", "ngram", "--random-range-ratio", "0.4",
    )  # fmt: skip
    assert status == 0
    rows = {(r["name"], r["batch_size"]): r for r in results["against"]}
    assert list(rows) == [
        ("transformers generate", 1),
        ("transformers generate, prompt lookup", 1),
        ("transformers generate", 2),
    ]
    for row in rows.values():
        assert row["num_compared"] == row["num_identical"] == 3, "fp32, and no ties in random weights"
        assert row["output_throughput"] > 0
    assert results["notes"] == [
        "transformers continuous batching, batch 2: NotImplementedError: not on this device"
    ]


def test_a_model_that_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    rows, notes = against.measure(
        tmp_path, torch.device("cpu"), torch.float32, dummy=True, prompts=[[1]], reference={0: [1]},
        batch_sizes=[1], num_new=1, plain_speeds={1: 1.0}, num_lookup=2, tell=lambda line: None,
    )  # fmt: skip
    assert rows == [] and len(notes) == 1 and notes[0].startswith("transformers cannot load this model")
    assert "\n" not in notes[0]


def test_plots_are_drawn_where_something_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, results = bench(tmp_path, "latency", "--batch-sizes", "1,2", "--num-drafts", "2")
    names = {"speedup.png", "acceptance.png", "time_split.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == names, (
        "no roofline of a device whose peaks are not known"
    )
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert plots.draw(tmp_path, results["runs"][:1]) == ["time_split.png"]
    assert [p.name for p in tmp_path.glob("*.png")] == ["time_split.png"]


def test_infinities_are_json() -> None:
    assert json.loads(json.dumps(report._finite({"rate": [math.inf, 1.0]}))) == {"rate": ["inf", 1.0]}


def test_memory_is_what_the_files_and_the_cache_hold() -> None:
    llm = LLM(
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        speculative_config={"model": str(assets.path("tiny-eagle3"))},
    )
    from safetensors import safe_open

    stored = 0
    with safe_open(assets.path(assets.TARGET) / "model.safetensors", "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    parts, memory = llm._frontend.loaded.engine.parts, llm.memory
    assert memory.weights == 4 * stored
    assert memory.draft_weights > 0 == memory.graphs
    layers = [*parts.cache.layers, *parts.draft_cache.layers]
    assert memory.kv == sum(layer.k.nbytes + layer.v.nbytes for layer in layers)
    assert memory.kv_tokens == 2 * 64
    assert "draft weights" in str(memory) and "128 tokens" in str(memory)


def test_the_device_s_parts_are_timed_on_live_requests_and_leave_nothing_behind() -> None:
    llm = LLM(
        dtype="float32", max_model_len=96, max_num_seqs=4,
        speculative_config={"model": str(assets.path("tiny-eagle3")), "policy": "fixed", "num_speculative_tokens": 3},
    )  # fmt: skip
    prompts = [[5 + i, 9, 30 + i, 7] for i in range(2)]
    jobs = workload.jobs(prompts, range(2), SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    assert passes.device_split(llm, jobs) is None, "nothing is captured on a CPU"
    before = Client(llm, 2).run(jobs)
    graphs = ahead(llm)
    calls: list[int] = []

    def seconds(call: Any) -> float:
        replays = graphs.num_replays
        for _ in range(3):
            call()
        calls.append(graphs.num_replays - replays)
        return 1.0

    assert passes.device_split(llm, jobs, seconds) == {"step": 1.0, "verify": 1.0}
    assert calls == [3, 3], "both were graphs"
    after = Client(llm, 2).run(jobs)
    assert [o.outputs[0].token_ids for o in after.outputs] == [o.outputs[0].token_ids for o in before.outputs]
    assert llm.stats.num_drafter_faults == 0


def test_rooflines_are_of_the_device() -> None:
    assert rooflines.peaks_of("NVIDIA H200") == rooflines.H200
    assert rooflines.peaks_of("Some CPU, 2 cores") is None
    work = rooflines.Work(1e9, 1e12)
    assert work.seconds_on(rooflines.Peaks(1e9, 1e13)) == 1.0
    assert work.seconds_on(rooflines.Peaks(1e12, 1e12)) == 1.0


def test_the_work_of_drafters_is_counted_where_it_is_known() -> None:
    def drafter(**config: Any) -> tuple[Any, Any]:
        config = {"num_speculative_tokens": 2, **config}
        llm = LLM(dtype="float32", max_model_len=64, max_num_seqs=1, speculative_config=config)
        loaded = llm._frontend.loaded
        assert loaded.engine.parts.guard is not None
        return loaded.engine.parts.guard.drafter, loaded.model

    model, target = drafter(model=str(Path(__file__).parent.parent / "data" / "draft"))
    found = rooflines.draft_pass_of(model, 1, 3, 50, 2)
    assert found is not None and 0 < found.flops < rooflines.target_pass(target, 2, 3, 50).flops
    head, _ = drafter(model=str(assets.path("tiny-eagle3")))
    one, two = (rooflines.draft_pass_of(head, 1, 3, 50, k) for k in (1, 2))
    assert one is not None and two is not None and 0 < one.bytes < two.bytes
    assert rooflines.draft_pass_of(drafter(method="ngram")[0], 1, 3, 50, 2) == rooflines.Work(0, 0)


def test_a_replayed_drafter_runs_the_one_that_was_named() -> None:
    given: dict[str, Any] = {"num_drafts": [2], "replay_acceptance": [0.5]}
    variants = bench_setup.make_variants({"method": "ngram", "policy": "adaptive"}, given, Path("r.json"))
    assert [v.name for v in variants] == ["K=2, right at 0.5"]
    assert variants[0].config == {
        "policy": "fixed", "method": "replay", "recordings": "r.json", "acceptance": 0.5,
        "drafters": [{"method": "ngram"}], "num_speculative_tokens": 2,
    }  # fmt: skip
