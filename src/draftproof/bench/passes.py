"""What an engine's passes should take, and on a GPU do take: rooflines of decoding steps, device time of their parts.

On a CPU the engine's own clock tells target from drafter. A GPU runs a whole step as one graph, ahead of any clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from draftproof.bench.drive import Job, Run
from draftproof.bench.figures import Figures
from draftproof.bench.rooflines import Peaks, draft_pass_of, target_pass
from draftproof.engine.engine import Engine
from draftproof.engine.scheduler import Work
from draftproof.engine.sequence import Sequence as Running
from draftproof.engine.state import Size
from draftproof.frontend.llm import LLM

WARM, TIMED = 4, 16  # steps


def roofline_share(llm: LLM, runs: Sequence[Run], peaks: Peaks, num_drafts: int) -> float | None:
    """The least time that decoding steps of `1 + num_drafts` rows a request can take, over the time they took.

    None where there was no such step, or nobody has counted what the drafter does.
    """
    loaded = llm._frontend.loaded
    parts = loaded.engine.parts
    drafter = parts.guard.drafter if parts.guard is not None else None
    itemsize = parts.cache.layers[0].k.element_size()
    least = took = 0.0
    for step in (step for run in runs for step in run.steps):
        sizes = (step.num_requests, 1 + num_drafts, step.context // step.num_requests)
        least += target_pass(loaded.model, *sizes, itemsize).seconds_on(peaks)
        took += step.seconds
        if num_drafts:
            work = draft_pass_of(drafter, *sizes, num_drafts, itemsize)
            if work is None:
                return None
            least += work.seconds_on(peaks)
    return least / took if took else None


def device_split(
    llm: LLM, jobs: Sequence[Job], seconds: Callable[[Callable[[], object]], float] | None = None
) -> Figures | None:
    """Device seconds of one captured decoding step of these requests: `step`, and `verify` without its drafts.

    They are measured by running its graph again and again on live requests, beside a graph of its first half; what
    that leaves behind on the device is thrown away. None where no such step was captured. `seconds`: of one call; by
    default between CUDA events.
    """
    frontend = llm._frontend
    engine = frontend.loaded.engine
    p = engine.parts
    num_requests = next((R for R in p.buckets if len(jobs) <= R), 0)
    size = Size.decoding(num_requests, 1 + p.num_drafts, p.num_drafts)
    if size not in engine._whole:
        return None
    requests = [frontend.add({"prompt_token_ids": job.prompt_token_ids}, job.params) for job in jobs]
    try:
        while not all(request.sequences[0].num_outputs for request in requests):
            frontend.step()
        engine.settle()
        if any(request.finished for request in requests):
            return None  # outputs of one token: nothing is decoded
        running = [request.sequences[0] for request in requests]
        return _time_parts(engine, size, running, seconds or _device_seconds)
    finally:
        for request in requests:
            frontend.close(request.request_id)
        engine.restart()  # the device has gone on without the host


def _time_parts(
    engine: Engine, size: Size, running: Sequence[Running], seconds: Callable[[Callable[[], object]], float]
) -> Figures:
    p = engine.parts
    each = size.most_sampled
    work = [Work(s, s.num_computed, each, each) for s in running]
    work_4R = p.state.load(work, [size.num_drafts] * len(work), size.num_requests)

    def half(work_4R: Tensor) -> tuple[Tensor, ...]:
        return (engine._verify(size, work_4R, []).verdict.tokens_RW,)

    whole = partial(engine._step_tensors, size)
    step = seconds(partial(p.graphs.run, ("step", size), whole, (work_4R,)))
    p.graphs.prepare(("first half", size), half, (work_4R,))
    return {
        "step": step,
        "verify": seconds(partial(p.graphs.run, ("first half", size), half, (work_4R,))),
    }


def _device_seconds(call: Callable[[], object]) -> float:
    """Of one call, by events around several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(WARM + TIMED):
        if number == WARM:
            start.record()
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / TIMED
