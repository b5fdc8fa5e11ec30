"""How many drafts each request gets. Changes speed only: by law 1 the output cannot depend on it.

Letters: R requests that decode in a pass, k drafts of one, K the most that may be asked for.
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

# predicted speed-up from which on drafting is preferred: predictions are off by a few per cent
WORTH_IT = 1.03
# What learning may cost, in plain steps: an allowance at the start, what each step without drafts that the policy hears
# of adds (one in eight), the most that is kept, and the part of it that one step may put at risk.
ALLOWANCE = 2.5
INCOME = 0.08
MOST_SAVED = 30.0
STAKE = 0.6
# Steps for which a choice holds, while drafting earns: making it takes the host as long as a small model's layer. And
# plain steps that the policy has heard of for which a choice of no drafts does.
ROUNDS_KEPT = 4
TOLD_KEPT = 3
MOST_TOKENS = 256  # tokens that a request is expected to have: more are allowed than come


class Policy(Protocol):
    def choose(self, asked: list[Progress], num_others: int) -> list[int]:
        """Drafts to ask for, one number for each of `asked`, which will decode in the next pass beside `num_others`
        that cannot draft. All 0: the drafter has nothing to do."""
        ...

    def price(self) -> float:
        """Tokens that a row of the next pass must bring to be worth its time."""
        ...

    def will_draft(self, request: Progress, num_others: int, num_lost: int = 0) -> bool:
        """Whether drafts for a new request beside so many others would be worth that the drafter sees its prompt, for
        which the target computes `num_lost` tokens that it has in the cache."""
        ...

    def proposed(self, request: Progress, num_asked: int, num_drafts: int) -> None:
        """The drafter was asked for so many drafts for this request, and had so many."""
        ...

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        """One round's outcome."""
        ...

    def finished(self, step: StepOutcome) -> None:
        """One step's outcome."""
        ...

    def prompted(self, num_rows: int, draft_seconds: float) -> None:
        """The drafter saw so many rows, most of them of prompts."""
        ...


class FixedPolicy:
    """Always K; where that is 0, the drafter has nothing to do."""

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
    """Drafts for each class of requests, and what is expected of them: tokens of a step, and the seconds it takes."""

    num_drafts: Mapping[RequestClass, int]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Part(NamedTuple):
    """The drafts of a class between one level and the next: how many of those that there are survive, and how many
    there are of each request that has any."""

    chance: float
    num_given: float
    level: int
    its_class: RequestClass


@dataclass(slots=True)
class Kept:
    """A choice that holds for some steps: who was asked beside how many others, and for how many drafts each."""

    asked: list[Progress]
    num_others: int
    num_drafts: list[int]
    choice: Choice
    num_steps: int = 0
    num_told: int = 0  # steps that the policy has heard of

    def holds_for(self, asked: list[Progress], num_others: int) -> bool:
        """Whether it is for these requests, by identity: this is asked before every step."""
        if self.choice.num_drafts and self.num_steps >= ROUNDS_KEPT:
            return False
        alike = len(asked) == len(self.asked) and all(map(operator.is_, asked, self.asked))
        return alike and num_others == self.num_others


@dataclass(slots=True)
class AutoPolicy:
    """The numbers that make expected tokens per second largest, by measured costs and acceptance.

    Where rows are computed as they come, drafts are admitted in order of their survival probability over the whole
    batch (DSpark, algorithm 1); where steps are filled up to captured sizes, every request gets as many. What this may
    lose against plain decoding is bounded: `savings`, in plain steps, go down by what steps with drafts lost and up by
    what they gained, and limit what the next one may put at risk.
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
        """Forget the choice that was kept; who had no drafts meanwhile is known less."""
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
        num_requests = 1 + num_others  # all like this one
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
        """The best choice for so many requests of each class, where a step may lose at most `stake` plain ones.
        `context`: tokens of all requests."""
        num_requests = sum(counts.values()) + num_others
        plain = Choice({}, float(num_requests), self.costs.plain(num_requests, context))
        best_of = self._best_alike if self.costs.is_padded else self._best_ragged
        best = best_of(counts, num_requests, context, plain.seconds * (1.0 + stake))
        return best if best is not None and best.speed > WORTH_IT * plain.speed else plain

    def predict(self, num_requests: int, context: int = 0) -> Prediction:
        """What to expect of so many requests of whom nothing is known, with `context` tokens in all."""
        unknown = self.acceptance.unknown
        choice = self.best({unknown: num_requests}, context=context)
        plain = num_requests / self.costs.plain(num_requests, context)
        return Prediction(num_requests, choice.num_drafts.get(unknown, 0), choice.speed / plain)

    def _best_alike(
        self, counts: Mapping[RequestClass, int], num_requests: int, context: int, most: float
    ) -> Choice | None:
        """One level for everybody, in at most so many seconds."""
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
        """Drafts are admitted level by level, that of the class first whose drafts there are likeliest to survive; in
        at most so many seconds."""
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
        for part in parts[: best[0]]:
            chosen[part.its_class] = max(part.level, chosen.get(part.its_class, 0))
        return Choice(chosen, best[1], best[2])

    def _parts(self, counts: Iterable[RequestClass]) -> list[Part]:
        """The likeliest to survive first."""
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
            # by what such steps take: this one may have been disturbed, as a plain one would have been
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
