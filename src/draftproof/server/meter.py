"""The metrics of /metrics: vLLM's names under a configurable prefix, so that its dashboards and routers work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftproof.frontend.async_llm import AnswerStream, AsyncLLM
from draftproof.metrics import DrafterStats, EngineLoad, EngineStats
from draftproof.server.limits import Admission
from draftproof.types import RequestOutput

LABELS = ("model_name", "engine")
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Meter:
    """Metrics of one server. Those of the engine are read from it at each scrape."""

    def __init__(self, llm: AsyncLLM, admission: Admission, prefix: str, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, admission, prefix, model))
        self._labels = (model, "0")
        self._came: dict[str, float] = {}  # request id -> when its latest tokens came
        self._success = Counter(
            f"{prefix}request_success",
            "Requests that were answered, by finish reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._first_token = self._histogram(f"{prefix}time_to_first_token_seconds", SHORT)
        self._between = self._histogram(f"{prefix}inter_token_latency_seconds", SHORT)
        self._per_token = self._histogram(f"{prefix}request_time_per_output_token_seconds", SHORT)
        self._whole = self._histogram(f"{prefix}e2e_request_latency_seconds", LONG)
        self._queued = self._histogram(f"{prefix}request_queue_time_seconds", LONG)
        self._prefilling = self._histogram(f"{prefix}request_prefill_time_seconds", LONG)
        self._computing = self._histogram(f"{prefix}request_inference_time_seconds", LONG)
        self._decoding = self._histogram(f"{prefix}request_decode_time_seconds", LONG)
        self._prompt = self._histogram(f"{prefix}request_prompt_tokens", COUNTS)
        self._written = self._histogram(f"{prefix}request_generation_tokens", COUNTS)
        self._num_choices = self._histogram(f"{prefix}request_params_n", COUNTS[:6])

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.rpartition(":")[2].replace("_", " ")
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)

    def came(self, stream: AnswerStream) -> None:
        """Record that tokens of a request are being sent to its client."""
        now = time.perf_counter()
        before = self._came.get(stream.request_id)
        if before is None:
            self._first_token.observe(stream.first - stream.started)
        else:
            self._between.observe(now - before)
        self._came[stream.request_id] = now

    def finished(self, stream: AnswerStream, output: RequestOutput) -> None:
        """Record a finished request."""
        self.forget(stream)
        seconds = stream.last - stream.first
        self._whole.observe(stream.last - stream.started)
        queued = output.metrics.queue_seconds
        self._queued.observe(queued)
        self._prefilling.observe(max(0.0, stream.first - stream.started - queued))
        self._decoding.observe(seconds)
        self._computing.observe(max(0.0, stream.last - stream.started - queued))
        self._prompt.observe(len(output.prompt_token_ids))
        self._num_choices.observe(len(output.outputs))
        for choice in output.outputs:
            num_tokens = len(choice.token_ids)
            self._success.labels(*self._labels, choice.finish_reason).inc()
            self._written.observe(num_tokens)
            if num_tokens > 1:
                self._per_token.observe(seconds / (num_tokens - 1))

    def forget(self, stream: AnswerStream) -> None:
        """Drop the state of a request that is over, however it ended."""
        self._came.pop(stream.request_id, None)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Collects the engine's current counters, for each replica under its number."""

    def __init__(self, llm: AsyncLLM, admission: Admission, prefix: str, model: str) -> None:
        self._llm = llm
        self._admission = admission
        self._prefix = prefix
        self._model = model

    def collect(self) -> Iterator[Metric]:
        loads = self._llm.llm.engine.loads()
        yield from self._gauges(loads)
        yield from self._counters(loads)
        by_position = CounterMetricFamily(
            f"{self._prefix}spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the round.",
            labels=(*LABELS, "position"),
        )
        for engine, load in enumerate(loads):
            for position, number in enumerate(list(load.stats.speculation.accepted_per_position)):
                by_position.add_metric((self._model, str(engine), str(position)), number)
        yield by_position
        yield from self._by_drafter(loads)
        refused = CounterMetricFamily(
            f"{self._prefix}admission_rejections", "Requests that got a 429.", labels=LABELS
        )
        refused.add_metric((self._model, "0"), self._admission.num_refused)
        yield refused

    def _counters(self, loads: Sequence[EngineLoad]) -> Iterator[Metric]:
        for name, text, value in COUNTERS:
            family = CounterMetricFamily(self._prefix + name, text, labels=LABELS)
            for engine, load in enumerate(loads):
                family.add_metric((self._model, str(engine)), value(load.stats))
            yield family

    def _by_drafter(self, loads: Sequence[EngineLoad]) -> Iterator[Metric]:
        """Counters of each drafter: those of a chain, or the only one."""
        for name, text, value in BY_DRAFTER:
            family = CounterMetricFamily(self._prefix + name, text, labels=(*LABELS, "drafter"))
            for engine, load in enumerate(loads):
                for one in list(load.stats.drafters):
                    family.add_metric((self._model, str(engine), one.name), value(one))
            yield family

    def _gauges(self, loads: Sequence[EngineLoad]) -> Iterator[Metric]:
        for name, text, value in GAUGES:
            family = GaugeMetricFamily(self._prefix + name, text, labels=LABELS)
            for engine, load in enumerate(loads):
                family.add_metric((self._model, str(engine)), value(load))
            yield family
        shares = self._llm.llm.config.enable_prefix_caching
        info = GaugeMetricFamily(
            f"{self._prefix}cache_config_info",
            "The cache's settings.",
            labels=(*LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        for engine, load in enumerate(loads):
            info.add_metric(
                (self._model, str(engine), str(load.block_size), str(load.num_blocks), str(shares)), 1
            )
        yield info


COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of requests that were taken.", lambda s: s.num_prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    ("generation_tokens", "Tokens that were generated.", lambda s: s.num_generated_tokens),
    ("num_preemptions", "Requests that gave up their memory for others.", lambda s: s.num_preemptions),
    (
        "spec_decode_num_drafts",
        "Rounds that had drafts.",
        lambda s: sum(s.speculation.drafted_per_position[:1]),
    ),
    ("spec_decode_num_draft_tokens", "Draft tokens.", lambda s: s.speculation.num_draft_tokens),
    (
        "spec_decode_num_accepted_tokens",
        "Draft tokens accepted.",
        lambda s: s.speculation.num_accepted_tokens,
    ),
    ("drafter_faults", "Rounds in which the drafter failed.", lambda s: s.num_drafter_faults),
    ("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("step_seconds", "Time of the engine's steps: the next four, together.", lambda s: s.step_seconds),
    ("target_seconds", "Time of the target's passes, as the host saw it.", lambda s: s.target_seconds),
    ("draft_seconds", "Time of the drafter's passes, as the host saw it.", lambda s: s.draft_seconds),
    ("waiting_seconds", "Time that the host waited for a device.", lambda s: s.waiting_seconds),
    ("host_seconds", "Time of steps that was none of these.", lambda s: s.host_seconds),
)
BY_DRAFTER: tuple[tuple[str, str, Callable[[DrafterStats], float]], ...] = (
    ("drafter_num_drafts", "Rounds that verified its drafts.", lambda d: d.speculation.num_rounds),
    ("drafter_num_draft_tokens", "Its draft tokens.", lambda d: d.speculation.num_draft_tokens),
    ("drafter_num_accepted_tokens", "Of them accepted.", lambda d: d.speculation.num_accepted_tokens),
    ("drafter_num_faults", "Calls in which it failed.", lambda d: d.num_faults),
)
GAUGES: tuple[tuple[str, str, Callable[[EngineLoad], float]], ...] = (
    ("num_requests_running", "Outputs that are being computed.", lambda e: e.num_running),
    ("num_requests_waiting", "Outputs that wait for a place.", lambda e: e.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the key-value cache in use.",
        lambda e: 1 - e.num_free_blocks / e.num_blocks,
    ),
)
