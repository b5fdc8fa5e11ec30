"""Cost model of a step, in seconds: the target's pass by rows and context, the draft pass by drafts and requests.

Measured by a short profile at the engine's start (`engine/profile.py`) and corrected by steps that run.
R requests.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

from draftproof.engine.host_costs import MOST_SLOWER, HostCosts
from draftproof.engine.pace import UNKNOWN_KIND, Pace

TRUSTED_HOST = 20  # steps without drafts in a row from which on the host's seconds of others are doubted
# What each further row per request adds to the host's seconds of a plain step, as a part of these, until steps with
# drafts and without were seen. Measured: 0.1 for n-grams and suffix drafting, 0.1 to 0.3 for heads, 0.4 for draft
# models.
HOST_PER_ROW = 0.15
PROMPT_RATE = 0.25  # weight of a new step with prompts in the average of the drafter's seconds per prompt row
# What is left of the price of a prompt with each that is not shown for it: half after 350. One that is too high would
# never be corrected.
PROMPT_BELIEVED = 0.998
MOST_CAPTURED_ROWS = 256  # maximum rows of a captured step if the number of drafts is chosen per step
# Capturing gains nothing for larger passes, except those captured at the start; nor does recording for those with
# prompts, which seldom recur, and whose last layer could leave rows out.
MAX_GRAPH_ROWS = 64
# Nor recording decode-only passes larger than this on a CPU: Python takes a tenth of a millisecond a layer. Example: a
# pass of `tiny` with 64 rows takes 1.5 ms, without recording 2.8; with 128 rows 2.7 and 4.2. Where recording ends, a
# draft more costs a millisecond and a half: 16 requests were slower with 8 drafts each, 144 rows, than with 5 or 16.
MOST_RECORDED_ROWS = 320
# Numbers of rows that recorded steps with drafts are padded to.
ROW_SIZES = (
    *range(1, 17),
    *range(18, 33, 2),
    *range(36, 65, 4),
    *range(72, 257, 8),
    *range(272, MOST_RECORDED_ROWS + 1, 16),
)
WELL_KNOWN = 64  # steps that correct the costs, after which fewer are needed
GUESSED_DRAFT = 1e-4  # seconds per request of a drafter that was not measured yet
DRAFT_RATE = 0.1  # weight of a new step in the average of such a drafter's seconds per request
UNKNOWN = Pace()  # where no step was observed yet
VERIFYING, ASKED = 1, 2  # see `StepCosts._kind`
# Relative errors, as standard deviations: of the drafter's seconds, and of what else the host does where it is asked.
UNKNOWN_DRAFTER, UNKNOWN_HOST = 0.5, 0.01
ALIKE_TOGETHER = 3  # steps of which one corrects the costs where they are alike
GUESSED_TARGET = 1e-3  # seconds of a pass if nothing was measured: only ratios matter


def levels_of(num_requests: int, levels: tuple[int, ...]) -> tuple[int, ...]:
    """The levels (numbers of drafts) for which steps of `num_requests` are captured. Each graph holds logits of its
    own, and with more requests fewer drafts pay, so large ones are left out. A single level is fixed by the user."""
    if len(levels) == 1:
        return levels
    return tuple(k for k in levels if k <= levels[1] or num_requests * (1 + k) <= MOST_CAPTURED_ROWS)


@lru_cache(maxsize=4096)
def rounded_rows(num_requests: int, num_rows: int, most_drafts: int) -> int:
    """Number of rows that a decode-only step with drafts is padded to, if it is in no bucket: few sizes are recorded.

    The next of `ROW_SIZES`, but at most 1 + `most_drafts` rows per request, if there are no more: in a chain others may
    make more drafts. Steps that are too large to be recorded are not padded. Example: four requests with 6, 2, 5 and 4
    rows: 17, which becomes 18.
    """
    if not num_requests < num_rows <= MOST_RECORDED_ROWS:
        return num_rows
    rounded = ROW_SIZES[bisect_left(ROW_SIZES, num_rows)]
    return max(num_rows, min(rounded, num_requests * (1 + most_drafts)))


class StepOutcome(NamedTuple):
    """A finished decode-only step. `num_rows`: of all R requests; `num_drafts`: the most that a request wanted next, or
    that were made if the drafter stops by itself; `num_tokens`: emitted; `context`: tokens of all requests before the
    step; `host_seconds`: part of `seconds` outside both passes; `is_shadow`: its drafts were shadows; `draft_seconds`:
    of the drafter for `num_asked` requests, 0: not known; `is_typical`: whether its time is that of such steps;
    `each_tokens`: that a request got in a step, on the average of those since the last one that was reported; 0: as in
    this one."""

    num_requests: int
    num_rows: int
    num_drafts: int
    num_tokens: int
    context: int
    seconds: float
    host_seconds: float = 0.0
    is_shadow: bool = False
    draft_seconds: float = 0.0
    num_asked: int = 0
    is_typical: bool = True
    each_tokens: float = 0.0

    @property
    def is_last(self) -> bool:
        """Whether it verified drafts and made none. A drafter with keys sees its rows all the same, for which no other
        step's time speaks."""
        return not self.num_drafts and self.num_rows > self.num_requests

    @property
    def tokens_per_request(self) -> float:
        """By all steps since the last report: by one in eight alone two unlucky ones would end drafting that pays."""
        return self.each_tokens or self.num_tokens / self.num_requests

    @property
    def is_plain(self) -> bool:
        """Whether it verified no drafts, and the drafter made none."""
        return not self.num_drafts and self.num_rows == self.num_requests


