"""The short profile at an engine's start: what steps of each size take, on the device's own clock, kept on disk.

R requests, k drafts of each.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftproof.engine.costs import Curve, StepCosts, levels_of, rounded_rows
from draftproof.engine.interface import StepSize
from draftproof.runtime.graphs import OFTEN
from draftproof.runtime.store import Store

SECONDS = 2.0  # time that a profile may take, beyond one run of the sizes without which nothing is known
RUNS = 7  # of each size at most, after those that prepare it
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
MOST_REQUESTS = 64
LEVELS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)
CAPTURED_LEVELS = (1, 3, 5, 8, 16, 32, 64)  # where each is a graph for every number of requests


class Measured(Protocol):
    """What is profiled: see `runner.ModelRunner`."""

    on_device: bool
    buckets: tuple[int, ...]

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def measure(self, size: StepSize) -> tuple[float, float]: ...


def levels_up_to(num_drafts: int, device: str = "cpu") -> tuple[int, ...]:
    """Numbers of drafts that a step may ask for: close together where one more makes a difference.

    Example: up to 7: 0 1 2 3 5 7.
    """
    levels = CAPTURED_LEVELS if device == "cuda" else LEVELS
    return (0, *(k for k in levels if k < num_drafts), num_drafts)


def costs_of(
    runner: Measured, levels: tuple[int, ...], identity: Mapping[str, Any], cache_dir: Path
) -> StepCosts:
    """The costs of a runner's steps: from disk where this pair of models was measured on this machine.

    identity: what they depend on, as JSON takes it.
    """
    costs = StepCosts(levels, runner.buckets)
    facts = {"identity": dict(identity), "levels": levels, "buckets": runner.buckets}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    store = Store(cache_dir / "step-costs.json")
    try:
        costs.read_json(store.read()[key])
    except (KeyError, TypeError, ValueError, AttributeError):
        measure(runner, costs)
        store.add({key: costs.as_json()})
    _prepare(runner, levels)
    return costs


def _prepare(
    runner: Measured, levels: tuple[int, ...], clock: Callable[[], float] = time.perf_counter
) -> None:
    """Run the steps of one request, whatever it verifies and drafts next, until they are recorded: so that nobody's
    first tokens pay for it. Of the numbers of rows, those that steps are filled up to."""
    end, most = clock() + SECONDS, levels[-1]
    for num_verified in sorted({min(rounded_rows(1, 1 + k) - 1, most) for k in range(most + 1)}):
        for num_drafts in levels if runner.on_device else levels[-1:]:
            for _ in range(OFTEN):
                if runner.buckets or clock() > end:
                    return
                runner.measure(StepSize(1, num_verified, num_drafts))


def measure(runner: Measured, costs: StepCosts, clock: Callable[[], float] = time.perf_counter) -> None:
    """Fill in what is known of steps of `runner`. Sizes take turns, so that what slows the machine slows all of them;
    of each the fastest run counts, and what is larger takes no less."""
    found: dict[StepSize, tuple[float, float]] = {}
    sizes, end = list(_sizes(runner, costs.levels)), clock() + SECONDS
    for number in range(OFTEN + RUNS):
        for size in sizes:
            if clock() > end and (number > OFTEN or size not in _indispensable(sizes)):
                continue
            times = runner.measure(size)
            if number >= OFTEN:  # the first runs of a size prepare it
                found[size] = tuple(map(min, times, found.get(size, times)))  # type: ignore[assignment]
    _take(found, runner.on_device, costs)


def _take(found: Mapping[StepSize, tuple[float, float]], has_drafts: bool, costs: StepCosts) -> None:
    plain = {s.num_requests: t for s, (t, _) in found.items() if not s.num_drafts and not s.context}
    verifies = {s.num_requests * (1 + s.num_drafts): t for s, (t, _) in found.items() if s.num_drafts}
    costs.target = Curve(_growing(plain if costs.is_padded else {**verifies, **plain}))
    for size, (target, draft) in found.items():
        num_requests, num_drafts = size.num_requests, size.num_drafts
        if num_drafts and has_drafts:
            if (
                costs.is_padded
            ):  # one graph: what it takes beyond a pass of its rows is laid to the draft pass
                draft = target - costs.target.at(num_requests * (1 + num_drafts))
            costs.draft.setdefault(num_drafts, Curve()).set(num_requests, draft)
        elif size.context:
            costs.context_seconds = max(0.0, target - costs.target.at(num_requests)) / (
                size.context * num_requests
            )


def _growing(seconds: Mapping[int, float]) -> dict[int, float]:
    """Each size's seconds, at most those of any larger one."""
    least, found = float("inf"), dict[int, float]()
    for size in sorted(seconds, reverse=True):
        least = found[size] = min(least, seconds[size])
    return found


def _sizes(runner: Measured, levels: tuple[int, ...]) -> Iterator[StepSize]:
    """What matters most first."""
    numbers = [r for r in runner.buckets or REQUESTS if r <= min(MOST_REQUESTS, runner.max_num_seqs)]
    few = levels if runner.buckets else tuple(dict.fromkeys((0, levels[1], levels[-1])))
    yield from (StepSize(numbers[0], k, k) for k in levels)
    yield StepSize(numbers[0], 0, 0, runner.max_model_len // 2)
    for num_requests in numbers[1:]:
        captured = levels_of(num_requests, few) if runner.buckets else few
        yield from (StepSize(num_requests, k, k) for k in captured)


def _indispensable(sizes: Sequence[StepSize]) -> list[StepSize]:
    """Those of the fewest requests."""
    return [size for size in sizes if size.num_requests == sizes[0].num_requests]
