"""When the device was busy, from profiler events. Times in nanoseconds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Interval = tuple[int, int]  # start, end
COPIES = ("Memcpy", "Memset")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of the intervals, as sorted intervals that neither overlap nor touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def gaps(intervals: Iterable[Interval]) -> list[int]:
    """Lengths of the pauses between merged intervals."""
    merged = merge(intervals)
    return [b[0] - a[1] for a, b in itertools.pairwise(merged)]


def idle_share(intervals: Iterable[Interval], shortest: int = 0) -> float:
    """Share of the time from first start to last end in pauses of at least `shortest`; 1.0 for an empty time."""
    merged = merge(intervals)
    if not merged or merged[-1][1] == merged[0][0]:
        return 1.0
    return sum(gap for gap in gaps(merged) if gap >= shortest) / (merged[-1][1] - merged[0][0])


@dataclass(frozen=True)
class Event:
    """A kernel or copy on the device, or a call on the host."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """`work`: kernels and copies; `waits`: calls in which the host only waited for the device."""

    work: list[Event]
    waits: list[Event]

    def steady(self) -> Timeline:
        """The timeline without its first tenth, in which the profiler warms up."""
        if not self.work:
            return self
        first, last = min(e.start for e in self.work), max(e.end for e in self.work)
        begin = first + (last - first) // 10
        kept = ([e for e in events if e.start >= begin] for events in (self.work, self.waits))
        return Timeline(*kept)

    def kernels(self) -> list[Interval]:
        return [(e.start, e.end) for e in self.work if not e.name.startswith(COPIES)]

    def largest(self, count: int) -> list[tuple[str, int, int]]:
        """(name, total time, count) of the work with the most total time."""
        times: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for e in self.work:
            times[e.name] += e.end - e.start
            numbers[e.name] += 1
        return [(name, time, numbers[name]) for name, time in times.most_common(count)]


def record(run: Callable[[], None], device: str) -> Timeline:
    """Profile `run` on the device; on a CPU torch's operators, which only tests the code."""
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    if cuda:
        with profile(activities=activities):  # the first use in a process includes setup
            torch.zeros(1, device=device).add_(1)
            torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize()
    results = profiler.profiler
    assert results is not None
    work, waits = [], []
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    for e in results.kineto_results.events():
        event = Event(e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
        if e.device_type() == kind:
            work.append(event)
        elif event.name in WAITS:
            waits.append(event)
    return Timeline(work, waits)


def idle(run: Callable[[], None], device: str) -> float:
    """Share of the time in which the device was idle, after the profiler's warm-up."""
    return idle_share(record(run, device).steady().kernels())


def shortened(name: str, length: int = 90) -> str:
    return name if len(name) <= length else f"{name[:length]}..."


def total(events: Sequence[Event]) -> int:
    return sum(e.end - e.start for e in events)
