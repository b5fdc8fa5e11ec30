"""Policies: how many drafts each request gets. They change speed only: by law 1 the output cannot depend on it.

Letters: R requests that decode in a pass, k drafts of one request, K the maximum.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from draftproof.engine.acceptance import SHARES, Acceptance, RequestClass
from draftproof.engine.costs import StepCosts, StepOutcome
from draftproof.engine.progress import Progress
from draftproof.metrics import Prediction

# least predicted speed-up for which drafts are made: predictions are off by a few per cent
WORTH_IT = 1.03
# What exploring may lose, in plain steps: the budget at the start, what each reported step without drafts (one in
# eight) adds to it, its maximum, and the part of it that one step may risk.
ALLOWANCE = 2.5
INCOME = 0.08
MOST_SAVED = 30.0
STAKE = 0.6
# For how long a choice is kept, since making one takes the host as long as a small model's layer: steps, if it has
# drafts and drafting has not lost time of late; and reported steps, for a choice without drafts.
ROUNDS_KEPT = 4
TOLD_KEPT = 3
MOST_TOKENS = 256  # output length that a new request is expected to have at most: limits are seldom reached


class Policy(Protocol):
    def choose(self, asked: list[Progress], num_others: int) -> list[int]:
        """Number of drafts for each of `asked`, which decode in the next pass beside `num_others` requests that cannot
        draft. All 0: the drafter may be skipped."""
        ...

    def price(self) -> float:
        """Expected tokens that a further row of the next pass must bring to be worth its time."""
        ...

    def will_draft(self, request: Progress, num_others: int, num_lost: int = 0) -> bool:
        """Whether drafts for a new request beside `num_others` others would be worth showing its prompt to the drafter,
        for which the target must recompute `num_lost` cached tokens."""
        ...

    def proposed(self, request: Progress, num_asked: int, num_drafts: int) -> None:
        """The drafter was asked for `num_asked` drafts for this request, and proposed `num_drafts`."""
        ...

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        """A request's drafts were verified."""
        ...

    def finished(self, step: StepOutcome) -> None:
        """A decode-only step has finished."""
        ...

    def prompted(self, num_rows: int, draft_seconds: float) -> None:
        """The drafter took `draft_seconds` for `num_rows` rows, most of them of prompts."""
        ...


