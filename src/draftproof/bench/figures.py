"""Computes figures from runs, with the names of `vllm bench serve` where it has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.bench.drive import ClientResult, Step, Timing
from draftproof.bench.harness import Measured
from draftproof.metrics import SpeculationStats

Figures = dict[str, Any]
GOODPUT_KEYS = ("ttft", "tpot", "e2el")
HOST_PARTS = ("planning", "launch", "waiting", "results")


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:50"]` -> milliseconds by name; ValueError for anything else."""
    found = {}
    for item in given:
        name, _, value = item.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in GOODPUT_KEYS or not found[name] > 0:
            names = ", ".join(GOODPUT_KEYS)
            raise ValueError(
                f"--goodput {item}: must read NAME:MILLISECONDS, such as ttft:500; names are {names}"
            )
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile with linear interpolation, like numpy; 0 for no values."""
    if not values:
        return 0.0
    ordered, place = sorted(values), share / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, seconds: Sequence[float]) -> Figures:
    """mean_, median_, std_, p50_ and p99_ of `name`, in milliseconds."""
    ms = [1e3 * s for s in seconds]
    mean = sum(ms) / len(ms) if ms else 0.0
    deviation = math.sqrt(sum((x - mean) ** 2 for x in ms) / len(ms)) if ms else 0.0
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ms, 50),
        f"std_{name}_ms": deviation,
        f"p50_{name}_ms": percentile(ms, 50),
        f"p99_{name}_ms": percentile(ms, 99),
    }


def summarise(runs: Sequence[ClientResult], goodput: Mapping[str, float]) -> Figures:
    """Figures over all iterations of one setting."""
    timings = [t for run in runs for t in run.timings]
    done, duration = [t for t in timings if not t.failed], sum(run.seconds for run in runs)
    prompts, outputs = sum(t.num_prompt for t in done), sum(t.num_tokens for t in done)
    figures: Figures = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(is_good(t, goodput) for t in done) / duration if goodput else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (prompts + outputs) / duration,
        "max_concurrent_requests": max(map(most_at_once, runs)),
        **spread("ttft", [t.first_token for t in done]),
        **spread("tpot", [t.per_token for t in done if t.per_token is not None]),
        **spread("itl", [gap for t in done for gap in t.between]),
        **spread("e2el", [t.end_to_end for t in done]),
    }
    figures["output_throughput_by_iteration"] = [run.num_tokens / run.seconds for run in runs]
    return figures | speculation(runs)


def record(measured: Measured, runs: Sequence[ClientResult], goodput: Mapping[str, float]) -> Figures:
    """All figures of a variant in a cell, computed from `runs`: all of its runs, or the best ones."""
    return {
        "name": measured.variant.name,
        "num_speculative_tokens": measured.num_drafts,
        "replayed_acceptance": measured.variant.acceptance,
        "num_iters": len(runs),
        **summarise(runs, goodput),
        "decoding": decoding(runs),
        "time_split": time_split(measured, runs),
        "host_time": host_time(runs),
        "roofline_share": measured.roofline_share,
        "identical": not measured.differences,
        "num_compared": measured.num_compared,
        "num_different": len(measured.differences),
        "num_tokens": measured.tally.tokens,
        "num_accepted": measured.tally.speculation.num_accepted_tokens,
    }


def title(record: Mapping[str, Any]) -> str:
    """The variant's name, with the request rate if any."""
    name, rate = str(record["name"]), record.get("request_rate")
    return name if rate is None else f"{name}, {rate:g} requests/s"


def is_good(timing: Timing, goodput: Mapping[str, float]) -> bool:
    """Whether a request met all limits of `goodput`."""
    took = {"ttft": timing.first_token, "tpot": timing.per_token or 0.0, "e2el": timing.end_to_end}
    return all(1e3 * took[name] <= most for name, most in goodput.items())


