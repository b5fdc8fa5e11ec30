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

from draftproof.engine.pace import Pace

HOST_RATE = 0.05  # weight of a step in what the host takes
PROMPT_RATE = 0.25  # weight of a step with prompts in what these take the drafter
MOST_SLOWER_HOST = 2.0  # times as long as before: what is beyond says no more
MOST_CAPTURED_ROWS = 256  # of a captured step whose number of drafts is chosen
MAX_GRAPH_ROWS = 64  # larger passes, but for those captured at the start, are long enough to run as they are
ROW_SIZES = (*range(1, 17), *range(18, 33, 2), *range(36, MAX_GRAPH_ROWS + 1, 4))  # of steps with drafts
GUESSED_DRAFT = 1e-4  # seconds a request, of a drafter that was not measured
GUESSED_TARGET = 1e-3  # seconds of a pass, where nothing was measured: only ratios matter


def levels_of(num_requests: int, levels: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of drafts for which steps of so many requests are captured: each graph has logits of its own, and the
    more requests, the fewer drafts can pay. A number that is fixed is not for us to choose."""
    if len(levels) == 1:
        return levels
    return tuple(k for k in levels if k <= levels[1] or num_requests * (1 + k) <= MOST_CAPTURED_ROWS)


@lru_cache(maxsize=4096)
def rounded_rows(num_requests: int, num_rows: int, most_drafts: int) -> int:
    """What the rows of a decoding step with drafts are filled up to where each size is recorded once: it takes some
    steps' time, and requests with other numbers of drafts make other sizes every step. One of `ROW_SIZES`, but nobody
    verifies more than `most_drafts`; steps that are too large to be recorded stay as they are.

    Example: four requests with 6, 2, 5 and 4 rows: 17, which becomes 18.
    """
    if not num_requests < num_rows <= MAX_GRAPH_ROWS:
        return num_rows
    rounded = ROW_SIZES[bisect_left(ROW_SIZES, num_rows)]
    return min(rounded, num_requests * (1 + most_drafts))


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
        """Seconds of one of few sizes, which come again: they are kept."""
        known = self._between.get(size)
        if known is None:
            known = self._between[size] = self.look_up(size)
        return known

    def look_up(self, size: int) -> float:
        """Seconds of one of many sizes."""
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
        near = high if size > high else low
        return max(1e-9, self.points[near] + slope * (size - near))


@dataclass(slots=True)
class DraftCosts:
    """Seconds of a draft pass: for so many requests, by drafts. Linear between the numbers of requests that were
    measured, as between the numbers of drafts."""

    by_requests: dict[int, Curve] = field(default_factory=dict)
    _known: dict[tuple[int, int], float] = field(default_factory=dict)  # what was asked for before

    def set(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        self.by_requests.setdefault(num_requests, Curve()).set(num_drafts, seconds)
        self._known.clear()

    def at(self, num_requests: int, num_drafts: int) -> float:
        if not num_drafts:
            return 0.0
        if not self.by_requests:
            return GUESSED_DRAFT * num_requests
        found = self._known.get((num_requests, num_drafts))
        if found is None:
            curve = Curve({r: by_drafts.at(num_drafts) for r, by_drafts in self.by_requests.items()})
            found = self._known[num_requests, num_drafts] = curve.at(num_requests)
        return found


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step in which everybody decodes.

    target: by rows. draft: by requests and drafts. context: of the target's pass with one row a request, by the tokens
    that all requests have together; `context_row_seconds`: of each of them for each further row, since the rows of a
    request read its keys together. `levels`: numbers of drafts that may be asked for, ascending from 0. `buckets`: on a
    device that runs captured steps, the numbers of requests that steps are filled up to; each of them then has as many
    rows as the largest level among them asks for. `host_seconds`: of what a step is beside both passes.
    `prompt_row_seconds`: of each row of a prompt in the drafter's pass over it; 0: not known. `spread`: times as long
    as its fastest run that a usual run of a size took then; much more than 1 where other programs ran.
    """

    levels: tuple[int, ...]
    buckets: tuple[int, ...] = ()
    target: Curve = field(default_factory=Curve)
    draft: DraftCosts = field(default_factory=DraftCosts)
    context: Curve = field(default_factory=Curve)
    context_row_seconds: float = 0.0
    host_seconds: float = 0.0
    prompt_row_seconds: float = 0.0
    spread: float = 1.0
    _paces: dict[int, Pace] = field(default_factory=dict)  # `_kind`'s first number -> pace of such steps
    _last: int = 0  # that of the last step
    _num_told: int = 0

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
        return self._times(self._kind(*size)) * self._measured(*size, context)

    def ragged(self, num_requests: int, context: int) -> Callable[[int, int], float]:
        """`step` for rows and drafts (not 0), where steps are not filled up: what they have in common is looked up
        once."""
        times = self._times(self._kind(num_requests, num_requests + 1, 1))
        fixed = self.host_seconds + self.context.look_up(context)
        each_row = self.context_row_seconds * context / num_requests

        def step(num_rows: int, num_drafts: int) -> float:
            keys = each_row * (num_rows - num_requests)
            return times * (fixed + keys + self._passes(num_requests, num_rows, num_drafts))

        return step

    def plain(self, num_requests: int, context: int = 0) -> float:
        return self.step(num_requests, num_requests, 0, context)

    def observe(self, step: StepOutcome) -> None:
        """Correct what is known by a step that was run."""
        self._num_told += 1
        known = self.host_seconds
        host = min(step.host_seconds, MOST_SLOWER_HOST * known) if known else step.host_seconds
        self.host_seconds += max(HOST_RATE, 1 / self._num_told) * (host - known)
        size = self._filled(step.num_requests, step.num_rows, step.num_drafts)
        about_as_many, kind = self._kind(*size)
        if about_as_many not in self._paces:
            last = self._paces.get(self._last)
            self._paces[about_as_many] = last.successor() if last else Pace()
        self._last = about_as_many
        measured = self._measured(*size, step.context)
        self._paces[about_as_many].observe(kind, math.log(step.seconds / measured))

    def observe_prompt(self, num_rows: int, draft_seconds: float) -> None:
        """The drafter took so long for rows of which most were of prompts."""
        found, known = draft_seconds / num_rows, self.prompt_row_seconds
        self.prompt_row_seconds = known + (PROMPT_RATE if known else 1.0) * (found - known)

    def _kind(self, num_requests: int, num_rows: int, num_drafts: int) -> tuple[int, int]:
        """Which steps have a pace in common, and which a correction; 0: steps without drafts. Where steps are filled
        up, each captured size has its own; else numbers of requests are alike (1, 2 or 3, 4 to 7, and so on), as are
        numbers of drafts."""
        if self.is_padded:
            return num_requests, num_drafts
        return num_requests.bit_length(), int(num_rows > num_requests or num_drafts > 0)

    def _times(self, kind: tuple[int, int]) -> float:
        """Times as long as was measured that such steps take."""
        pace = self._paces.get(kind[0]) or self._paces.get(self._last)
        return math.exp(pace.at(kind[1])) if pace else 1.0

    def _filled(self, num_requests: int, num_rows: int, num_drafts: int) -> tuple[int, int, int]:
        """What a step of this size is filled up to."""
        if not self.buckets:
            return num_requests, num_rows, num_drafts
        most = max(num_drafts, -(-num_rows // num_requests) - 1)
        num_drafts = next((k for k in self.levels if k >= most), most)
        num_requests = next((b for b in self.buckets if b >= num_requests), num_requests)
        return num_requests, num_requests * (1 + num_drafts), num_drafts

    def _measured(self, num_requests: int, num_rows: int, num_drafts: int, context: int) -> float:
        """What the profile says of a step of this size."""
        keys = self.context.look_up(context)
        keys += self.context_row_seconds * context * (num_rows / num_requests - 1.0)
        return self.host_seconds + keys + self._passes(num_requests, num_rows, num_drafts)

    def _passes(self, num_requests: int, num_rows: int, num_drafts: int) -> float:
        """Seconds of both passes, with no keys to read."""
        if not self.is_padded:
            num_rows = rounded_rows(num_requests, num_rows, self.levels[-1])
        target = self.target.at(num_rows) if self.target.points else GUESSED_TARGET
        return target + self.draft.at(num_requests, num_drafts)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": _written(self.target),
            "draft": {str(r): _written(curve) for r, curve in self.draft.by_requests.items()},
            "context": _written(self.context),
            "context_row_seconds": self.context_row_seconds,
            "spread": self.spread,
        }

    def read_json(self, raw: Any) -> None:
        """Take over what `as_json` wrote. KeyError, TypeError, ValueError or AttributeError for anything else."""
        target, context = _read(raw["target"]), _read(raw["context"])
        row_seconds, spread = float(raw["context_row_seconds"]), float(raw["spread"])
        draft = {int(r): _read(curve) for r, curve in raw["draft"].items()}
        behind = [row_seconds, *context.points.values()]
        drafts = [seconds for curve in draft.values() for seconds in curve.points.values()]
        if not all(map(math.isfinite, [spread, *behind, *target.points.values(), *drafts])):
            raise ValueError("not a profile: numbers that are none")
        if not target.points or min(target.points.values()) <= 0 or min(behind) < 0 or spread < 1:
            raise ValueError("not a profile")
        self.target, self.draft = target, DraftCosts(draft)
        self.context, self.context_row_seconds, self.spread = context, row_seconds, spread


def _written(curve: Curve) -> dict[str, float]:
    return {str(size): seconds for size, seconds in curve.points.items()}


def _read(points: Any) -> Curve:
    return Curve({int(size): float(seconds) for size, seconds in points.items()})
