"""Counters of speculation, per request and summed for the engine, and times of the engine's steps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple


@dataclass(slots=True)
class SpeculationStats:
    """Counts of speculation. A round is one verify pass that emitted tokens for the request.

    `num_rounds` excludes the pass that emits the first token, at the end of prefill. `acceptance_length` (tau) is the
    number of tokens emitted per round, the bonus token included: 1 + accepted / rounds. `acceptance_rate` is the share
    of drafts that were accepted, 0 if there were none. `accepted_per_position[i]` counts rounds that accepted more than
    i drafts; `drafted_per_position[i]` counts rounds that proposed more than i.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one round."""
        assert 0 <= num_accepted <= num_drafted, (num_accepted, num_drafted)
        self.num_rounds += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = num_drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for i in range(num_drafted):
            self.drafted_per_position[i] += 1
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1

    def add(self, other: SpeculationStats) -> None:
        """Sum `other` into this one."""
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        missing = len(other.drafted_per_position) - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for i, (drafted, accepted) in enumerate(
            zip(other.drafted_per_position, other.accepted_per_position, strict=True)
        ):
            self.drafted_per_position[i] += drafted
            self.accepted_per_position[i] += accepted

    def since(self, before: SpeculationStats) -> SpeculationStats:
        """The counts added since `before`, an earlier copy of this object."""
        missing = len(self.drafted_per_position) - len(before.drafted_per_position)
        accepted = [*before.accepted_per_position, *[0] * missing]
        drafted = [*before.drafted_per_position, *[0] * missing]
        return SpeculationStats(
            self.num_rounds - before.num_rounds,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            [now - then for now, then in zip(self.accepted_per_position, accepted, strict=True)],
            [now - then for now, then in zip(self.drafted_per_position, drafted, strict=True)],
        )


@dataclass(slots=True)
class DrafterStats:
    """Counts of one drafter, or of one member of a chain.

    `speculation` covers the rounds that verified this drafter's drafts; rounds without drafts are attributed to none.
    `num_faults`: failed calls; in a request's statistics, its rounds that lost their drafts to a fault.
    """

    name: str
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_faults: int = 0

    def add(self, other: DrafterStats) -> None:
        """Add the counts of `other`, which belong to the same drafter."""
        self.speculation.add(other.speculation)
        self.num_faults += other.num_faults


class Prediction(NamedTuple):
    """Expected effect of speculation with `num_requests` concurrent requests: the best number of drafts (0: none), and
    `speedup`, tokens per second relative to plain decoding.
    """

    num_requests: int
    num_drafts: int
    speedup: float


@dataclass(slots=True)
class EngineStats:
    """Sums over the engine's life.

    Times are wall-clock seconds as seen by the host. A step consists of planning, launch (on a CPU this includes the
    computation: target and draft), waiting for a device, and processing results. On a CPU, step time that is neither
    target nor draft is host time that no pass overlaps. `drafters`: one entry per drafter, in chain order.
    `predictions`: made at startup, if the number of drafts is chosen automatically.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_drafter_faults: int = 0
    last_drafter_fault: str = ""
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    planning_seconds: float = 0.0
    launch_seconds: float = 0.0
    waiting_seconds: float = 0.0
    results_seconds: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    drafters: list[DrafterStats] = field(default_factory=list)
    predictions: tuple[Prediction, ...] = ()

    @property
    def host_seconds(self) -> float:
        """Step time in which the host neither ran or launched a pass nor waited for one."""
        busy = self.target_seconds + self.draft_seconds + self.waiting_seconds
        return max(0.0, self.step_seconds - busy)

    def record_round(self, drafter: int, num_drafted: int, num_accepted: int) -> None:
        """Count one round; `drafter`: the index of the one whose drafts it verified, if there were any."""
        self.speculation.record(num_drafted, num_accepted)
        if num_drafted:
            self.drafters[drafter].speculation.record(num_drafted, num_accepted)

    def add(self, other: EngineStats) -> None:
        """Add the sums of `other`, an engine with the same drafters."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_drafter_fault = other.last_drafter_fault or self.last_drafter_fault
        self.speculation.add(other.speculation)
        for own, drafter in zip(self.drafters, other.drafters, strict=True):
            own.add(drafter)


SUMS = tuple(f.name for f in fields(EngineStats) if f.name.startswith("num_") or f.name.endswith("_seconds"))


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """Current load of one engine. Block counts are those of its key-value cache, without the reserved scratch block."""

    stats: EngineStats
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 1
    block_size: int = 1
