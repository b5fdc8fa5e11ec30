"""The parts of `draftproof bench`: when requests are sent, what the figures, rooflines and memory are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import figures, passes, report, rooflines, workload
from draftproof.bench.drive import Client, ClientResult, Job, Step, Timing
from draftproof.bench.internals import Clock, Stepper
from draftproof.cli import bench_setup
from draftproof.config import EngineConfig
from draftproof.engine.loading import memory
from draftproof.metrics import SpeculationStats
from draftproof.models import cost
from draftproof.models.config import read_config
from draftproof.types import CompletionOutput, Delta, RequestMetrics, RequestOutput
from tests.engine.test_ahead import ahead
from tests.made.shared import gemma4

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


@dataclass
class FakeStepper:
    """Gives each request 2 tokens a step, a step takes 1 second, a request 4 tokens. Its host counts a quarter of a
    second for each of its parts, in steps with a prompt half of one."""

    now: float = 0.0
    most_seen: int = 0
    given: dict[str, int] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    counted: Clock = field(default_factory=Clock)

    def add(self, prompt_token_ids: list[int], params: SamplingParams) -> str:
        request_id = f"request-{len(self.given)}"
        self.given[request_id] = 0
        self.live.append(request_id)
        return request_id

    def step(self) -> list[Delta]:
        self.now += 1.0
        self.most_seen = max(self.most_seen, len(self.live))
        part = 0.25 if all(self.given[i] for i in self.live) else 0.5
        self.counted += Clock(steps=1, planning=part, launch=part, waiting=part, results=part)
        deltas = []
        for request_id in self.live:
            self.given[request_id] += 2
            reason = "length" if self.given[request_id] >= 4 else None
            deltas.append(Delta(request_id, 0, "", [7, 8], finish_reason=reason))
        self.live = [i for i in self.live if self.given[i] < 4]
        return deltas

    def output(self, request_id: str) -> RequestOutput:
        choice = CompletionOutput(0, "", [7, 8, 7, 8], finish_reason="length")
        return RequestOutput("0", None, [1], [choice], True, RequestMetrics(SpeculationStats()))

    def close(self, request_id: str) -> None:
        pass

    def clock(self) -> Clock:
        return self.counted

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def drive(arrivals: Sequence[float | None], most: int) -> tuple[ClientResult, FakeStepper]:
    stepper: Any = FakeStepper()
    jobs = [Job(i, [1], PARAMS, arrival) for i, arrival in enumerate(arrivals)]
    return Client(stepper, most, lambda: stepper.now, stepper.sleep).run(jobs), stepper


def test_no_more_requests_are_in_flight_than_asked_for() -> None:
    run, stepper = drive([None] * 5, 2)
    assert stepper.most_seen == 2
    assert run.seconds == 6.0
    assert [t.came for t in run.timings] == [0, 0, 2, 2, 4], (
        "without arrivals a request comes when it is sent"
    )
    assert [t.first_token for t in run.timings] == [1.0] * 5


def test_a_request_that_arrives_waits_for_room_on_the_clock() -> None:
    run, stepper = drive([0.0, 0.0, 10.0], 1)
    assert [t.first_token for t in run.timings] == [1.0, 3.0, 1.0]
    assert stepper.slept == [6.0], "nothing to do until the last one arrives"


def test_only_steps_past_all_prompts_are_decoding_steps() -> None:
    run, _ = drive([None, None], 2)
    assert run.steps == [Step(num_requests=2, context=6, num_tokens=4, seconds=1.0)]
    assert run.stepping == 2.0
    assert run.clock.steps == 2 and run.clock.planning == 0.75
    assert run.decoding == Clock(steps=1, planning=0.25, launch=0.25, waiting=0.25, results=0.25)


def test_a_step_s_host_time_is_that_of_the_steps_in_which_everybody_decodes() -> None:
    runs = [drive([None] * 3, 2)[0], drive([None], 1)[0]]
    found = figures.host_time(runs)
    assert found == {"planning_ms": 250, "launch_ms": 250, "waiting_ms": 250, "results_ms": 250}
    runs[0].decoding += Clock(launch=0.9)
    assert (slower := figures.host_time(runs)) is not None
    assert slower["launch_ms"] == pytest.approx(250 + 900 / 3) and slower["planning_ms"] == 250
    assert figures.host_time([ClientResult(decoding=Clock(steps=3, target=1.0))]) is None, (
        "an engine without such clocks"
    )


def test_what_no_pass_hides_of_a_decoding_step_is_the_host_s() -> None:
    run, _ = drive([None, None], 2)  # one decoding step of a second
    assert figures.unhidden_host([run]) is None, "an engine without such clocks"
    run.decoding = Clock(steps=1, target=0.5, draft=0.25, launch=0.8)
    assert figures.unhidden_host([run]) == pytest.approx(0.25e6)
    run.decoding = Clock(steps=1, target=0.01, draft=0.01, launch=0.1, waiting=0.8)
    assert figures.unhidden_host([run]) is None, "the host saw the launch and not the pass"


def test_host_times_stand_on_the_page() -> None:
    fast = {"planning_ms": 0.02, "launch_ms": 0.1, "waiting_ms": 0, "results_ms": 0.03}
    row = {"name": "plain", "num_speculative_tokens": 0, "num_right": 0, "num_asked": 0, "num_different": 0}
    row |= {"num_same": 1, "num_outputs": 1, "num_accepted": 0, "host_time": fast}
    settings = {"num_prompts": 1, "batch_size": 1, "max_tokens": 9, "temperature": 0, "repeats": 1}
    machine = {"device": "CPU", "dtype": "float32", "threads": 2, "versions": {"torch": "2"}, "commit": None}
    results = {"model": "m", "methods": [row], "settings": settings | {"policy": "fixed"}, "notes": []}
    page = report.methods_page(results | {"environment": machine})
    assert "| run | planning | launch | waiting | results |" in page
    assert "| plain | 0.020 | 0.100 | 0.000 | 0.030 |" in page
    results["methods"] = [row | {"host_time": None}]
    assert "Host time" not in report.methods_page(results | {"environment": machine})


def timing(came: float, times: list[float], counts: list[int]) -> Timing:
    return Timing(0, came, 10, times, counts)


def test_figures_are_those_of_vllm() -> None:
    """Request 0: first token after 1 s, 4 more in 2 s, in deliveries of 3 and 1; request 1: one token after 2 s."""
    run = ClientResult(
        seconds=4.0, timings=[timing(0.0, [1.0, 2.5, 3.0], [1, 3, 1]), timing(1.0, [3.0], [1])]
    )
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
    found = figures.summarise([ClientResult(seconds=1.0, timings=[bad, timing(0.0, [1.0], [1])])], {})
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


def test_infinities_are_json() -> None:
    assert json.loads(json.dumps(report._finite({"rate": [math.inf, 1.0]}))) == {"rate": ["inf", 1.0]}


def test_a_gpu_that_is_too_small_is_said_plainly() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. And more")
    said = r"model='big': does not fit .*out of memory\); free some"
    with pytest.raises(ValueError, match=said), memory.must_fit(EngineConfig(model="big")):
        raise error


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
    parts, used = llm.engine.runner, llm.memory
    head = parts.target.head  # tied: where products are packed, a copy of the embedding
    assert head.kept and head.held_bytes in (0, head.stored_bytes)
    assert used.weights == 4 * stored + head.held_bytes
    assert used.draft_weights > 0 == used.graphs
    layers = [*parts.cache.layers, *parts.draft_cache.layers]
    assert used.kv == sum(layer.k.nbytes + layer.v.nbytes for layer in layers)
    assert used.kv_tokens == 2 * 64
    assert "draft weights" in str(used) and "128 tokens" in str(used)


def test_the_device_s_parts_are_timed_on_live_requests_and_leave_nothing_behind() -> None:
    llm = LLM(
        dtype="float32", max_model_len=96, max_num_seqs=4,
        speculative_config={"model": str(assets.path("tiny-eagle3")), "policy": "fixed", "num_speculative_tokens": 3},
    )  # fmt: skip
    prompts = [[5 + i, 9, 30 + i, 7] for i in range(2)]
    jobs = workload.jobs(prompts, range(2), SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    assert passes.device_split(llm, jobs) is None, "nothing is captured on a CPU"
    before = Client(Stepper(llm), 2).run(jobs)
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
    after = Client(Stepper(llm), 2).run(jobs)
    assert [o.outputs[0].token_ids for o in after.outputs] == [o.outputs[0].token_ids for o in before.outputs]
    assert llm.stats.num_drafter_faults == 0


def test_a_step_that_cannot_be_computed_ends_the_timing_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for ever for the tokens of requests that had failed."""
    llm = LLM(
        dtype="float32", max_model_len=96, max_num_seqs=4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    jobs = workload.jobs(
        [[5, 9, 30, 7]], range(1), SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    )
    ahead(llm)

    def fail(*given: object, **named: object) -> None:
        raise ArithmeticError("no such step")

    monkeypatch.setattr(llm.engine.runner, "run", fail)
    with pytest.raises(RuntimeError, match="no such step"):
        passes.device_split(llm, jobs, lambda call: 1.0)


def test_rooflines_count_the_weights_of_layers_of_many_shapes() -> None:
    """Those in the files, but for the tables that rows are looked up in."""
    tensors = load_file(Path(gemma4()) / "model.safetensors")
    products = sum(t.numel() for name, t in tensors.items() if t.ndim == 2 and "embed_tokens" not in name)
    config = read_config(Path(gemma4()))
    assert cost.layers_products(config, 1, 1).bytes == products
    near, far = (cost.attention(config, 2, 3, context) for context in (24, 100))
    assert far.bytes / near.bytes == (32 * 100 + 16 * 24) / (32 * 24 + 16 * 24)


def test_rooflines_are_of_the_device() -> None:
    assert rooflines.peaks_of("NVIDIA H200") == rooflines.H200
    assert rooflines.peaks_of("Some CPU, 2 cores") is None
    work = cost.Cost(1e9, 1e12)
    assert rooflines.seconds(work, rooflines.Peaks(1e9, 1e13)) == 1.0
    assert rooflines.seconds(work, rooflines.Peaks(1e12, 1e12)) == 1.0


def test_a_replayed_drafter_runs_the_one_that_was_named() -> None:
    given: dict[str, Any] = {"num_drafts": [2], "replay_acceptance": [0.5]}
    variants = bench_setup.make_variants({"method": "ngram", "policy": "adaptive"}, given, Path("r.json"))
    assert [v.name for v in variants] == ["K=2, right at 0.5"]
    assert variants[0].config == {
        "policy": "fixed", "method": "replay", "recordings": "r.json", "acceptance": 0.5,
        "drafters": [{"method": "ngram"}], "num_speculative_tokens": 2,
    }  # fmt: skip
