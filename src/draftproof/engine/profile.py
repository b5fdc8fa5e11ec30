"""The short profile at an engine's start: times of decode-only steps by size, by the device's clock, cached on disk.

R requests, k drafts each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftproof.engine.costs import (
    ROW_SIZES,
    Curve,
    DraftCosts,
    StepCosts,
    levels_of,
    rounded_rows,
)
from draftproof.engine.interface import StepSize
from draftproof.runtime.graphs import OFTEN
from draftproof.runtime.store import Store

SECONDS = 2.0  # time limit of a profile; the indispensable sizes are run once even beyond it
SECONDS_AGAIN = 0.5  # time limit of measuring some sizes again; the last round ends beyond it
ROUNDS, IN_A_ROW = 4, 4  # rounds over all sizes; runs of a size in a row, as in serving
# Fewer in a row of several numbers of requests that are measured again: these take long, and more turns tell more.
IN_A_ROW_BETWEEN = 2
# Runs before those, which bring into the caches what such steps read. The keys: of 4 requests with 200 tokens each the
# first four steps took 2.0 ms, all later ones 1.75. The target's weights, where other steps' drafter took their place:
# plain steps of one request after some with drafts took 1.8, 1.7, 1.6, 1.5 ms, later ones 1.45.
SETTLING = 4
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
MOST_REQUESTS = 64
# Where steps are not captured: rows up to which each size is measured, and recorded at the start, and rows of the
# largest size that is measured.
EACH_ROWS, MOST_ROWS = 128, 320
# in measurements with context: tokens of each request, and least tokens of all requests
EACH_CONTEXT, LEAST_CONTEXT = 256, 1024
# Numbers of requests that are also measured with context. One request alone, too, for what little context adds there:
# 1,024 tokens of four took 0.22 ms more, which is 0.066 ms for 300 of one, but 0.035 is right (0.28 ms a step).
CONTEXT_REQUESTS = (4, 16, 64)
# Rows of a prompt that is shown to the drafter, and how often, even beyond the time limit: without it a new engine
# would take showing prompts to be free.
PROMPT_ROWS, PROMPT_RUNS = 64, 2
# Larger passes of the most requests are measured, too, if they should take no more than so many seconds: they are what
# long drafts of many requests take. Extrapolated from 192 rows, 1,088 took 57 ms instead of 74. And how often each.
LARGEST_SECONDS, LARGEST_RUNS = 0.1, 3
# With a larger `StepCosts.spread` other programs have disturbed the profile: on two cores of an EPYC 34 of 229.
# Example: 1.28. One to nine rows of `tiny` took 1.7 times as long as usual and 13 to 17 took 2.2 times, so that the
# engine, and all after it, made at most 8 drafts for one request where 16 are 5 % faster.
MOST_SPREAD = 1.15
VERSION = 24  # counts changes of what is measured: profiles of other versions are not used
LEVELS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64)
CAPTURED_LEVELS = (1, 3, 5, 8, 16, 32, 64)  # fewer, since each is a graph for every number of requests


class Measured(Protocol):
    """Runs steps of given sizes and times them; implemented by `measuring.StepMeter`."""

    on_device: bool
    costs_alike: bool
    buckets: tuple[int, ...]

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def measure(self, size: StepSize) -> tuple[float, float]: ...
    def prompt_seconds(self, num_rows: int) -> float: ...
    def lookup_seconds(self, num_requests: int) -> float: ...
    def prepare_rows(self, num_rows: int) -> bool: ...


def levels_up_to(num_drafts: int, device: str = "cpu") -> tuple[int, ...]:
    """Numbers of drafts that a step may ask for: dense where they are small. Example: up to 7: 0 1 2 3 5 7."""
    levels = CAPTURED_LEVELS if device == "cuda" else LEVELS
    return (0, *(k for k in levels if k < num_drafts), num_drafts)


def costs_of(
    runner: Measured, levels: tuple[int, ...], identity: Mapping[str, Any], cache_dir: Path
) -> StepCosts:
    """The costs of a runner's steps: from disk if these models were measured on this machine, else measured now. A
    profile that other programs disturbed is measured again by each new engine, until one is undisturbed.

    identity: what the costs depend on, as JSON values.
    """
    known = StepCosts(levels, runner.buckets, spread=float("inf"))
    facts = {"version": VERSION, "identity": dict(identity), "levels": levels, "buckets": runner.buckets}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    store = Store(cache_dir / "step-costs.json")
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        known.read_json(store.read()[key])
    if known.spread > MOST_SPREAD:
        found = StepCosts(levels, runner.buckets)
        measure(runner, found)
        if found.spread < known.spread:
            known = found
            store.add({key: known.as_json()})
    _prepare(runner, levels)
    return known


def lookup_costs(
    runner: Measured, costs: StepCosts, clock: Callable[[], float] = time.perf_counter
) -> DraftCosts:
    """What drafts of a chain's lookups take alone, by the number of requests. Each new engine measures it, within
    `SECONDS_AGAIN`, and so records their passes; in service it is corrected. Empty, as before the first step in
    service, for what runs on the host. `costs`: of the target."""
    found, end = DraftCosts(), clock() + SECONDS_AGAIN
    for num_requests in REQUESTS if runner.on_device else ():
        expected = (OFTEN + IN_A_ROW) * costs.target.at(num_requests)  # the target's passes before them
        if num_requests > min(MOST_REQUESTS, runner.max_num_seqs) or clock() + expected > end:
            break
        runs = [runner.lookup_seconds(num_requests) for _ in range(OFTEN + IN_A_ROW)]
        found.observe(num_requests, statistics.median(runs[OFTEN:]))
    return found


def _prepare(
    runner: Measured, levels: tuple[int, ...], clock: Callable[[], float] = time.perf_counter
) -> None:
    """Record programs before serving, within `SECONDS`, so that no request's first tokens wait for it: the target's
    pass for each number of rows up to `EACH_ROWS` that steps are padded to, and all steps of one request. Where steps
    are captured this does nothing."""
    end, most = clock() + SECONDS, levels[-1]
    for num_rows in ROW_SIZES:
        is_met = num_rows <= min(EACH_ROWS, runner.max_num_seqs * (1 + most))
        if runner.buckets or clock() > end or not is_met or not runner.prepare_rows(num_rows):
            break
    for num_verified in sorted({rounded_rows(1, 1 + k, most) - 1 for k in range(most + 1)}):
        for num_drafts in levels if runner.on_device else levels[-1:]:
            for _ in range(OFTEN):
                if runner.buckets or clock() > end:
                    return
                runner.measure(StepSize(1, num_verified, num_drafts))


def measure(runner: Measured, costs: StepCosts, clock: Callable[[], float] = time.perf_counter) -> None:
    """Measure the steps of `runner` and fill in `costs`. Sizes take turns, so that a slow phase of the machine slows
    all of them. The lower quartile of a size's runs counts, and times are made to grow with size.

    Time is often up after one round, in which a slow phase may have slowed only some of the sizes that are compared.
    So those of the fewest requests, which came first, before clock and caches had settled, take turns again at the
    end, and so do those of the most, from which times of larger ones are extrapolated. Example: 192 rows seemed to
    take 16 ms and 64 rows 3.7, and steps with 16 drafts for each of 64 requests were not tried; they take 11. And so
    do the first of all others. Examples: in twelve profiles one draft for each of four requests of a small model took
    1.3 to 2.1 plain steps. And 64 rows seemed to take 18.9 ms where 128 took 20.8 and 16 took 3.9, so that a new engine
    made drafts for 64 requests, at 0.88 of plain decoding; they take 11.8.
    """
    found: dict[StepSize, list[tuple[float, float]]] = {}
    sizes, end = list(_sizes(runner, costs.levels)), clock() + SECONDS
    indispensable = _indispensable(sizes, captured=bool(runner.buckets))
    for number in range(ROUNDS):
        for size in sizes:
            if clock() > end and (number or size not in indispensable):
                continue
            prepared = 0 if number else OFTEN  # the first runs of a size prepare it
            prepared += _num_settling(size)
            # a single run says nothing of its spread
            num_runs = max(_num_settling(size) + IN_A_ROW, prepared + 2)
            runs = [runner.measure(size) for _ in range(num_runs)]
            found.setdefault(size, []).extend(runs[prepared:])
    for alike, in_a_row in _compared(found, costs.levels[1:2], captured=bool(runner.buckets)):
        _take_turns(runner, alike, found, in_a_row, clock)
    if not runner.buckets:
        _measure_larger(runner, found, costs.levels)
    num_rows = min(PROMPT_ROWS, runner.max_model_len // 2)
    shown = [runner.prompt_seconds(num_rows) for _ in range(PROMPT_RUNS)]
    costs.prompt_row_seconds = min(shown) / num_rows
    _take({size: _usual(runs) for size, runs in found.items()}, runner, costs)
    costs.spread = statistics.median(map(_spread, found.values()))


def _take_turns(
    runner: Measured,
    alike: Sequence[StepSize],
    found: dict[StepSize, list[tuple[float, float]]],
    in_a_row: int,
    clock: Callable[[], float],
) -> None:
    """Measure these sizes again, in turns: all of them or none, so that none has an advantage."""
    end = clock() + SECONDS_AGAIN
    for _ in range(ROUNDS * IN_A_ROW // in_a_row):
        if clock() > end:
            return
        had_drafts = True
        for size in alike:
            is_settled = not (size.context or had_drafts)
            num_settling = 0 if is_settled else _num_settling(size)
            runs = [runner.measure(size) for _ in range(num_settling + in_a_row)]
            found[size] += runs[-in_a_row:]
            had_drafts = size.num_drafts > 0


def _compared(
    found: Mapping[StepSize, Sequence[tuple[float, float]]], fewest_drafts: Sequence[int], *, captured: bool
) -> Iterator[tuple[list[StepSize], int]]:
    """Sizes to be measured again, those together that are compared, and how often in a row: all of the fewest requests;
    and unless they take long those of other numbers without drafts and with the fewest, which decide whether drafts
    pay, where steps are not captured, and all of the most; or of these, too, just those that decide."""

    def is_short(sizes: Sequence[StepSize], in_a_row: int) -> bool:
        runs = {size: _num_settling(size) + in_a_row for size in sizes}
        return sum(sum(_usual(found[size])) * number for size, number in runs.items()) <= SECONDS_AGAIN

    numbers = sorted({size.num_requests for size in found})
    fewest, most = numbers[0], numbers[-1]
    yield [size for size in found if size.num_requests == fewest], IN_A_ROW
    deciding = [size for size in found if size.num_drafts in (0, *fewest_drafts)]
    between = [size for size in deciding if fewest < size.num_requests < most]
    if not captured and is_short(between, IN_A_ROW_BETWEEN):
        yield sorted(between, key=lambda size: size.num_drafts), IN_A_ROW_BETWEEN
    if fewest == most:
        return
    for alike, in_a_row in ((found, IN_A_ROW), (deciding, IN_A_ROW_BETWEEN)):
        of_most = [size for size in alike if size.num_requests == most]
        if is_short(of_most, in_a_row):
            yield of_most, in_a_row
            return


def _measure_larger(
    runner: Measured, found: dict[StepSize, list[tuple[float, float]]], levels: tuple[int, ...]
) -> None:
    """Measure larger sizes, in turns with the largest that was measured before: if that now takes longer, so do they,
    and that is not theirs. Example: 1,088 rows seemed to take 82 ms where 272 took 14.7, and take 70 in such seconds,
    so that 5 drafts for each of 64 requests seemed as good as 16, which are 10 % faster."""
    before = _largest(found)
    runs: dict[StepSize, list[tuple[float, float]]] = {before: []}
    runs |= {size: [] for size in _larger(found, levels)}
    for _ in range(LARGEST_RUNS if len(runs) > 1 else 0):
        for size, own in runs.items():
            own.append(runner.measure(size))
    again = runs.pop(before)
    for size, own in runs.items():
        slower = sum(_usual(again)) / sum(_usual(found[before]))
        found[size] = [(target / slower, draft / slower) for target, draft in own]


def _largest(found: Mapping[StepSize, Sequence[tuple[float, float]]]) -> StepSize:
    """The size with the most rows of those that were measured."""
    return max((size for size in found if not size.context), key=_num_rows)


def _larger(
    found: Mapping[StepSize, Sequence[tuple[float, float]]], levels: tuple[int, ...]
) -> list[StepSize]:
    """Sizes of the most requests with more rows than any that was measured: with the most drafts, and with about half
    as many. None if they would take long."""
    largest = _largest(found)
    num_requests = max(size.num_requests for size in found)
    most = num_requests * (1 + levels[-1])
    seconds = sum(_usual(found[largest])) * most / _num_rows(largest)
    if seconds > LARGEST_SECONDS:
        return []
    half = min(levels[1:], key=lambda k: abs(num_requests * (1 + k) - most / 2))
    sizes = [StepSize(num_requests, k, k) for k in sorted({half, levels[-1]})]
    return [size for size in sizes if _num_rows(size) > _num_rows(largest)]


def _num_rows(size: StepSize) -> int:
    return size.num_requests * (1 + size.num_verified)


def _num_settling(size: StepSize) -> int:
    """Number of a size's runs that do not count, each time before some that do."""
    return SETTLING if size.context or not size.num_drafts else 0


