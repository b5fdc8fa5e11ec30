"""Compares adaptive speculation with plain decoding, every fixed number of drafts and the rules of other engines.

    PYTHONPATH=src:. python bench/adaptive.py --model MODEL --drafter '{"model": "HEAD"}' --batches 1,4,16
    PYTHONPATH=src:. python bench/adaptive.py --model MODEL --drafter '{"model": "HEAD"}' --rates 0 --batches 1,4
    PYTHONPATH=src:. python bench/adaptive.py --model MODEL --drafter '{"method": "ngram"}' --changing --batches 1
    PYTHONPATH=src:. python bench/adaptive.py --shape 8b --rates 0.3,0.6,0.8,0.9 --batches 1,4,16,64 --waves 1
    PYTHONPATH=src:. python bench/adaptive.py --matrix cpu --jobs 1   # all cells shown for a CPU

All of them take turns, in a random order. A turn has batch size times --waves requests: with one wave the slowest
request of each turn ends alone, with several its slot is reused, as in a server. Some turns before are not counted:
new shapes are recorded. Ways that learn have as many of them as hold `LEARNED_FROM` requests: `auto` is an engine in
service. `new` is adaptive with all estimates reset before each turn, as in a new engine. The best fixed number is
chosen on the even turns and compared on the odd ones. A cell fails if the upper end of the 90 % interval of a ratio
lies below its bound: 0.95 of the best fixed number, 0.97 of plain decoding, or if its prediction is off by 10 %. Exit
status 1 if a cell fails or an output differs.

Predictions are for steps in which all requests decode: of what the number of drafts gains that is the best one after
every prompt was decoded with the maximum of drafts. Their costs are those that `auto` has learned in service; their
acceptance is measured with that number, over the same turns. After the cell's turns they are compared with all steps of
that kind, not just those that a policy would be told, with so many drafts and with none, in turns, which take seconds
even if the cell has few. The first steps after a prompt, which slows a CPU for some, take what others of their size do:
it is left out as the prompt itself is. Where there are no others, what it adds to plain steps is taken off. `auto` goes
on beside them for as long, and what it believes after each turn counts alike: a machine's speed changes, for one kind
of step more than for others, and a prediction is for the machine that it was learned on. If no drafts are predicted to
pay, the fewest are measured: they are not to gain more than 10 % either.

A fixed number that is far slower than the best in the first turns is left out of the later ones. With one wave one pair
of engines serves all batches. At the end a table of all cells is printed.

--seconds: turns of a cell run until that much time is spent, at least four and at most --num-turns.
--rates: the drafter runs for its time, but the proposals are the target's own tokens, right at these rates.
--changing: a third of the turns are the prompts, a third noise (random prompts, sampled outputs), the last third the
prompts again. Here every fixed number must be beaten, over all turns: those from 1 on, which the setting allows. Plain
decoding has its own bound.
--predictions: nothing but these, of all cells in half of the time. A cell fails if its one is off by 10 %.
--matrix: about one comparison in twenty would fail by chance where both are as fast as the bound says, and there are
hundreds. So a cell that fails is measured again with four times the turns, and a prediction that is off for four times
as long; what that shows counts, for or against.
--json: the rows, with the seconds of each turn, and with the steps that were reported beside a prediction, by size:
what they took, and what `auto` believes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bench import matrix
from bench.models import Shape
from bench.rules import AverageAcceptance, table_up_to
from draftproof import LLM, SamplingParams, assets
from draftproof.bench import internals, workload
from draftproof.cli.prompts import read_file
from draftproof.drafters import recordings
from draftproof.drafters.replay import ReplayDrafter
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.chain_policy import ChainPolicy
from draftproof.engine.costs import StepCosts, StepOutcome
from draftproof.engine.policy import FixedPolicy, Parts, Policy
from draftproof.engine.progress import Progress
from draftproof.metrics import Prediction

PLAIN_BOUND, FIXED_BOUND, RULES_BOUND = 0.97, 0.95, 1.0
RESAMPLES = 2000
# share of the best way's speed in the first turns: a fixed number below it is not tried again
HOPELESS = 0.75
FEWEST_TURNS = 4
LEARNED_FROM = 16  # requests that an engine in service has seen
# Texts, and batches of them: the same drafts are right each time. In two texts one rule was 2 % faster than each fixed
# number, by chance, and in two batches whose last request happened to be slow with three drafts one was 2 % faster.
FEWEST_REPLAYED, BATCHES_REPLAYED = 32, 12
MOST_ASKED = 128  # texts from which acceptance is measured
NOISE_TEMPERATURE = 1.0  # greedy outputs of a small model repeat themselves whatever the prompt
Ids = list[list[int]]


class Told(FixedPolicy):
    """Always K drafts for each request, and every step is reported. `of_lookups`: of a chain's lookups alone."""

    report_every = plain_every = 1

    def __init__(self, num_drafts: int, *, of_lookups: bool = False) -> None:
        super().__init__(num_drafts)
        self._of_lookups = of_lookups

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        chosen = super().choose(asked, num_others, num_joining)
        self.parts = Parts(chosen, [0] * len(asked)) if self._of_lookups else None
        return chosen


