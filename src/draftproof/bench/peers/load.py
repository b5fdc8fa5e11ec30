"""Foreign load: the share of the machine used by neither the measured engine nor our own busy processes.

Read from Linux' /proc; unknown elsewhere. Load of idle engines counts as foreign on purpose: they must not spin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; guests are counted in user


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds: wall clock, processor time of the whole machine, and of our processes."""

    clock: float
    machine: float
    ours: float


def machine_seconds(stat: str, ticks_per_second: int) -> float:
    """Processor time of all cores since the start, from the text of /proc/stat."""
    fields = stat.split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in BUSY_FIELDS) / ticks_per_second


def process_seconds(stat: str, ticks_per_second: int) -> float:
    """Processor time of a process, from the text of its stat; its name may contain spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / ticks_per_second


def sample(pids: Sequence[int] = ()) -> Sample | None:
    """A sample now; `pids`: our processes. None if the system has no such data."""
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        machine = machine_seconds((PROC / "stat").read_text(), ticks)
        ours = sum(process_seconds((PROC / str(pid) / "stat").read_text(), ticks) for pid in pids)
    except (OSError, ValueError):
        return None
    return Sample(time.perf_counter(), machine, ours)


def foreign_share(
    before: Sample | None, after: Sample | None, engine_seconds: float, num_cores: int | None = None
) -> float | None:
    """Share of all cores' time between two samples used by others than the engine and our processes.

    `num_cores`: of the whole machine, not only those this process may use; None: all cores.
    """
    if before is None or after is None or after.clock <= before.clock:
        return None
    cores = num_cores or os.cpu_count() or 1
    spent = after.machine - before.machine - (after.ours - before.ours) - engine_seconds
    return max(0.0, spent / (cores * (after.clock - before.clock)))
