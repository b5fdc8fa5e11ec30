"""A steady step: no host synchronisation in it, and a GPU that is busy from one step to the next.

PYTHONPATH=src:. python tests/gpu/steady.py --stages tiny,8b
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.models import DUMMY
from draftproof import LLM, SamplingParams
from draftproof.bench import timeline
from draftproof.bench.drive import Decoding
from draftproof.bench.internals import Stepper
from draftproof.bench.stages import CheckLog, describe, parser, run_stages, synchronize
from tests.gpu.settings import Models, random_prompts

STAGES = {  # model, method, whether it must keep a GPU busy at batch 1
    "tiny": ("tiny", "eagle3", False),
    "tiny-plain": ("tiny", None, False),
    "8b": (DUMMY, "eagle3", True),
    "8b-plain": (DUMMY, None, True),
}
BATCHES = (1, 64)
MOST_IDLE = 0.10
LONG_GAP = 5_000  # ns; gaps between launches inside a graph are shorter, so longer ones are the host's
PROMPT = 64


@dataclass(frozen=True)
class Steps:
    """Numbers of steps by purpose; `warm`: enough to capture every pass of a steady step."""

    warm: int = 12
    watched: int = 40
    timed: int = 60
    profiled: int = 33

    @property
    def most_tokens(self) -> int:
        """Output tokens with which no request ends, whatever is accepted."""
        return 8 * (self.warm + 2 * self.watched + self.timed + self.profiled)


@contextmanager
def sync_mode(mode: str, device: str) -> Iterator[None]:
    """Torch's reaction to a call that makes the host wait: "warn" or "error". No effect on a CPU."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waiting_calls(decoding: Decoding, steps: int, device: str) -> Counter[str]:
    """Lines of code at which the host waits in `steps` steps, and how often, as torch counts them: waiting for an
    event, which is how results are meant to be read, is not counted."""
    with warnings.catch_warnings(record=True) as caught, sync_mode("warn", device):
        warnings.simplefilter("always")
        decoding.steps(steps)
    # torch also warns, once, that this mode is a prototype
    found = (w for w in caught if "called a synchronizing" in str(w.message))
    return Counter(f"{w.filename}:{w.lineno}" for w in found)


def check_no_wait(log: CheckLog, name: str, llm: LLM, decoding: Decoding, steps: int, device: str) -> None:
    """Check twice: first with warnings that name the line, then with errors. In a drafter an error would count as the
    drafter's fault, so faults are checked, too."""
    where, faults = waiting_calls(decoding, steps, device), llm.stats.num_drafter_faults
    for line, count in where.most_common(12):
        log.note(f"waits {count} times in {steps} steps at {line}")
    if not where:
        before = decoding.num_tokens
        with sync_mode("error", device):
            decoding.steps(steps)
        assert decoding.num_tokens > before
    faults = llm.stats.num_drafter_faults - faults
    detail = f"{sum(where.values())} in {steps} steps, {faults} faults of the drafter"
    if not device.startswith("cuda"):
        detail += " (a CPU: not watched)"
    log.check(f"{name} host synchronisations", not where and not faults, detail)


def check_idle(
    log: CheckLog, name: str, decoding: Decoding, steps: Steps, device: str, most_idle: float
) -> None:
    """Time a step without the profiler, then the device's idle time with it."""
    synchronize(device)
    start, tokens = time.perf_counter(), decoding.num_tokens
    decoding.steps(steps.timed)
    synchronize(device)
    wall_us = (time.perf_counter() - start) / steps.timed * 1e6
    tokens = decoding.num_tokens - tokens
    log.note(
        f"{name}: {wall_us:.0f} us a step, {tokens / steps.timed:.2f} tokens a step, "
        f"{tokens / steps.timed / wall_us * 1e6:.0f} tokens/s"
    )
    begun = time.perf_counter()
    seen = timeline.record(lambda: decoding.steps(steps.profiled), device)
    profiled_us = (time.perf_counter() - begun) / steps.profiled * 1e6
    line, kernels = seen.steady(), seen.steady().kernels()
    everything = [(e.start, e.end) for e in line.work]
    idle, between = timeline.idle_share(kernels), timeline.idle_share(kernels, LONG_GAP)
    busy_us = sum(end - start for start, end in timeline.merge(seen.kernels())) / steps.profiled / 1e3
    span = max((e.end for e in line.work), default=0) - min((e.start for e in line.work), default=0)
    waited = timeline.total(line.waits) / span if span else 0.0
    log.note(
        f"{name}: kernels {busy_us:.0f} us a step; that is {1 - busy_us / wall_us:.1%} idle without the profiler; "
        f"host at work {1 - waited:.0%} of the time, {wall_us * (1 - waited):.0f} us a step; "
        f"{len(seen.work) / steps.profiled:.0f} kernels and copies a step; profiled, a step takes {profiled_us:.0f} us "
        f"(with the profiler's start)"
    )
    for kernel, took, count in line.largest(10):
        share = took / max(timeline.total(line.work), 1)
        log.note(f"  {share:5.1%} {took / count / 1e3:8.1f} us x {count:5} {timeline.shortened(kernel)}")
    detail = f"{idle:.1%}; in pauses over 5 us {between:.1%}"
    detail += f"; copies counted as work {timeline.idle_share(everything):.1%}"
    bound = f"; at most {most_idle:.0%}" if most_idle < 1 else ""
    log.check(f"{name} GPU idle", idle <= most_idle and bool(kernels), f"{detail}{bound}")


def stage(log: CheckLog, models: Models, name: str) -> None:
    model, method, must = STAGES[name]
    steps = Steps(3, 6, 6, 6) if models.quick else Steps()
    drafting = None if method is None else models.drafter(model, method)
    llm = LLM(**models.target(model), speculative_config=drafting, max_num_seqs=64, max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=steps.most_tokens, ignore_eos=True, detokenize=False)
    for batch in (1, 4) if models.quick else BATCHES:
        named, given = f"{name} batch {batch}", random_prompts(llm, [PROMPT + i for i in range(batch)])
        with log.guard(named), Decoding(Stepper(llm), given, params) as decoding:
            decoding.prefill()
            decoding.steps(steps.warm)
            with log.guard(f"{named} host synchronisations"):
                check_no_wait(log, named, llm, decoding, steps.watched, models.device)
            cuda = models.device.startswith("cuda")
            most_idle = MOST_IDLE if must and batch == 1 and cuda else 1.0
            check_idle(log, named, decoding, steps, models.device, most_idle)


def main() -> int:
    given = parser(__doc__, list(STAGES)).parse_args()
    print(describe(given.device), flush=True)
    log = CheckLog()
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(given.device, given.quick, given.models, Path(scratch))
        stages = {name: partial(stage, log, models, name) for name in STAGES}
        return run_stages(log, given.stages, stages)


if __name__ == "__main__":
    sys.exit(main())
