"""What /metrics shows: vLLM's names under a prefix, so that its dashboards and routers read them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftproof.frontend.async_llm import AnswerStream, AsyncLLM
from draftproof.server.limits import Admission
from draftproof.types import RequestOutput

LABELS = ("model_name", "engine")
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Meter:
    """Counters of one server. Those of the engine are read from it whenever somebody asks."""

    def __init__(self, llm: AsyncLLM, admission: Admission, prefix: str, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm, admission, prefix, (model, "0")))
        self._labels = (model, "0")
        self._came: dict[str, float] = {}  # when the last tokens of a request came
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
        """Tokens of a request are on their way to its client."""
        now = time.perf_counter()
        before = self._came.get(stream.request_id)
        if before is None:
            self._first_token.observe(stream.first - stream.started)
        else:
            self._between.observe(now - before)
        self._came[stream.request_id] = now

    def finished(self, stream: AnswerStream, output: RequestOutput) -> None:
        """A request has been computed."""
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
        """A request is over, however it ended."""
        self._came.pop(stream.request_id, None)

    def text(self) -> bytes:
        """Everything, in Prometheus's format."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """What the engine counts, as it is now."""

    def __init__(self, llm: AsyncLLM, admission: Admission, prefix: str, labels: tuple[str, str]) -> None:
        self._llm = llm
        self._admission = admission
        self._prefix = prefix
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        stats = self._llm.llm.stats
        drafts = stats.speculation
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that were taken.", stats.num_prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
            ("generation_tokens", "Tokens that were generated.", stats.num_generated_tokens),
            ("num_preemptions", "Requests that gave up their memory for others.", stats.num_preemptions),
            ("admission_rejections", "Requests that got a 429.", self._admission.num_refused),
            ("spec_decode_num_drafts", "Rounds that had drafts.", sum(drafts.drafted_per_position[:1])),
            ("spec_decode_num_draft_tokens", "Draft tokens.", drafts.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", drafts.num_accepted_tokens),
            ("drafter_faults", "Rounds in which the drafter failed.", stats.num_drafter_faults),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
            ("step_seconds", "Time of the engine's steps: the next four, together.", stats.step_seconds),
            ("target_seconds", "Time of the target's passes, as the host saw it.", stats.target_seconds),
            ("draft_seconds", "Time of the drafter's passes, as the host saw it.", stats.draft_seconds),
            ("waiting_seconds", "Time that the host waited for a device.", stats.waiting_seconds),
            ("host_seconds", "Time of steps that was none of these.", stats.host_seconds),
        ):
            family = CounterMetricFamily(self._prefix + name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        by_position = CounterMetricFamily(
            f"{self._prefix}spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the round.",
            labels=(*LABELS, "position"),
        )
        for position, number in enumerate(list(drafts.accepted_per_position)):
            by_position.add_metric((*self._labels, str(position)), number)
        yield by_position
        yield from self._by_drafter()

    def _by_drafter(self) -> Iterator[Metric]:
        """What each drafter of a chain did, or the only one."""
        counted = list(self._llm.llm.stats.drafters)
        drafts = [one.speculation for one in counted]
        for name, text, values in (
            ("drafter_num_drafts", "Rounds that verified its drafts.", [d.num_rounds for d in drafts]),
            ("drafter_num_draft_tokens", "Its draft tokens.", [d.num_draft_tokens for d in drafts]),
            ("drafter_num_accepted_tokens", "Of them accepted.", [d.num_accepted_tokens for d in drafts]),
            ("drafter_num_faults", "Calls in which it failed.", [one.num_faults for one in counted]),
        ):
            family = CounterMetricFamily(self._prefix + name, text, labels=(*LABELS, "drafter"))
            for one, value in zip(counted, values, strict=True):
                family.add_metric((*self._labels, one.name), value)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._llm.llm.engine.scheduler
        pages = scheduler.pages
        num_blocks = pages.num_blocks - 1  # one is the pool's own
        for name, text, value in (
            ("num_requests_running", "Outputs that are being computed.", len(scheduler.running)),
            ("num_requests_waiting", "Outputs that wait for a place.", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of the key-value cache in use.", 1 - pages.num_free / num_blocks),
        ):
            family = GaugeMetricFamily(self._prefix + name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        config = self._llm.llm.config
        facts = {
            "block_size": pages.block_size,
            "num_gpu_blocks": num_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        info = GaugeMetricFamily(
            f"{self._prefix}cache_config_info", "The cache's settings.", labels=(*LABELS, *facts)
        )
        info.add_metric((*self._labels, *map(str, facts.values())), 1)
        yield info