def most_at_once(run: ClientResult) -> int:
    """Maximum number of requests that had arrived and were not finished."""
    events = sorted([(t.came, 1) for t in run.timings] + [(t.times[-1], -1) for t in run.timings if t.times])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def speculation(runs: Sequence[ClientResult]) -> Figures:
    """Acceptance: pooled over all rounds, by position of the draft, and per request (tau)."""
    pooled, each = SpeculationStats(), []
    for run in runs:
        for output in run.outputs:
            pooled.add(output.metrics.speculation)
            each.append(output.metrics.speculation.acceptance_length)
    drafted = pooled.num_draft_tokens
    if not drafted:
        return {"num_drafter_faults": sum(run.clock.faults for run in runs)}
    pairs = zip(pooled.accepted_per_position, pooled.drafted_per_position, strict=True)
    return {
        "num_drafter_faults": sum(run.clock.faults for run in runs),
        "spec_decode_num_drafts": pooled.num_rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": pooled.num_accepted_tokens,
        "spec_decode_acceptance_rate": 100 * pooled.num_accepted_tokens / drafted,
        "spec_decode_acceptance_length": pooled.acceptance_length,
        "spec_decode_per_position_acceptance_rates": [
            taken / asked if asked else 0.0 for taken, asked in pairs
        ],
        "acceptance_length_by_request": each,
        "median_acceptance_length": percentile(each, 50),
        "min_acceptance_length": min(each),
        "max_acceptance_length": max(each),
    }


def decoding(runs: Sequence[ClientResult]) -> Figures | None:
    """Figures of decode-only steps; None if there were none."""
    steps: list[Step] = [step for run in runs for step in run.steps]
    if not steps:
        return None
    requests = sum(s.num_requests for s in steps)
    seconds = sum(s.seconds for s in steps)
    return {
        "steps": len(steps),
        "mean_step_ms": 1e3 * seconds / len(steps),
        "tokens_per_second": sum(s.num_tokens for s in steps) / seconds,
        "mean_requests": requests / len(steps),
        "mean_context": sum(s.context for s in steps) / requests,
    }


def step_parts(runs: Sequence[ClientResult]) -> Figures:
    """Milliseconds per decoding step: target, drafter, rest; None if no clock measures them."""
    steps = max(1, sum(len(run.steps) for run in runs))
    whole = 1e3 * sum(step.seconds for run in runs for step in run.steps) / steps
    verify = 1e3 * sum(run.decoding.target for run in runs) / steps
    draft = 1e3 * sum(run.decoding.draft for run in runs) / steps
    if not verify:  # an engine that runs ahead on a GPU has no such clock
        return {"verify_ms": None, "draft_ms": None, "rest_ms": None}
    return {"verify_ms": verify, "draft_ms": draft, "rest_ms": max(0.0, whole - verify - draft)}


def host_time(runs: Sequence[ClientResult]) -> Figures | None:
    """Milliseconds per decoding step that the host spends on each of its parts; None if the engine counts none."""
    steps = sum(run.decoding.steps for run in runs)
    seconds = [sum(getattr(run.decoding, part) for run in runs) for part in HOST_PARTS]
    if not steps or not any(seconds):
        return None
    return {f"{part}_ms": 1e3 * s / steps for part, s in zip(HOST_PARTS, seconds, strict=True)}


def unhidden_host(runs: Sequence[ClientResult]) -> float | None:
    """Microseconds per decoding step in which neither a target nor a draft pass runs. None if the host runs ahead of
    the device, whose times it does not see."""
    rest = step_parts(runs)["rest_ms"]
    ahead = any(run.decoding.waiting > run.decoding.target for run in runs)
    return None if rest is None or ahead else 1e3 * float(rest)


def time_split(measured: Measured, runs: Sequence[ClientResult]) -> Figures | None:
    """Shares of a step: by the times of captured graphs if the device is asynchronous, else by the engine's clock."""
    drafts, inside, found = measured.variant.config is not None, measured.device_split, decoding(runs)
    if inside is not None and found is not None:
        step = inside["step"]
        verify = min(inside["verify"], step) if drafts else step
        total = max(found["mean_step_ms"] / 1e3, step)
        return split(total, verify, step - verify, "device time of graphs in a decoding step")
    stepping = sum(run.stepping for run in runs)
    verify, draft = sum(run.clock.target for run in runs), sum(run.clock.draft for run in runs)
    if measured.runs_ahead or not stepping or not verify:
        return None
    # without a drafter the engine's draft clock only measures bookkeeping
    return split(stepping, verify, draft if drafts else 0.0, "clock of the engine's steps, prompts included")


def split(total: float, verify: float, draft: float, method: str) -> Figures:
    """Shares of `total` (seconds); what is neither target nor drafter counts as host."""
    return {
        "method": method,
        "verify": verify / total,
        "draft": draft / total,
        "host": max(0.0, 1 - (verify + draft) / total),
    }
