"""Measured seconds of a step: the target's pass by rows and context, the draft pass by drafts and requests.

Measured in a short profile at the start (`engine/profile.py`) and corrected by every step that is run. R requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

# Weight of a step in the pace of steps with as many drafts, once there were some. Noise only slows a step, so that one
# that is faster than expected says more than one that is slower.
FASTER_RATE, SLOWER_RATE = 0.25, 0.07
UNSETTLED = 3  # first steps of a kind, which are compiled, recorded, or find no cache warm: they do not count
SHARED = 0.5  # how much of what changes about steps that are well known is laid to the machine
WELL_KNOWN = 5.0  # steps, after which half as much is
HOST_RATE = 0.05  # weight of a step in what the host takes
FORGOTTEN = 0.97  # what a step of another kind leaves of a kind's own pace: what seemed slow is tried again
MOST_CAPTURED_ROWS = 256  # of a captured step whose number of drafts is chosen
OUTLIER = 2.0  # times as long or as short as expected: what is beyond says no more
GUESSED_DRAFT = 1e-4  # seconds a request, of a drafter that was not measured
GUESSED_TARGET = 1e-3  # seconds of a pass, where nothing was measured: only ratios matter


def levels_of(num_requests: int, levels: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of drafts for which steps of so many requests are captured: each graph has logits of its own, and the
    more requests, the fewer drafts can pay. A number that is fixed is not for us to choose."""
    if len(levels) == 1:
        return levels
    return tuple(k for k in levels if k <= levels[1] or num_requests * (1 + k) <= MOST_CAPTURED_ROWS)