@dataclass
class Watched:
    """A policy, and the decoding steps reported to it, for predictions."""

    policy: Policy
    steps: list[StepOutcome]

    def __getattr__(self, name: str) -> Any:
        """What the policy has: its methods once only, since watching is to take no time."""
        found = getattr(self.policy, name)
        if callable(found):
            setattr(self, name, found)
        return found

    def finished(self, step: StepOutcome) -> None:
        self.steps.append(step)
        self.policy.finished(step)


@dataclass
class Way:
    """One way of choosing the number of drafts, with seconds and tokens of each turn."""

    name: str
    llm: LLM
    policy: Callable[[], Policy] | None = None  # called before each turn; None: the engine's own policy stays
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[StepOutcome] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # where each turn begins in `steps`
    # Whether `steps` are noted. Not in turns: it takes 1 % of a step of `tiny`, which plain decoding would not pay.
    is_watched: bool = False

    def run(self, prompts: Ids, params: list[SamplingParams]) -> None:
        if self.policy is not None:
            policy = self.policy()
            self.llm.core.policy = Watched(policy, self.steps) if self.is_watched else policy
        self.starts.append(len(self.steps))
        start = time.perf_counter()
        found = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        self.seconds.append(time.perf_counter() - start)
        ids = [tuple(choice.token_ids) for output in found for choice in output.outputs]
        self.tokens.append(sum(map(len, ids)))
        self.outputs += ids

    def forget(self) -> None:
        for kept in (self.seconds, self.tokens, self.outputs, self.steps, self.starts):
            kept.clear()

    def decoding_speed(self, batch: int, slowed: Sequence[float] = ()) -> float:
        """Tokens per second of steps in which `batch` requests decode. Each takes the mean of its size without the
        fastest and slowest tenth: a single disturbance is no matter of prediction, slow seconds are. Nor is what a
        prompt does to the steps after it: if others of that size are typical, these count for the time, and else what
        a prompt adds to plain steps at their places, `slowed`, is taken off. (Places stand for times: in that of two
        plain steps there may be one.)"""
        by_size: dict[tuple[int, int], list[tuple[StepOutcome, int]]] = {}
        for step, place in zip(self.steps, self._places(), strict=True):
            if step.num_requests == batch:
                by_size.setdefault((step.num_rows, step.num_drafts), []).append((step, place))
        num_tokens, seconds = 0, 0.0
        for alike in by_size.values():
            times = [step.seconds for step, _ in alike if step.is_typical]
            if not times:
                times = [
                    step.seconds - (slowed[place] if place < len(slowed) else 0.0) for step, place in alike
                ]
            num_tokens += sum(step.num_tokens for step, _ in alike)
            seconds += len(alike) * _middle_mean(times)
        return num_tokens / seconds

    def slowed(self, batch: int) -> list[float]:
        """Seconds that plain steps of `batch` requests take longer in the first, second, ... place after a prompt than
        where they are typical: the median; empty if no such step is typical."""
        typical: list[float] = []
        by_place: dict[int, list[float]] = {}
        for step, place in zip(self.steps, self._places(), strict=True):
            if step.num_requests == batch and step.is_plain:
                (typical if step.is_typical else by_place.setdefault(place, [])).append(step.seconds)
        if not typical:
            return []
        usual = statistics.median(typical)
        longer = [
            statistics.median(by_place.get(place, [usual])) for place in range(1 + max(by_place, default=-1))
        ]
        return [max(0.0, seconds - usual) for seconds in longer]

    def _places(self) -> list[int]:
        """For each step how many of its turn came before it that are not typical either, in a row: its place after the
        last prompt."""
        places, place, starts = list[int](), 0, set(self.starts)
        for number, step in enumerate(self.steps):
            place = 0 if number in starts else place
            places.append(place)
            place = 0 if step.is_typical else place + 1
        return places

    def speed(self, turns: Sequence[int]) -> float:
        return sum(self.tokens[i] for i in turns) / sum(self.seconds[i] for i in turns)