class Curve:
    """Seconds by size: linear between measured sizes and beyond them. Beyond the largest as between it and those of a
    quarter to half its size: neighbours differ by less than their errors. Example: 25.6 ms at 128 rows and 25.8 at 136
    would make 32 at 346, where steps took 75. Of these slopes the median counts: where 68 rows had seemed to take as
    long as 136, 1,088 seemed to take no longer."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.points = dict(sorted((points or {}).items()))
        self._sizes = list(self.points)
        self._between: dict[int, float] = {}  # cache of `at`
        self._slope_beyond: float | None = None  # cache of `slope_beyond`

    def set(self, size: int, seconds: float) -> None:
        self.points[size] = seconds
        self.points = dict(sorted(self.points.items()))
        self._sizes = list(self.points)
        self._between.clear()
        self._slope_beyond = None

    def at(self, size: int) -> float:
        """Seconds of a size, cached: for sizes that recur."""
        known = self._between.get(size)
        if known is None:
            known = self._between[size] = self.look_up(size)
        return known

    def look_up(self, size: int) -> float:
        """Seconds of a size, not cached: for sizes that rarely recur."""
        if size in self.points:
            return self.points[size]
        sizes = self._sizes
        if len(sizes) < 2:
            return self.points[sizes[0]] if sizes else 0.0
        largest = sizes[-1]
        if size > largest:
            return self.points[largest] + self.slope_beyond * (size - largest)
        right = max(bisect_left(sizes, size), 1)
        low, high = sizes[right - 1], sizes[right]
        slope = (self.points[high] - self.points[low]) / (high - low)
        if size < low:
            slope = max(0.0, slope)
        return max(1e-9, self.points[low] + slope * (size - low))

    @property
    def slope_beyond(self) -> float:
        """Seconds for each unit of size beyond the largest measured size; 0 if there is only one."""
        if self._slope_beyond is None:
            self._slope_beyond = self._usual_slope()
        return self._slope_beyond

    def _usual_slope(self) -> float:
        sizes = self._sizes
        if len(sizes) < 2:
            return 0.0
        largest = sizes[-1]
        num_smaller = max(1, bisect_right(sizes, largest // 2))
        quarter = min(bisect_left(sizes, largest / 4), num_smaller - 1)
        slopes = [
            (self.points[largest] - self.points[size]) / (largest - size)
            for size in sizes[quarter:num_smaller]
        ]
        return max(0.0, statistics.median(slopes))


@dataclass(slots=True)
class DraftCosts:
    """Seconds of a draft pass, by number of requests and of drafts: linear between measured numbers of either. Where
    only one number of drafts was measured, since time was up, others are told by other numbers of requests.

    A chain's lookups are measured alone, and corrected in service: seconds per request, by the bit length of the number
    of requests."""

    by_requests: dict[int, Curve] = field(default_factory=dict)
    _in_service: dict[int, float] = field(default_factory=dict)
    _known: dict[tuple[int, int], float] = field(default_factory=dict)  # cache of `at`

    def set(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        self.by_requests.setdefault(num_requests, Curve()).set(num_drafts, seconds)
        self._known.clear()

    def at(self, num_requests: int, num_drafts: float) -> float:
        """Seconds; of a mean number of drafts, by those of the whole numbers beside it."""
        if not num_drafts:
            return 0.0
        whole = int(num_drafts)
        if whole != num_drafts:
            low, high = self.at(num_requests, whole), self.at(num_requests, whole + 1)
            return low + (num_drafts - whole) * (high - low)
        num_drafts = whole
        if not self.by_requests:
            return self._each(num_requests.bit_length()) * num_requests
        found = self._known.get((num_requests, num_drafts))
        if found is None:
            curves = {
                r: c for r, c in self.by_requests.items() if len(c.points) > 1 or num_drafts in c.points
            }
            curve = Curve({r: c.at(num_drafts) for r, c in (curves or self.by_requests).items()})
            found = self._known[num_requests, num_drafts] = curve.at(num_requests)
        return found

    def observe(self, num_requests: int, seconds: float) -> None:
        """Note how long a draft pass took in service."""
        size, each = num_requests.bit_length(), seconds / num_requests
        known = self._in_service.get(size, each)
        self._in_service[size] = known + DRAFT_RATE * (each - known)

    def _each(self, size: int) -> float:
        """Seconds per request, as measured with the most similar number of requests."""
        if not self._in_service:
            return GUESSED_DRAFT
        return self._in_service[min(self._in_service, key=lambda known: abs(known - size))]


@dataclass(slots=True)
class StepCosts:
    """Seconds of a decode-only step.

    `target`: by rows. `draft`: by requests and drafts. `context`: what reading keys adds to a target pass with one row
    per request, by the tokens of all requests; `context_rows`: what each further row per request adds, and its draft,
    by the same (little for a row: those of a request read its keys together). `host`: outside both passes, of steps
    with drafts, which are also looked after on the host; `plain_host`: of those without.
    `prompt_row_seconds`: of the drafter, per row of a prompt; 0: not known.
    `levels`: numbers of drafts that may be asked for, ascending from 0. `buckets`: where steps are captured, the
    numbers of requests that they are padded to; every request is then padded to the rows of the largest level among
    them. `spread`: median time of a size in the profile over its fastest; well above 1 if other programs ran.
    """

    levels: tuple[int, ...]
    buckets: tuple[int, ...] = ()
    target: Curve = field(default_factory=Curve)
    draft: DraftCosts = field(default_factory=DraftCosts)
    context: Curve = field(default_factory=Curve)
    context_rows: Curve = field(default_factory=Curve)
    host: HostCosts = field(default_factory=HostCosts)
    plain_host: HostCosts = field(default_factory=HostCosts)
    prompt_row_seconds: float = 0.0
    spread: float = 1.0
    _paces: dict[int, Pace] = field(default_factory=dict)  # `_kind`'s first number -> pace of such steps
    _last: int = 0  # `_kind`'s first number for the last step
    _num_plain: int = 0  # steps without drafts in a row

    @property
    def target_row_seconds(self) -> float:
        """Seconds that one more row adds to a large pass."""
        return self.target.slope_beyond

    def levels_for(self, num_requests: int) -> tuple[int, ...]:
        """Numbers of drafts that may be asked for, per request, in a step of `num_requests`."""
        if not self.is_padded:
            return self.levels
        return levels_of(next((b for b in self.buckets if b >= num_requests), num_requests), self.levels)

    @property
    def is_padded(self) -> bool:
        return bool(self.buckets)

    def step(self, num_requests: int, num_rows: int, num_drafts: int, context: int = 0) -> float:
        """Seconds of a step of R requests with `num_rows` rows in all, which then drafts up to `num_drafts` each;
        `context`: tokens of all requests. Never less than without drafts: the two are seen at different times, and the
        machine may have been faster at one of them. Example: 1.54 ms without and 1.25 with drafts that were asked for,
        of an n-gram that had none; it was asked in each step, which took 1.1 times as long as plain ones."""
        size = self._filled(num_requests, num_rows, num_drafts)
        pace, kind = self._pace_of(*size)
        seconds = math.exp(pace.at(kind, self._doublings(*size[:2]))) * self._measured(*size, context)
        is_plain = not num_drafts and num_rows == num_requests
        return seconds if is_plain else max(seconds, self.plain(num_requests, context))

    def ragged(self, num_requests: int, context: int) -> Callable[[int, float], float]:
        """`step` as a function of rows and drafts (not 0), where steps are not padded to buckets. Faster than `step`:
        what does not depend on the two is looked up once."""
        pace, drafted = self._pace_of(num_requests, num_requests + 1, 1)
        _, asked = self._pace_of(num_requests, num_requests, 1)
        asked_times, drafted_times = math.exp(pace.at(asked)), math.exp(pace.at(drafted))
        power = pace.growth / math.log(2)  # exp(growth * log2(x)) = x ** power
        fixed = self.context.look_up(context)
        each_row = self.context_rows.look_up(context) / num_requests
        host_at, passes = self._host(num_requests, is_plain=False), self._passes
        least = self.plain(num_requests, context)

        def step(num_rows: int, num_drafts: float) -> float:
            times = asked_times
            if num_rows > num_requests:
                times = drafted_times * (num_rows / num_requests) ** power
            keys = fixed + each_row * (num_rows - num_requests)
            return max(least, times * (host_at(num_rows) + keys + passes(num_requests, num_rows, num_drafts)))

        return step

    def drafting(self, num_requests: int, context: int) -> Callable[[int, int], float]:
        """`step` as a function of rows and drafts, for steps that have some."""
        if not self.is_padded:
            return self.ragged(num_requests, context)
        return lambda num_rows, num_drafts: self.step(num_requests, num_rows, num_drafts, context)

    def plain(self, num_requests: int, context: int = 0) -> float:
        return self.step(num_requests, num_requests, 0, context)

    def observe(self, step: StepOutcome) -> None:
        """Correct the costs by a step that was run."""
        host = self.plain_host if step.is_plain else self.host
        if not host.is_known:
            guessed = self._host(step.num_requests, is_plain=step.is_plain)(step.num_rows)
            if guessed:
                host.guess(step.num_rows, guessed)
        host.observe(step.num_rows, step.host_seconds)
        self._num_plain = self._num_plain + 1 if step.is_plain else 0
        if self._num_plain > TRUSTED_HOST and self.host.is_known:
            self.host.doubt(self._guessed_host(step.num_requests, self.host.num_rows))
        self.observe_drafting(step)
        size = self._filled(step.num_requests, step.num_rows, step.num_drafts)
        about_as_many, kind = self._kind(*size)
        if about_as_many not in self._paces:
            last = self._paces.get(self._last)
            self._paces[about_as_many] = last.successor() if last else Pace()
        self._last = about_as_many
        measured = self._measured(*size, step.context)
        found = math.log(step.seconds / measured)
        doublings = self._doublings(*size[:2])
        # else whether drafts that were asked for came is the drafter's doing
        is_alternative = self.is_padded or step.is_plain
        unknown = UNKNOWN_KIND
        if kind == ASKED and not self.is_padded:  # there the kind is the number of drafts
            unknown = self._unknown_of_asked(step.num_requests, step.num_drafts, measured)
        self._paces[about_as_many].observe(
            kind, found, doublings, is_alternative=is_alternative, unknown=unknown
        )

    def _unknown_of_asked(self, num_requests: int, num_drafts: int, seconds: float) -> float:
        """Standard deviation of the correction for steps that verify nothing and make drafts, which take `seconds` by
        the profile: as plain ones but for the drafter's part. Example: a lookup that takes 5 % of the step. With a
        deviation of 0.2 it seemed free on one day and to take 17 % on the next."""
        of_drafter = self.draft.at(num_requests, num_drafts) / seconds
        return min(UNKNOWN_KIND, UNKNOWN_HOST + UNKNOWN_DRAFTER * of_drafter)

    def num_observed(self, num_requests: int) -> int:
        """Number of steps with drafts, of about so many requests, that have corrected the costs."""
        about_as_many, _ = self._kind(*self._filled(num_requests, num_requests, 0))
        pace = self._paces.get(about_as_many)
        return 0 if pace is None else pace.num_drafting

    def are_well_known(self, num_requests: int) -> bool:
        """Whether enough steps with drafts, of about so many requests, have corrected the costs."""
        return self.num_observed(num_requests) >= WELL_KNOWN

    def observe_drafting(self, step: StepOutcome) -> None:
        """Note what the drafter took in a step that was run."""
        if step.num_asked and step.draft_seconds:
            # where only some have shadow drafts, most of the time is what all rows take
            num_asked = step.num_requests if step.is_shadow else step.num_asked
            self.draft.observe(num_asked, step.draft_seconds)

    def observe_alike(self, steps: Sequence[StepOutcome]) -> None:
        """Correct the costs by steps without drafts that were reported together: they differ but by disturbances. A few
        are all taken; of more, those of as many requests, one in `ALIKE_TOGETHER`, the median."""
        size = ALIKE_TOGETHER if len(steps) > ALIKE_TOGETHER else 1
        for _, alike in itertools.groupby(steps, key=attrgetter("num_requests")):
            each = list(alike)
            for start in range(0, len(each), size):
                self.observe(median_step(each[start : start + size]))

    def observe_prompt(self, num_rows: int, draft_seconds: float) -> None:
        """Note that the drafter took `draft_seconds` for `num_rows` rows, most of them of prompts."""
        found, known = draft_seconds / num_rows, self.prompt_row_seconds
        if known:
            found = min(found, MOST_SLOWER * known)
        self.prompt_row_seconds = known + (PROMPT_RATE if known else 1.0) * (found - known)

    def doubt_prompts(self) -> None:
        """Believe a little less in what prompts take, since one was not shown for that."""
        self.prompt_row_seconds *= PROMPT_BELIEVED

    def _kind(self, num_requests: int, num_rows: int, num_drafts: int) -> tuple[int, int]:
        """(steps that share a `Pace`, kind within it; kind 0: steps without drafts). With padding to buckets each
        captured size has its own; else requests are grouped as 1, 2 to 3, 4 to 7, ..., and there are two kinds more:
        with drafts to verify, and with drafts that were only asked for (a drafter on the host often has none, which
        takes hardly any time)."""
        if self.is_padded:
            return num_requests, num_drafts
        return num_requests.bit_length(), VERIFYING if num_rows > num_requests else ASKED if num_drafts else 0

    def _pace_of(self, num_requests: int, num_rows: int, num_drafts: int) -> tuple[Pace, int]:
        """How much longer such steps now take than in the profile, and their kind in it."""
        about_as_many, kind = self._kind(num_requests, num_rows, num_drafts)
        return self._paces.get(about_as_many) or self._paces.get(self._last) or UNKNOWN, kind

    def _doublings(self, num_requests: int, num_rows: int) -> float:
        """See `Pace`; 0 where steps are padded, since each size has its own correction."""
        return 0.0 if self.is_padded or num_rows == num_requests else math.log2(num_rows / num_requests)

    def _filled(self, num_requests: int, num_rows: int, num_drafts: int) -> tuple[int, int, int]:
        """The size that a step is padded to: (requests, rows, drafts)."""
        if not self.buckets:
            return num_requests, num_rows, num_drafts
        most = max(num_drafts, -(-num_rows // num_requests) - 1)
        num_drafts = next((k for k in self.levels if k >= most), most)
        num_requests = next((b for b in self.buckets if b >= num_requests), num_requests)
        return num_requests, num_requests * (1 + num_drafts), num_drafts

    def _measured(self, num_requests: int, num_rows: int, num_drafts: int, context: int) -> float:
        """Seconds of a step of this padded size by the profile."""
        keys = self.context.look_up(context)
        keys += self.context_rows.look_up(context) * (num_rows / num_requests - 1.0)
        is_plain = not num_drafts and num_rows == num_requests
        host = self._host(num_requests, is_plain=is_plain)(num_rows)
        return host + keys + self._passes(num_requests, num_rows, num_drafts)

    def _host(self, num_requests: int, *, is_plain: bool) -> Callable[[float], float]:
        """Seconds outside both passes by rows, of steps without drafts or of those with some; until one of its kind was
        seen, by what the other kind took. Those without take no longer than others of as many rows: there is less to
        do, and while all make drafts nothing corrects what the first ones took, which found nothing in the caches.
        Example: 0.22 ms, and 0.17 for a lookup's, so that asking it seemed free."""
        own, other = (self.plain_host, self.host) if is_plain else (self.host, self.plain_host)
        if own.is_known and is_plain and other.is_known:
            return lambda num_rows: min(own.at(num_rows), other.at(num_rows))
        if own.is_known or not other.is_known:
            return own.at
        if is_plain:
            return lambda num_rows: other.seconds / self._host_growth(num_requests, other.num_rows)
        return partial(self._guessed_host, num_requests)

    def _guessed_host(self, num_requests: int, num_rows: float) -> float:
        """Seconds of a step with drafts outside both passes, by what plain ones took."""
        return self.plain_host.at(num_requests) * self._host_growth(num_requests, num_rows)

    def _host_growth(self, num_requests: int, num_rows: float) -> float:
        """How many times as long as plain steps of so many requests the host is guessed to take with so many rows,
        which are too many for these if they are of earlier steps of more."""
        most_drafts = self.levels[-1]
        return 1.0 + HOST_PER_ROW * min(most_drafts, max(0.0, num_rows / num_requests - 1.0))

    def _passes(self, num_requests: int, num_rows: int, num_drafts: float) -> float:
        """Seconds of both passes with empty context."""
        if not self.is_padded:
            num_rows = rounded_rows(num_requests, num_rows, self.levels[-1])
        target = self.target.at(num_rows) if self.target.points else GUESSED_TARGET
        return target + self.draft.at(num_requests, num_drafts)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": _written(self.target),
            "draft": {str(r): _written(curve) for r, curve in self.draft.by_requests.items()},
            "context": _written(self.context),
            "context_rows": _written(self.context_rows),
            "prompt_row_seconds": self.prompt_row_seconds,
            "spread": self.spread,
        }

    def read_json(self, raw: Any) -> None:
        """Restore what `as_json` wrote. KeyError, TypeError, ValueError or AttributeError for anything else."""
        target, context, context_rows = (_read(raw[name]) for name in ("target", "context", "context_rows"))
        spread = float(raw["spread"])
        # recordings for rehearsals may lack it
        prompt_row_seconds = float(raw.get("prompt_row_seconds", 0.0))
        draft = {int(r): _read(curve) for r, curve in raw["draft"].items()}
        behind = [prompt_row_seconds, *context.points.values(), *context_rows.points.values()]
        drafts = [seconds for curve in draft.values() for seconds in curve.points.values()]
        if not all(map(math.isfinite, [spread, *behind, *target.points.values(), *drafts])):
            raise ValueError("not a profile: numbers that are none")
        if not target.points or min(target.points.values()) <= 0 or min(behind) < 0 or spread < 1:
            raise ValueError("not a profile")
        self.target, self.draft = target, DraftCosts(draft)
        self.context, self.context_rows = context, context_rows
        self.prompt_row_seconds, self.spread = prompt_row_seconds, spread


def median_step(steps: Sequence[StepOutcome]) -> StepOutcome:
    """The step of median time, of an even number the faster of both."""
    return sorted(steps, key=attrgetter("seconds"))[(len(steps) - 1) // 2]


def _written(curve: Curve) -> dict[str, float]:
    return {str(size): seconds for size, seconds in curve.points.items()}


def _read(points: Any) -> Curve:
    return Curve({int(size): float(seconds) for size, seconds in points.items()})