class FixedPolicy:
    """Always K drafts for each request."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, asked: list[Progress], num_others: int) -> list[int]:
        return [self._num_drafts] * len(asked)

    def price(self) -> float:
        return 0.0

    def will_draft(self, request: Progress, num_others: int, num_lost: int = 0) -> bool:
        return self._num_drafts > 0

    def proposed(self, request: Progress, num_asked: int, num_drafts: int) -> None:
        pass

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        pass

    def finished(self, step: StepOutcome) -> None:
        pass

    def prompted(self, num_rows: int, draft_seconds: float) -> None:
        pass


class Choice(NamedTuple):
    """Number of drafts for each class of requests, and the expected tokens and seconds of a step with them."""

    num_drafts: Mapping[RequestClass, int]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Part(NamedTuple):
    """A class's drafts between one level and the next. `chance`: that such a draft survives; `num_given`: expected
    number of them for a request that has drafts; `level`: the upper level."""

    chance: float
    num_given: float
    level: int
    its_class: RequestClass


@dataclass(slots=True)
class Kept:
    """A choice that is kept for some steps: the requests it was made for, and the drafts of each."""

    asked: list[Progress]
    num_others: int
    num_drafts: list[int]
    choice: Choice
    num_steps: int = 0
    num_told: int = 0  # steps reported by `finished`

    def holds_for(self, asked: list[Progress], num_others: int) -> bool:
        """Whether it is for these requests and not too old. Compares identities: it is called before each step."""
        if self.choice.num_drafts and self.num_steps >= ROUNDS_KEPT:
            return False
        alike = len(asked) == len(self.asked) and all(map(operator.is_, asked, self.asked))
        return alike and num_others == self.num_others


@dataclass(slots=True)
class AutoPolicy:
    """Chooses the numbers of drafts that maximise expected tokens per second, by measured costs and acceptance.

    Where steps are not padded to buckets, drafts are admitted in order of their survival probability over the whole
    batch (DSpark, algorithm 1); else every request gets the same number. The loss against plain decoding is bounded:
    `savings`, in plain steps, fall by what steps with drafts lose and rise by what they gain, and limit what the next
    step may risk.
    """

    costs: StepCosts
    acceptance: Acceptance
    savings: float = ALLOWANCE
    _context: int = 0  # tokens of all requests, in the last step
    _kept: Kept | None = None

    def choose(self, asked: list[Progress], num_others: int) -> list[int]:
        if not asked:
            return []
        kept = self._kept
        if kept is None or not kept.holds_for(asked, num_others):
            self._let_go()
            kept = self._kept = self._choice_for(asked, num_others)
        kept.num_steps += 1
        return kept.num_drafts

    def _choice_for(self, asked: list[Progress], num_others: int) -> Kept:
        classes = [self.acceptance.class_of(request.record) for request in asked]
        choice = self.best(Counter(classes), num_others, self._context, STAKE * self.savings)
        return Kept(asked, num_others, [choice.num_drafts.get(its_class, 0) for its_class in classes], choice)

    def _let_go(self) -> None:
        """Drop the kept choice. What is known of requests that got no drafts under it fades."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        for request, number in zip(kept.asked, kept.num_drafts, strict=True):
            if not number:
                request.record.fade(kept.num_steps)

    def price(self) -> float:
        if self._kept is None or self.costs.is_padded:
            return 0.0
        choice = self._kept.choice
        num_requests = len(self._kept.asked) + self._kept.num_others
        most = max(choice.num_drafts.values(), default=0)
        fewest, all_rows = (self.costs.step(num_requests, num_requests * (1 + k), most) for k in (0, most))
        return (all_rows - fewest) / max(1, num_requests * most) * choice.speed

    def will_draft(self, request: Progress, num_others: int, num_lost: int = 0) -> bool:
        num_requests = 1 + num_others  # all assumed to be like this one
        choice = self.best(
            {self.acceptance.unknown: num_requests}, context=self._context, stake=STAKE * self.savings
        )
        if not choice.num_drafts:
            return False
        plain = self.costs.plain(num_requests, self._context) / num_requests
        num_tokens = min(MOST_TOKENS, request.spec.limit - len(request.tokens))
        saved = num_tokens * (plain - choice.seconds / choice.tokens)
        shown = len(request.tokens) * self.costs.prompt_row_seconds
        return saved > shown + num_lost * self.costs.target_row_seconds

    def best(
        self,
        counts: Mapping[RequestClass, int],
        num_others: int = 0,
        context: int = 0,
        stake: float = float("inf"),
    ) -> Choice:
        """The best choice for the `counts` of requests of each class and `num_others` that cannot draft. A step may
        take at most `stake` plain steps longer than a plain one. `context`: tokens of all requests."""
        num_requests = sum(counts.values()) + num_others
        plain = Choice({}, float(num_requests), self.costs.plain(num_requests, context))
        best_of = self._best_alike if self.costs.is_padded else self._best_ragged
        best = best_of(counts, num_requests, context, plain.seconds * (1.0 + stake))
        return best if best is not None and best.speed > WORTH_IT * plain.speed else plain

    def predict(self, num_requests: int, context: int = 0) -> Prediction:
        """The expected speed-up for `num_requests` new requests with `context` tokens in all."""
        unknown = self.acceptance.unknown
        choice = self.best({unknown: num_requests}, context=context)
        plain = num_requests / self.costs.plain(num_requests, context)
        return Prediction(num_requests, choice.num_drafts.get(unknown, 0), choice.speed / plain)

    def _best_alike(
        self, counts: Mapping[RequestClass, int], num_requests: int, context: int, most: float
    ) -> Choice | None:
        """The best choice with one level for all requests, of those that take at most `most` seconds."""
        longer, best = self.acceptance.longer, None
        for level in self.costs.levels_for(num_requests)[1:]:
            tokens = float(num_requests)
            for its_class, number in counts.items():
                survival = self.acceptance.survival(its_class.odds)
                accepted = sum(map(operator.mul, longer[:level], survival[:level]))
                tokens += number * its_class.share / SHARES * accepted
            seconds = self.costs.step(num_requests, num_requests * (1 + level), level, context)
            if seconds <= most and (best is None or tokens / seconds > best.speed):
                best = Choice(dict.fromkeys(counts, level), tokens, seconds)
        return best

    def _best_ragged(
        self, counts: Mapping[RequestClass, int], num_requests: int, context: int, most: float
    ) -> Choice | None:
        """The best choice that admits `_parts` in order, of those that take at most `most` seconds."""
        parts = self._parts(counts)
        step = self.costs.ragged(num_requests, context)
        tokens = rows = float(num_requests)
        most_drafts, best, best_speed = 0, None, 0.0
        for number, part in enumerate(parts, 1):
            num_drafts = part.its_class.share / SHARES * part.num_given * counts[part.its_class]
            tokens += part.chance * num_drafts
            rows += num_drafts
            most_drafts = max(most_drafts, part.level)
            seconds = step(round(rows), most_drafts)
            if seconds <= most and tokens > best_speed * seconds:
                best, best_speed = (number, tokens, seconds), tokens / seconds
        if best is None:
            return None
        chosen: dict[RequestClass, int] = {}
        for part in parts[: best[0]]:  # a class's higher levels are later
            chosen[part.its_class] = part.level
        return Choice(chosen, best[1], best[2])

    def _parts(self, counts: Iterable[RequestClass]) -> list[Part]:
        """All parts of all classes, the most likely to survive first."""
        longer, levels = self.acceptance.longer, self.costs.levels
        lengths = [0.0, *accumulate(longer)]
        found = []
        for its_class in counts:
            survival = self.acceptance.survival(its_class.odds)
            tokens = [0.0, *accumulate(map(operator.mul, longer, survival))]
            for low, high in pairwise(levels):
                num_given = lengths[high] - lengths[low]
                chance = (tokens[high] - tokens[low]) / num_given
                found.append(Part(chance, num_given, high, its_class))
        found.sort(key=lambda part: -part.chance)
        return found

    def proposed(self, request: Progress, num_asked: int, num_drafts: int) -> None:
        self.acceptance.count_given(request.record, num_asked, num_drafts)

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        self.acceptance.count(request.record, num_drafted, num_accepted)

    def prompted(self, num_rows: int, draft_seconds: float) -> None:
        self.costs.observe_prompt(num_rows, draft_seconds)

    def finished(self, step: StepOutcome) -> None:
        self._context = step.context
        self.costs.observe(step)
        if step.num_rows > step.num_requests or step.num_drafts:
            # by the cost model, not this step's time: a disturbance would have slowed a plain step as well
            seconds = self.costs.step(step.num_requests, step.num_rows, step.num_drafts, step.context)
            plain = self.costs.plain(step.num_requests, step.context)
            gained = step.num_tokens / step.num_requests - seconds / plain
        else:
            gained = INCOME
            self.acceptance.fade()
        self.savings = min(MOST_SAVED, max(0.0, self.savings + gained))
        kept = self._kept
        if kept is not None:
            kept.num_told += 1
            if kept.num_told >= TOLD_KEPT or (kept.choice.num_drafts and self.savings < ALLOWANCE):
                self._let_go()