class Speedup(NamedTuple):
    """What drafts gain where all requests decode. `context`: mean tokens of all requests; `same`: outputs are equal;
    `believed`: the costs that `auto` had learned after each turn; `steps`: see `by_size`, by the names of ways."""

    speedup: float
    context: int
    same: bool
    believed: list[StepCosts]
    steps: dict[str, list[dict[str, float]]]

    def predicted(self, acceptance: Acceptance, num_drafts: int, batch: int, num_tokens: int) -> float:
        """What so many drafts should gain by these costs, all turns together. Example: 2 ms a token without drafts and
        1 ms with them after one turn, 4 and 4 ms after the next: 6 / 5 = 1.2."""
        plain = drafted = 0.0
        for costs in self.believed:
            only = dataclasses.replace(costs, levels=(0, num_drafts))
            found = AutoPolicy(only, acceptance).predict(batch, self.context, num_tokens)
            seconds = costs.plain(batch, self.context)
            plain += seconds
            drafted += seconds / found.speedup
        return plain / drafted


def by_size(steps: Sequence[StepOutcome], costs: StepCosts) -> list[dict[str, float]]:
    """For each number of requests and of drafts that were wanted next: the number of steps, rows of each, milliseconds
    of each, and those that `costs` say. Tells where a prediction is off, and what `auto` did."""
    alike: dict[tuple[int, int], list[StepOutcome]] = {}
    for step in steps:
        alike.setdefault((step.num_requests, step.num_drafts), []).append(step)
    found = []
    for (num_requests, num_drafts), its in sorted(alike.items(), reverse=True):
        believed = [costs.step(num_requests, step.num_rows, num_drafts, step.context) for step in its]
        found.append(
            {
                "requests": num_requests,
                "drafts": num_drafts,
                "steps": len(its),
                "rows": round(statistics.mean(step.num_rows for step in its), 1),
                "ms": round(1e3 * statistics.mean(step.seconds for step in its), 3),
                "believed_ms": round(1e3 * statistics.mean(believed), 3),
            }
        )
    return found