def _usual(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Both passes' times: of each the lower quartile. What disturbs only slows, and small steps the most. Example: 13
    rows for one of `tiny` in ten profiles: 4.7 times as long by medians, with a standard deviation of 9 %; 5.0 with
    6 % by lower quartiles."""
    quartile = len(runs) // 4
    targets, drafts = zip(*runs, strict=True)
    return sorted(targets)[quartile], sorted(drafts)[quartile]


def _spread(runs: Sequence[tuple[float, float]]) -> float:
    """Median over minimum of a size's runs."""
    both = [target + draft for target, draft in runs]
    return statistics.median(both) / min(both)


def _take(found: Mapping[StepSize, tuple[float, float]], runner: Measured, costs: StepCosts) -> None:
    """Fill in `costs`. Of a lookup only the fewest drafts count, which take it as long as more: it seldom fills a pass,
    and what follows one that is too large to be recorded takes longer. Example: 0.14 ms after 68 rows,
    while these were not recorded, else 0.03."""
    alone = {size: times for size, times in found.items() if not size.context}
    plain = {s.num_requests: target for s, (target, _) in alone.items() if not s.num_drafts}
    verifies = {s.num_requests * (1 + s.num_drafts): t for s, (t, _) in alone.items() if s.num_drafts}
    costs.target = Curve(_growing(plain if costs.is_padded else {**verifies, **plain}))
    for (num_requests, _, num_drafts, _), (target, draft) in alone.items():
        is_alike = runner.costs_alike and not costs.is_padded
        if num_drafts and runner.on_device and not (is_alike and num_requests in costs.draft.by_requests):
            if costs.is_padded:
                # one graph: its time beyond a plain pass of as many rows is attributed to the draft pass
                draft = target - costs.target.at(num_requests * (1 + num_drafts))
            costs.draft.set(num_requests, costs.levels[-1] if is_alike else num_drafts, draft)
    _take_context(found, costs)


def _take_context(found: Mapping[StepSize, tuple[float, float]], costs: StepCosts) -> None:
    """Fill in what context adds to a step's time."""
    plain, verifying = dict[int, float](), dict[StepSize, float]()
    for size, times in found.items():
        without = found.get(size._replace(context=0))
        if not size.context or without is None:
            continue
        longer = max(0.0, sum(times) - sum(without))
        if size.num_verified:
            verifying[size] = longer
        else:
            plain[size.num_requests * size.context] = longer
    costs.context = Curve({0: 0.0, **_growing(plain)})
    # Never less than with fewer tokens. Not lowered to what many take, as times are else: of few requests the mean of
    # many drafts is known, and of many requests that of one draft, as the difference of four times.
    rows, least = {0: 0.0}, 0.0
    for size in sorted(verifying, key=lambda size: size.num_requests * size.context):
        num_tokens = size.num_requests * size.context
        further = (verifying[size] - costs.context.at(num_tokens)) / size.num_verified
        least = rows[num_tokens] = max(least, further)
    costs.context_rows = Curve(rows)


def _growing(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds by size, each lowered to the least of any larger size, so that they never fall with size."""
    least, found = float("inf"), dict[int, float]()
    for size in sorted(seconds, reverse=True):
        least = found[size] = min(least, seconds[size])
    return found


def _sizes(runner: Measured, levels: tuple[int, ...]) -> Iterator[StepSize]:
    """The sizes to measure, the most important first."""
    numbers = [r for r in runner.buckets or REQUESTS if r <= min(MOST_REQUESTS, runner.max_num_seqs)]
    with_context = _with_context(numbers)
    for num_requests in numbers:
        numbers_of_drafts = _levels_of(num_requests, levels, captured=bool(runner.buckets))
        if num_requests == numbers[0]:
            numbers_of_drafts = levels
        yield from (StepSize(num_requests, k, k) for k in numbers_of_drafts)
        if num_requests == 1 and with_context[0] > 1:
            yield StepSize(1, 0, 0, min(EACH_CONTEXT, runner.max_model_len // 2))
        if num_requests in with_context:
            context = min(max(EACH_CONTEXT, LEAST_CONTEXT // num_requests), runner.max_model_len // 2)
            yield StepSize(num_requests, 0, 0, context)
            # with drafts, which read keys, too: the most for the fewest requests, and one for the most
            if num_requests == with_context[0]:
                most = numbers_of_drafts[-1]
                yield StepSize(num_requests, most, most, context)
            elif num_requests == with_context[-1]:
                fewest = levels[1]
                yield StepSize(num_requests, fewest, fewest, context)


def _with_context(numbers: Sequence[int]) -> list[int]:
    """Numbers of requests that are also measured with context."""
    return [r for r in numbers if r in CONTEXT_REQUESTS] or [numbers[-1]]


def _levels_of(num_requests: int, levels: tuple[int, ...], *, captured: bool) -> tuple[int, ...]:
    """Numbers of drafts to measure for `num_requests`: all that are captured, and else those whose pass has at most
    `EACH_ROWS`, at least the first three, and the largest unless its pass exceeds `MOST_ROWS`."""
    if captured:
        return levels_of(num_requests, levels)

    def is_measured(place: int) -> bool:
        num_rows = num_requests * (1 + levels[place])
        is_last = place == len(levels) - 1
        return place < 3 or num_rows <= EACH_ROWS or (is_last and num_rows <= MOST_ROWS)

    return tuple(k for place, k in enumerate(levels) if is_measured(place))


def _indispensable(sizes: Sequence[StepSize], *, captured: bool) -> list[StepSize]:
    """The sizes with the fewest requests, and those that show the cost of context. Of the most requests, those that
    show whether drafts pay: with context, alone, and with the fewest drafts, or where steps are captured, and short,
    with any number of them. Extrapolated from few requests they were off by 40 %."""
    with_context = [size for size in sizes if size.context]  # none where a request has no room for any
    numbers = sorted({size.num_requests for size in with_context})
    last = numbers[-1] if numbers else sizes[-1].num_requests
    compared = [size for size in with_context if size.num_requests in (*numbers[:2], last)]
    drafted = [size for size in sizes if size.num_requests == last and size.num_verified]
    needed = {*compared, *(size._replace(context=0) for size in compared)}
    needed.update(drafted if captured else drafted[:1])
    return [size for size in sizes if size.num_requests == sizes[0].num_requests or size in needed]