@lru_cache(maxsize=4096)
def rounded_rows(num_requests: int, num_rows: int) -> int:
    """What a decoding step's rows are filled up to where each size is recorded once: it takes some steps' time, and
    requests with other numbers of drafts make other sizes every step. R and up to 8, 10, 12, 14, 16, 20, 24, ... rows.

    Example: four requests with 6, 2, 5 and 4 rows: 17, which is 4 and 13, and becomes 4 and 14.
    """
    extra = num_rows - num_requests
    unit = 1 << max(0, (extra - 1).bit_length() - 3) if extra > 1 else 1
    return num_requests + -(-extra // unit) * unit


class StepOutcome(NamedTuple):
    """A step in which everybody decoded: R requests and all their rows, the most drafts that any wanted then, tokens
    emitted, tokens that the requests had before (`context`); seconds in all, and of them beside the passes."""

    num_requests: int
    num_rows: int
    num_drafts: int
    num_tokens: int
    context: int
    seconds: float
    host_seconds: float = 0.0


class Curve:
    """Seconds by size: linear between the sizes that were measured, and beyond the last as between the last two."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.points = dict(sorted((points or {}).items()))
        self._sizes = list(self.points)
        self._between: dict[int, float] = {}  # what was asked for before

    def set(self, size: int, seconds: float) -> None:
        self.points[size] = seconds
        self.points = dict(sorted(self.points.items()))
        self._sizes = list(self.points)
        self._between.clear()

    def at(self, size: int) -> float:
        known = self._between.get(size)
        if known is None:
            known = self._between[size] = self._at(size)
        return known

    def _at(self, size: int) -> float:
        if size in self.points:
            return self.points[size]
        sizes = self._sizes
        if len(sizes) < 2:
            return self.points[sizes[0]] if sizes else 0.0
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.points[high] - self.points[low]) / (high - low)
        if size > high or size < low:
            slope = max(0.0, slope)
        return max(1e-9, self.points[low] + slope * (size - low))


@dataclass(slots=True)
class Pace:
    """How much longer some steps take than the profile says, as a logarithm. `common`: the pace of the machine for
    about as many requests, when these were last met; `last`: the number of steps then."""

    value: float = 0.0
    common: float = 0.0
    num_steps: int = 0
    num_met: int = 0  # with those that did not count
    last: int = 0


_NOT_MET = Pace()


def _rate(surprise: float) -> float:
    return FASTER_RATE if surprise < 0 else SLOWER_RATE


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step in which everybody decodes.

    target: by rows. draft: for a number of drafts, by requests. `levels`: numbers of drafts that may be asked for,
    ascending from 0. `buckets`: on a device that runs captured steps, the numbers of requests that steps are filled up
    to; each of them then has as many rows as the largest level among them asks for. `context_seconds`: of each token
    that a request has, in the target's pass of one row for it. `host_seconds`: of what a step is beside both passes.
    `prompt_row_seconds`: of each row of a prompt in the drafter's pass over it; 0: not known.
    """

    levels: tuple[int, ...]
    buckets: tuple[int, ...] = ()
    target: Curve = field(default_factory=Curve)
    draft: dict[int, Curve] = field(default_factory=dict)
    context_seconds: float = 0.0
    host_seconds: float = 0.0
    prompt_row_seconds: float = 0.0
    _paces: dict[tuple[int, int], Pace] = field(default_factory=dict)  # `_kind` -> pace
    _common: dict[int, Pace] = field(default_factory=dict)  # its first number -> pace of all such steps
    _draft_passes: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def target_row_seconds(self) -> float:
        """What one more row takes in a large pass."""
        sizes = list(self.target.points)[-2:]
        return self.target.at(sizes[-1] + 1) - self.target.at(sizes[-1]) if len(sizes) == 2 else 0.0

    def levels_for(self, num_requests: int) -> tuple[int, ...]:
        """Numbers of drafts that so many requests may be asked for."""
        if not self.is_padded:
            return self.levels
        return levels_of(next((b for b in self.buckets if b >= num_requests), num_requests), self.levels)

    @property
    def is_padded(self) -> bool:
        return bool(self.buckets)

    def step(self, num_requests: int, num_rows: int, num_drafts: int, context: int = 0) -> float:
        """Seconds of a step of R requests with so many rows in all, which then drafts up to `num_drafts`; `context`:
        tokens of all requests."""
        size = self._filled(num_requests, num_rows, num_drafts)
        pace = math.exp(self._pace(self._kind(size[0], size[2])))
        return pace * (self.host_seconds + self._passes(*size, context))

    def ragged(self, num_requests: int, context: int) -> Callable[[int, int], float]:
        """`step` for rows and drafts (not 0), where steps are not filled up: what they have in common is looked up
        once."""
        pace = math.exp(self._pace(self._kind(num_requests, 1)))
        host = self.host_seconds

        def step(num_rows: int, num_drafts: int) -> float:
            return pace * (host + self._passes(num_requests, num_rows, num_drafts, context))

        return step

    def plain(self, num_requests: int, context: int = 0) -> float:
        return self.step(num_requests, num_requests, 0, context)

    def observe(self, step: StepOutcome) -> None:
        """Correct what is known by a step that was run."""
        size = self._filled(step.num_requests, step.num_rows, step.num_drafts)
        kind = self._kind(size[0], size[2])
        own = self._paces.setdefault(kind, Pace())
        own.num_met += 1
        if own.num_met <= UNSETTLED:
            return
        expected = self._pace(kind)
        common = self._common.setdefault(kind[0], Pace())
        found = math.log(step.seconds / (self.host_seconds + self._passes(*size, step.context)))
        if common.num_steps:
            found = min(expected + math.log(OUTLIER), max(expected - math.log(OUTLIER), found))
        common.num_steps += 1
        surprise = found - expected
        is_only = own.num_steps + 1 == common.num_steps  # then others are expected to be as fast or slow
        own.num_steps += 1
        own.value = expected + max(_rate(surprise), 1 / (2 + own.num_steps)) * surprise
        if is_only:
            common.value = own.value
        else:
            known = own.num_steps / (own.num_steps + WELL_KNOWN)
            common.value += SHARED * known * (own.value - expected)
        own.common, own.last = common.value, common.num_steps
        host = min(step.host_seconds, OUTLIER * self.host_seconds) if self.host_seconds else step.host_seconds
        self.host_seconds += max(HOST_RATE, 1 / common.num_steps) * (host - self.host_seconds)

    def observe_prompt(self, num_rows: int, draft_seconds: float) -> None:
        """The drafter took so long for rows of which most were of prompts."""
        found, known = draft_seconds / num_rows, self.prompt_row_seconds
        self.prompt_row_seconds = known + (FASTER_RATE if known else 1.0) * (found - known)

    def _kind(self, num_requests: int, num_drafts: int) -> tuple[int, int]:
        """Which steps have a pace in common: where they are filled up, each captured size has one; else it differs with
        and without drafts, and with the number of requests (1, 2 or 3, 4 to 7, and so on)."""
        if self.is_padded:
            return num_requests, num_drafts
        return num_requests.bit_length(), min(num_drafts, 1)

    def _pace(self, kind: tuple[int, int]) -> float:
        """The pace of a kind of steps. One that was not met of late has changed as others have since, and with drafts
        differs the less from them the longer ago it was."""
        own = self._paces.get(kind, _NOT_MET)
        common = self._common.get(kind[0], _NOT_MET)
        age = common.num_steps - own.last if kind[1] else 0  # plain steps are what others are compared with
        return common.value + (own.value - own.common) * FORGOTTEN**age

    def _filled(self, num_requests: int, num_rows: int, num_drafts: int) -> tuple[int, int, int]:
        """What a step of this size is filled up to."""
        if not self.buckets:
            return num_requests, num_rows, num_drafts
        most = max(num_drafts, -(-num_rows // num_requests) - 1)
        num_drafts = next((k for k in self.levels if k >= most), most)
        num_requests = next((b for b in self.buckets if b >= num_requests), num_requests)
        return num_requests, num_requests * (1 + num_drafts), num_drafts

    def _passes(self, num_requests: int, num_rows: int, num_drafts: int, context: int) -> float:
        if not self.is_padded:
            num_rows = rounded_rows(num_requests, num_rows)
        target = self.target.at(num_rows) if self.target.points else GUESSED_TARGET
        # each row looks at its request's tokens; where steps are filled up, rows of a request look together
        looks = 1.0 if self.is_padded else num_rows / num_requests
        behind = self.context_seconds * context * looks
        return target + self._draft_pass(num_requests, num_drafts) + behind

    def _draft_pass(self, num_requests: int, num_drafts: int) -> float:
        if not num_drafts:
            return 0.0
        if not self.draft:
            return GUESSED_DRAFT * num_requests
        found = self._draft_passes.get((num_requests, num_drafts))
        if found is None:
            by_drafts = Curve({k: curve.at(num_requests) for k, curve in self.draft.items()})
            found = self._draft_passes[num_requests, num_drafts] = by_drafts.at(num_drafts)
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "target": {str(rows): s for rows, s in self.target.points.items()},
            "draft": {str(k): {str(r): s for r, s in c.points.items()} for k, c in self.draft.items()},
            "context_seconds": self.context_seconds,
        }

    def read_json(self, raw: Any) -> None:
        """Take over what `as_json` wrote. KeyError, TypeError, ValueError or AttributeError for anything else."""
        target = {int(rows): float(s) for rows, s in raw["target"].items()}
        draft = {
            int(k): Curve({int(r): float(s) for r, s in points.items()}) for k, points in raw["draft"].items()
        }
        context_seconds = float(raw["context_seconds"])
        drafts = [seconds for curve in draft.values() for seconds in curve.points.values()]
        if not all(map(math.isfinite, [context_seconds, *target.values(), *drafts])):
            raise ValueError("not a profile: numbers that are none")
        if not target or min(target.values()) <= 0 or context_seconds < 0:
            raise ValueError("not a profile")
        self.target, self.draft, self.context_seconds = Curve(target), draft, context_seconds