def _middle_mean(times: Sequence[float]) -> float:
    """Mean of all but the fastest and the slowest tenth, one of each at least if there are three or more."""
    num_left_out = max(1, len(times) // 10) if len(times) > 2 else 0
    return statistics.mean(sorted(times)[num_left_out : len(times) - num_left_out])


def ratio(ours: Way, theirs: Way, turns: Sequence[int]) -> tuple[float, float, float]:
    """Speed of `ours` divided by that of `theirs` in these turns, with its 90 % interval by resampling turns."""
    generator, found = random.Random(0), []
    for _ in range(RESAMPLES):
        some = generator.choices(turns, k=len(turns))
        found.append(ours.speed(some) / theirs.speed(some))
    found.sort()
    return ours.speed(turns) / theirs.speed(turns), found[RESAMPLES // 20], found[-RESAMPLES // 20]


def _leave_out(ways: list[Way], fixed: Sequence[Way], least: float) -> None:
    """Remove fixed numbers that reach less than the share `least` of the best way's speed."""
    best = max(way.speed(range(len(way.seconds))) for way in ways)
    ways[:] = [way for way in ways if way not in fixed or way.speed(range(len(way.seconds))) >= least * best]


@dataclass
class Bench:
    """One pair of engines; a turn has `waves` times the batch size of requests."""

    plain: LLM
    drafting: LLM
    batches: tuple[int, ...]
    waves: int
    num_tokens: int
    num_turns: int
    seconds: float  # approximate time limit of a cell
    measured_seconds: float  # least time for what a prediction is compared with
    temperature: float
    new: Policy  # a copy of the drafting engine's, as it was at the start
    rows: list[dict[str, Any]] = field(default_factory=list)
    learned: list[Tensor] | None = None  # by `auto`'s drafter, while `new` runs

    def cell(
        self, name: str, batch: int, prompts: Ids, asked: internals.Asking, noise: Ids | None = None
    ) -> dict[str, Any]:
        """Measure all ways over the prompts, with fresh policies; for a changing workload also over `noise`.
        `asked`: knows the acceptance for these prompts."""
        engine = self.drafting.core
        auto = self._unlearned()
        levels = auto.levels
        most = levels[-1]
        fixed = [Way(f"K={k}", self.drafting, partial(FixedPolicy, k)) for k in levels[1:]]
        table = table_up_to(most)
        sglang = AverageAcceptance(most)
        ours = Way("auto", self.drafting, lambda: self._continued(auto))
        rules = [Way("vLLM's", self.drafting, lambda: table), Way("SGLang's", self.drafting, lambda: sglang)]
        ways = [
            Way("plain", self.plain),
            *fixed,
            *rules,
            ours,
            Way("new", self.drafting, self._reset),
        ]
        tried = list(ways)
        self._warm_up(ways, (rules[-1], ours), batch, prompts)
        num_turns = self._take_turns(ways, fixed, batch, prompts, noise)
        engine.policy = auto
        ways = [way for way in ways if len(way.seconds) == num_turns]
        best_of = [way for way in fixed if way in ways]
        judged = self._judge(ways, best_of, rules, is_changing=noise is not None)
        same = all(way.outputs == tried[0].outputs[: len(way.outputs)] for way in tried)
        found = self._predicted(auto, batch, prompts, asked, num_turns)
        row = {
            "cell": name,
            "batch": batch,
            "num_turns": num_turns,
            "seconds": {way.name: way.seconds for way in ways},  # one number a turn
            **judged,
            **found,
            "same": same and found["same"],
        }
        self.rows.append(row)
        return row

    def prediction(self, name: str, batch: int, prompts: Ids, asked: internals.Asking) -> dict[str, Any]:
        """Nothing but what drafts are predicted to gain, and gain. `asked`: knows the acceptance for these prompts."""
        auto = self._unlearned()
        way = Way("auto", self.drafting, lambda: auto)
        self._warm_up((way,), (way,), batch, prompts)
        found = self._predicted(auto, batch, prompts, asked, FEWEST_TURNS)
        row = {"cell": name, "batch": batch, **found}
        self.rows.append(row)
        return row

    def _predicted(
        self,
        auto: AutoPolicy | ChainPolicy,
        batch: int,
        prompts: Ids,
        asked: internals.Asking,
        num_turns: int,
    ) -> dict[str, Any]:
        """What decoding alone is predicted to gain with the costs that `auto` learns in so many turns more, at least,
        and what it gains in turns beside these. `asked`: has measured the acceptance with the most drafts."""
        context = int(batch * (statistics.mean(map(len, prompts)) + self.num_tokens / 2))

        def predict(known: AutoPolicy | ChainPolicy) -> Prediction:
            return known.predict(batch, context, self.num_tokens)

        known = internals.knowing(auto, asked)
        found = predict(known)
        num_drafts = found.num_drafts
        of_lookups = isinstance(known, ChainPolicy) and predict(known.lookups) == found
        # if none are predicted to pay, the fewest might
        told = partial(Told, num_drafts or auto.levels[1], of_lookups=of_lookups)
        costs = internals.part_of(auto, of_lookups=of_lookups).costs
        measured = self._speedup(auto, told, costs, num_turns, batch, prompts)
        predicted, gained = 1.0, max(1.0, measured.speedup)
        if num_drafts:
            asker = partial(
                internals.asking_together, num_together=batch, num_asked=num_drafts, of_lookups=of_lookups
            )
            asked = self._asked_in_turns(asker, len(measured.believed), batch, prompts)
            acceptance = internals.part_of(asked, of_lookups=of_lookups).acceptance
            predicted = measured.predicted(acceptance, num_drafts, batch, self.num_tokens)
            gained = measured.speedup
        return {
            "predicted_k": num_drafts,
            "predicted": predicted,
            "measured": gained,
            "same": measured.same,
            "steps": measured.steps,
        }

    def _speedup(
        self,
        auto: Policy,
        told: Callable[[], Policy],
        costs: StepCosts,
        num_turns: int,
        batch: int,
        prompts: Ids,
    ) -> Speedup:
        """How much faster decoding is with these drafts than with none, in turns beside `auto`, whose `costs` are noted
        after each. `auto` runs for as long as the other two together: an engine in service has all of the time, and
        seldom a plain step."""
        overlap = self.drafting.core.runner.async_depth > 0  # then a prompt slows no steps
        drafted = Way("drafted", self.drafting, told, is_watched=True)
        plain = Way("plain", self.drafting, partial(Told, 0), is_watched=True)
        learning = Way("auto", self.drafting, lambda: self._continued(auto), is_watched=True)
        believed: list[StepCosts] = []
        same, order, end = True, random.Random(0), time.perf_counter() + self.measured_seconds
        while len(believed) < num_turns or time.perf_counter() < end:
            given, params = self._turn(len(believed), batch * self.waves, prompts)
            for way in order.sample((drafted, plain), 2):
                way.run(given, params)
            while sum(learning.seconds) < sum(drafted.seconds) + sum(plain.seconds):
                learning.run(given, params)
                same = same and learning.outputs[-len(given) :] == plain.outputs[-len(given) :]
            believed.append(copy.deepcopy(costs))
        return Speedup(
            speedup=drafted.decoding_speed(batch, () if overlap else plain.slowed(batch))
            / plain.decoding_speed(batch),
            context=int(
                statistics.mean(step.context for step in drafted.steps if step.num_requests == batch)
            ),
            same=same and drafted.outputs == plain.outputs,
            believed=believed,
            steps={way.name: by_size(way.steps, costs) for way in (drafted, plain, learning)},
        )

    def _asked_in_turns(
        self, asking: Callable[[LLM], internals.Asking], num_turns: int, batch: int, prompts: Ids
    ) -> internals.Asking:
        """A policy that has measured the acceptance in these turns; `asking`: makes it.

        Where a round ends decides at which tokens drafts are made next. Example: an n-gram of `tiny` has drafts in 32 %
        of the steps if it may make 16, and in 40 % if 3, and those are right more often. Beside a model a lookup has
        more often drafts than alone, since there are fewer steps where it has none. And a lookup's drafts are better
        the later in a text, and better still if another request has the same prompt.
        """
        self.drafting.core.policy = copy.deepcopy(self.new)
        self.drafting.core.policy = asker = asking(self.drafting)
        way = Way("asking", self.drafting)
        for number in range(num_turns):
            way.run(*self._turn(number, batch * self.waves, prompts))
        return asker

    def _unlearned(self) -> AutoPolicy | ChainPolicy:
        """The policy for an engine in service, before it has served; its drafter has learned nothing of its drafts."""
        self.drafting.core.policy = auto = copy.deepcopy(self.new)
        assert isinstance(auto, AutoPolicy | ChainPolicy)
        internals.set_matches(self.drafting, [])
        self.learned = None
        return auto

    def _warm_up(self, ways: Sequence[Way], learning: Sequence[Way], batch: int, prompts: Ids) -> None:
        """Run the turns that an engine in service has had, which are not counted, with those ways that learn, and with
        plain decoding, whose engine records its steps for nobody else. With the others the last of them; or all, if the
        prompts are so few that there are no others: who comes to a prompt first records its steps for those that come
        later, which took up to a fifth of a turn."""
        num, order = batch * self.waves, random.Random(0)
        num_turns = -(-LEARNED_FROM // num)
        for number in range(num_turns):
            given, params = self._turn(number, num, prompts)
            is_for_all = number == num_turns - 1 or len(prompts) <= LEARNED_FROM
            for way in order.sample(ways, len(ways)):
                if is_for_all or way in learning or way.llm is self.plain:
                    way.run(given, params)
        for way in ways:
            way.forget()

    def _take_turns(
        self, ways: list[Way], fixed: Sequence[Way], batch: int, prompts: Ids, noise: Ids | None
    ) -> int:
        """Run the turns; returns the number of turns of all ways except dropped fixed numbers."""
        num, start, order = batch * self.waves, time.perf_counter(), random.Random(0)
        for number in range(self.num_turns):
            is_late = time.perf_counter() - start > self.seconds
            if is_late and number >= FEWEST_TURNS and noise is None:
                return number
            if noise is not None and number * 3 // self.num_turns == 1:
                given, params = self._turn(number, num, noise, temperature=NOISE_TEMPERATURE)
            else:
                given, params = self._turn(number, num, prompts)
            still = [way for way in ways if len(way.seconds) == number]
            for way in order.sample(still, len(still)):  # else each would always follow the same one
                way.run(given, params)
            if noise is None and number + 1 == FEWEST_TURNS:
                _leave_out(still, fixed, HOPELESS)
                ways[:] = still
        return self.num_turns

    def _turn(
        self, number: int, num_requests: int, source: Ids, temperature: float | None = None
    ) -> tuple[Ids, list[SamplingParams]]:
        """Prompts of a turn, and how to sample. `temperature`: instead of the usual one."""
        start = number * num_requests
        given = workload.cycled(source[start % len(source) :] + source, num_requests)
        return given, [self._params(start + i, temperature) for i in range(num_requests)]

    def _reset(self) -> Policy:
        """The policy of a new engine, whose drafter has learned nothing of its drafts either."""
        if self.learned is None:
            self.learned = internals.matches(self.drafting)
        internals.set_matches(self.drafting, [])
        return copy.deepcopy(self.new)

    def _continued(self, auto: Policy) -> Policy:
        """The policy of an engine that goes on learning, with what its drafter had learned."""
        if self.learned is not None:
            internals.set_matches(self.drafting, self.learned)
            self.learned = None
        return auto

    def asked(self, prompts: Ids) -> internals.Asking:
        """A policy that has measured the acceptance for these prompts, always with the most drafts; see
        `internals.asking_anyway`. The second time counts: a drafter that keeps texts knows these ones then, as it does
        in the turns."""
        prompts = prompts[:MOST_ASKED]
        params = [self._params(i) for i in range(len(prompts))]
        for _ in range(2):
            self.drafting.core.policy = copy.deepcopy(self.new)
            self.drafting.core.policy = asker = internals.asking_anyway(self.drafting)
            Way("asking", self.drafting).run(prompts, params)
        return asker

    def _params(self, seed: int, temperature: float | None = None) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature if temperature is None else temperature,
            seed=seed,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            detokenize=False,
        )

    def _judge(
        self, ways: Sequence[Way], fixed: Sequence[Way], rules: Sequence[Way], *, is_changing: bool
    ) -> dict[str, Any]:
        by_name = {way.name: way for way in ways}
        plain, auto, new = by_name["plain"], by_name["auto"], by_name["new"]
        num_turns = len(plain.seconds)
        every, even, odd = range(num_turns), range(0, num_turns, 2), range(1, num_turns, 2)
        chosen_on, compared_on = (every, every) if is_changing else (even, odd or every)
        best = max(fixed if is_changing else [plain, *fixed], key=lambda way: way.speed(chosen_on))
        bounds = {
            "auto/plain": (auto, plain, every, PLAIN_BOUND),
            "new/plain": (new, plain, every, PLAIN_BOUND),
            f"auto/best ({best.name})": (auto, best, compared_on, 1.0 if is_changing else FIXED_BOUND),
            **{f"auto/{way.name}": (auto, way, every, RULES_BOUND) for way in rules},
        }
        judged = {}
        for name, (ours, theirs, turns, bound) in bounds.items():
            middle, low, high = ratio(ours, theirs, turns)
            judged[name] = {"ratio": middle, "low": low, "high": high, "bound": bound, "ok": high >= bound}
        return {
            "speed": {way.name: way.speed(every) for way in ways},
            "ratios": judged,
        }


def benches(given: argparse.Namespace) -> Iterator[tuple[str, Bench, Ids]]:
    """(name, engines, prompts) of each requested benchmark."""
    batches = tuple(map(int, given.batches.split(",")))
    for together in [batches] if given.waves == 1 else [(batch,) for batch in batches]:
        for config in given.drafter:
            yield Path(config.get("model", config.get("method", ""))).name, *real(given, config, together)
        if given.shape:
            yield given.shape, *replayed(given, together)


def shown(row: dict[str, Any]) -> str:
    predicted = (
        f"    decoding alone: predicted {row['predicted']:.2f}x with K={row['predicted_k']}, measured "
        f"{row['measured']:.2f}x{'' if matrix.is_predicted(row) else ' OFF'}; same: {row['same']}"
    )
    if "ratios" not in row:
        return f"{row['cell']}, batch {row['batch']}\n{predicted}"
    plain = row["speed"]["plain"]
    speeds = "  ".join(f"{name} {speed / plain:.3f}" for name, speed in row["speed"].items())
    judged = "  ".join(
        f"{name} {r['ratio']:.3f} [{r['low']:.3f}, {r['high']:.3f}]{'' if r['ok'] else ' FAILS'}"
        for name, r in row["ratios"].items()
    )
    return (
        f"{row['cell']}, batch {row['batch']}: plain {plain:.0f} tok/s; {speeds}\n    {judged}\n{predicted}"
    )


def real_prompts(llm: LLM, file: Path | None) -> Ids:
    read = read_file(file or assets.path(assets.PROMPTS))
    return [prompt.token_ids(llm.tokenizer, chat=False) for prompt in read]


def noise_prompts(llm: LLM, number: int) -> Ids:
    return workload.random_prompts(number, 200, 0.2, llm.model_config.vocab_size, seed=1)


def bench_of(given: argparse.Namespace, plain: LLM, drafting: LLM, batches: tuple[int, ...]) -> Bench:
    return Bench(
        plain=plain,
        drafting=drafting,
        batches=batches,
        seconds=given.seconds,
        measured_seconds=given.measured_seconds,
        waves=given.waves,
        num_tokens=given.tokens,
        num_turns=given.num_turns,
        temperature=given.temperature,
        new=copy.deepcopy(drafting.core.policy),
    )


def real(given: argparse.Namespace, config: dict[str, Any], batches: tuple[int, ...]) -> tuple[Bench, Ids]:
    """A model and a drafter; with --rates the drafter runs but the target's own tokens are proposed."""
    settings: dict[str, Any] = {
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "device": given.device,
    }
    plain = LLM(given.model, **settings)
    prompts = real_prompts(plain, given.prompts)
    if given.rates:
        config = recorded(plain, prompts, given, config)
    drafting = LLM(given.model, **settings, speculative_config=config)
    return bench_of(given, plain, drafting, batches), prompts


def recorded(plain: LLM, prompts: Ids, given: argparse.Namespace, head: dict[str, Any]) -> dict[str, Any]:
    """Settings of a replay drafter that proposes the outputs of `plain`, at the cost of the drafter `head`."""
    params = [
        SamplingParams(temperature=0, seed=i, max_tokens=given.tokens, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    outputs = plain.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    file = Path(tempfile.mkdtemp()) / "recordings.json"
    recordings.save(file, outputs)
    return {"method": "replay", "recordings": str(file), "acceptance": 0.5, "drafters": [head]}


def replayed(given: argparse.Namespace, batches: tuple[int, ...]) -> tuple[Bench, Ids]:
    """A published shape with random weights; its own plain output is proposed at the cost of an EAGLE-3 head."""
    shape = Shape(given.shape, given.device, given.small)
    settings: dict[str, Any] = {
        "max_num_seqs": max(batches),
        "max_model_len": 1024,
        "enable_prefix_caching": False,
    }
    plain = LLM(**shape.target(), **settings)
    num_prompts = max(FEWEST_REPLAYED, max(batches) * BATCHES_REPLAYED)
    prompts = workload.random_prompts(num_prompts, 200, 0.2, plain.model_config.vocab_size, seed=0)
    config = recorded(plain, prompts, given, {"model": shape.drafter()["model"]})
    drafting = LLM(**shape.target(), **settings, speculative_config=config)
    return bench_of(given, plain, drafting, batches), prompts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="[default: the one that comes with draftproof]")
    parser.add_argument(
        "--drafter", type=json.loads, action="append", default=[], help="a speculative_config"
    )
    parser.add_argument("--prompts", type=Path, help="as for generate")
    parser.add_argument("--shape", help="random weights of this shape instead, with replayed drafts")
    parser.add_argument(
        "--small", type=Path, help="a folder to make a small model of that shape in: a smoke test"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rates", help="replay drafts that are right so often, one after the other")
    parser.add_argument("--changing", action="store_true", help="prompts, noise, prompts again")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--num-turns", type=int, default=12, help="of each cell")
    parser.add_argument(
        "--waves", type=int, default=3, help="requests of a turn for each that is decoded at once"
    )
    parser.add_argument("--tokens", type=int, default=100, help="of each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each cell, about")
    parser.add_argument(
        "--measured-seconds",
        type=float,
        default=matrix.MEASURED_SECONDS,
        help="for what a prediction is compared with, at least",
    )
    parser.add_argument("--predictions", action="store_true", help="nothing but predicted and measured gains")
    parser.add_argument("--matrix", choices=matrix.NAMES, help="all cells of this kind of device")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of a matrix: drafters in whose names it is found"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes of a matrix, on two cores each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.predictions and given.changing:
        parser.error("--predictions are of the prompts alone: leave --changing out")
    return given


def cells(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the requested cells."""
    for name, bench, prompts in benches(given):
        noise = None
        if given.changing:
            noise = noise_prompts(bench.plain, len(prompts))
        for rate in given.rates.split(",") if given.rates else [""]:
            if rate:
                drafter = internals.drafter_of(bench.drafting)
                assert isinstance(drafter, ReplayDrafter)
                drafter.set_acceptance([float(rate)])
            accepted = bench.asked(prompts)
            for batch in bench.batches:
                whole = f"{name}, right at {rate}" if rate else name
                if given.predictions:
                    yield bench.prediction(whole, batch, prompts, accepted)
                else:
                    yield bench.cell(whole, batch, prompts, accepted, noise)


def main() -> int:
    given = parse()
    rows: list[dict[str, Any]] = []
    if given.matrix:
        rows = matrix.rows(given.matrix, given.jobs, sys.argv[0], given.only, predictions=given.predictions)
    else:
        for row in cells(given):
            rows.append(row)
            print(shown(row), flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
    print(matrix.table(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    failed = [row for row in rows if not matrix.holds(row)]
    print(f"{len(rows) - len(failed)} of {len(rows)} cells hold")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
