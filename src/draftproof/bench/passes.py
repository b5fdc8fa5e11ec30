"""Predicted and measured times of an engine's passes: rooflines of decoding steps, times of single passes and kernels.

On a CPU the engine's own clock separates target and drafter. A GPU runs a whole step as one graph, asynchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from draftproof.bench import internals, rooflines, timeline
from draftproof.bench.drive import ClientResult, Job
from draftproof.bench.figures import Figures
from draftproof.bench.rooflines import H200, Peaks
from draftproof.drafters.base import RoundSize
from draftproof.frontend.llm import LLM
from draftproof.models import cost
from draftproof.models.cost import Cost

WARM, TIMED = 4, 16  # steps
Call = Callable[[], object]


def draft_cost(llm: LLM, requests: int, context: int, num_drafts: int, itemsize: int = 2) -> Cost | None:
    """Cost of the drafts after a round with 1 + `num_drafts` rows per request; None if it is unknown."""
    drafter, rows = internals.drafter_of(llm), 1 + num_drafts
    if drafter is None or not num_drafts:
        return Cost()
    return drafter.cost(
        RoundSize(requests=requests, rows=rows, context=context, num_drafts=num_drafts, itemsize=itemsize)
    )


def round_seconds(
    llm: LLM, requests: int, context: int, num_drafts: int, peaks: Peaks = H200, itemsize: int = 2
) -> float | None:
    """Minimum time of a decoding step: the target's pass over 1 + `num_drafts` rows per request, then the drafts.

    None if the drafter's cost is unknown.
    """
    draft = draft_cost(llm, requests, context, num_drafts, itemsize)
    if draft is None:
        return None
    target = cost.target_pass(internals.model_of(llm), requests, 1 + num_drafts, context, itemsize)
    return rooflines.seconds(target, peaks) + rooflines.seconds(draft, peaks)


def roofline_share(llm: LLM, runs: Sequence[ClientResult], peaks: Peaks, num_drafts: int) -> float | None:
    """Minimum time of the decoding steps, divided by the measured time.

    None if there was no such step, or the drafter's cost is unknown.
    """
    itemsize = internals.keys_of(llm).element_size()
    least = took = 0.0
    for step in (step for run in runs for step in run.steps):
        context = step.context // step.num_requests
        its = round_seconds(llm, step.num_requests, context, num_drafts, peaks, itemsize)
        if its is None:
            return None
        least += its
        took += step.seconds
    return least / took if took else None


def device_split(
    llm: LLM, jobs: Sequence[Job], seconds: Callable[[Call], float] | None = None
) -> Figures | None:
    """Device seconds of one captured decoding step of these requests: `step`, and `verify` without its drafts.

    Measured by replaying its graph on live requests, and a graph of its first half. None if no such step was captured.
    `seconds`: times a call; by default with CUDA events.
    """
    seconds = seconds or _device_seconds
    with internals.captured_step(llm, [job.prompt_token_ids for job in jobs], jobs[0].params) as step:
        return None if step is None else {"step": seconds(step[0]), "verify": seconds(step[1])}


def _device_seconds(call: Call) -> float:
    """Time of one call, from CUDA events around several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(WARM + TIMED):
        if number == WARM:
            start.record()
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / TIMED


def seconds_alone(call: Call, device: str, repeats: int = 3) -> float:
    """Minimum time of a call; on a GPU inside a CUDA graph, by events."""
    if device.startswith("cuda"):
        from draftproof.matmul.gpu_planner import TimedGraph

        return TimedGraph([call]).microseconds() / 1e6
    return min(host_seconds(call, 1) for _ in range(repeats))


def host_seconds(call: Call, count: int) -> float:
    """Mean time of `count` calls by the host's clock."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def kernels_of(call: Call, device: str, repeats: int = 4) -> list[str]:
    """A line for each of the kernels with the most time in a call."""

    def run() -> None:
        for _ in range(repeats):
            call()

    run()
    line = timeline.record(run, device)
    whole = timeline.total(line.work)
    return [
        f"{took / whole:5.1%} {took / count / 1e3:9.1f} us x {count // repeats:4} {timeline.shortened(name, 70)}"
        for name, took, count in line.largest(9)
    ]
