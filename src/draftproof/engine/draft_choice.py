"""Which drafts are worth verifying: the numbers of drafts with which requests are soonest done.

R requests that decode in a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from draftproof.engine.acceptance import Acceptance, RequestClass, Whole
from draftproof.engine.costs import StepCosts

# Least predicted speed-up for which drafts are made: predictions are off by a few per cent.
WORTH_IT = 1.03
# Least speed-up at which a drafter goes on whose drafts have paid, or at a request's beginning, if it would miss rows
# else and could make no more: a few rounds tell little of a request, and the first the least.
WORTH_GOING_ON = 0.95
# Least gain for which a padded step of several requests has more drafts, and for which it has others than the step
# before, whose drafts it still verifies. Example: the last of 64 requests took 3 drafts, then one, 3, 5, 3 and 5 in
# eleven steps, which cost a per cent of the text.
WORTH_MORE = 1.03
# Least gain for more drafts of many requests that began together, for each doubling of their number. With more drafts
# they end at more different times, the more so the more they are, and those that are left at the end are few. Example:
# 64 requests, drafts that are right at 0.8. Three drafts gain 6 % over one in steps of all requests, and nothing until
# the last has ended; at 0.85 they gain 12 % and 2 %.
WORTH_MORE_EACH = 1.0125
# Part of a stake that a step with more than the fewest drafts may risk: many steps with few drafts tell more than one
# with many.
RISKED_ON_MANY = 0.4
# Part of the tokens of drafts beyond the first level that is not counted on, where steps are not padded: fewer rounds
# tell of them, and outputs end. Example: a draft model of which 2, 3 and 5 drafts gain the same within a per cent. Five
# were asked for where the last rounds had gone well, which lost 2 %.
DOUBTED = 0.1
LEAST_GIVEN = 1e-6  # drafts of a part: a drafter with fewer never has that many


class DraftChoice(NamedTuple):
    """Number of drafts for each class of requests, and the expected tokens and seconds of a step with them. `balanced`:
    the tokens as they count for its speed, see `Chooser`. `worst`: what it loses against a plain step if no draft is
    accepted, in plain steps; `risk`: what it may lose, given what counts so far vouch for."""

    num_drafts: Mapping[RequestClass, int]
    tokens: float
    seconds: float
    balanced: float
    worst: float = 0.0
    risk: float = 0.0

    @property
    def speed(self) -> float:
        return self.balanced / self.seconds

    @property
    def plain_seconds(self) -> float:
        """Seconds of the plain step that it was compared with."""
        return self.seconds / (1.0 + self.worst)


class Part(NamedTuple):
    """A request's drafts between one level and the next. `num_rows`, `num_tokens`: expected number of such drafts, and
    of accepted ones, per step; `square`: what they add to the expected square of the number of its drafts; `worth`:
    steps that they save for each token; `level`: the upper level."""

    worth: float
    num_rows: float
    square: float
    num_tokens: float
    level: int
    its_class: RequestClass

    @property
    def rank(self) -> float:
        return self.worth / self.num_rows

    def joined(self, lower: Part) -> Part:
        """This part and the one below it as one."""
        return self._replace(
            worth=lower.worth + self.worth,
            num_rows=lower.num_rows + self.num_rows,
            square=lower.square + self.square,
            num_tokens=lower.num_tokens + self.num_tokens,
        )


@dataclass(slots=True)
class DraftRows:
    """The number of draft rows of a step: mean and variance, over requests whose drafts are independent."""

    mean: float = 0.0
    variance: float = 0.0
    most: int = 0
    # each class's mean and mean square for one request, and its level
    _of_class: dict[RequestClass, tuple[float, float, int]] = field(default_factory=dict)

    def add(self, part: Part, num_requests: int) -> None:
        """Admit this part for each of so many requests."""
        mean, square, most = self._of_class.get(part.its_class, (0.0, 0.0, 0))
        more_mean, more_square = mean + part.num_rows, square + part.square
        self._of_class[part.its_class] = more_mean, more_square, part.level
        self.mean += num_requests * part.num_rows
        self.variance += num_requests * (more_square - more_mean**2 - (square - mean**2))
        self.most += num_requests * (part.level - most)

    def usual(self, nobody: float) -> tuple[int, int]:
        """A low and a high number, a standard deviation to either side of the mean, if some request has drafts;
        `nobody`: the chance that none has. Steps take less time for the mean than on the average if each further row
        costs more than the one before. No further from the mean than the nearer end (1 or `most`), so that their mean
        stays the mean. Examples: none or 16 of one request, each as likely: 16 and 16. Eight in most rounds and fewer
        in some, 6.8 and 2.2 to either side: 6 and 8."""
        mean = self.mean / (1.0 - nobody)
        variance = (self.variance + self.mean**2) / (1.0 - nobody) - mean**2
        apart = max(0.0, min(math.sqrt(max(0.0, variance)), mean - 1.0, self.most - mean))
        return max(1, round(mean - apart)), round(mean + apart)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Finds the best choice by costs and acceptance.

    Where steps are padded to buckets, every request gets the number with the most tokens per second. Else drafts are
    admitted in order of what they are worth over the whole batch, after DSpark's algorithm 1.

    There, what counts is how soon each request is done: tokens are averaged harmonically over the requests. By their
    sum, drafts would go to the requests whose drafts are likeliest to survive, which end early and leave the others to
    many steps of few requests. Example: two requests of 100 tokens are done after 100 steps if one gets 3 tokens a step
    and the other 1, and after 50 if both get 2. So of equally likely drafts those of a request with fewer tokens a step
    come first, and in requests that are alike the likeliest.
    """

    costs: StepCosts
    acceptance: Acceptance
    stops: bool = False  # for a single request no drafts are made beyond those that are proposed

    def best(
        self,
        counts: Mapping[RequestClass, int],
        num_others: int = 0,
        context: int = 0,
        stake: float = float("inf"),
        worth: float = WORTH_IT,
        before: int = 0,
        *,
        began_together: bool = True,
    ) -> DraftChoice:
        """The best choice for the `counts` of requests of each class and `num_others` that cannot draft. A step with
        the fewest drafts may risk at most `stake` plain steps, with more drafts a smaller part of that. What it risks
        is its longer time, less the tokens that counts so far vouch for. `context`: tokens of all requests; `worth`:
        least speed-up; `before`: the level of the step before, if these requests were in it; `began_together`: whether
        they began at about one time, where steps are padded."""
        num_requests = sum(counts.values()) + num_others
        plain = DraftChoice({}, num_requests, self.costs.plain(num_requests, context), num_requests)
        if not stake:  # whatever counts vouch for, drafts have not paid
            return plain
        stakes = stake, stake * RISKED_ON_MANY

        def search(limits: tuple[float, float]) -> DraftChoice:
            least = worth * plain.speed
            if self.costs.is_padded:
                worth_more = _worth_more(num_requests, began_together=began_together)
                found = self._best_alike(counts, num_requests, context, limits, least, before, worth_more)
            else:
                found = self._best_ragged(counts, num_requests, context, limits)
            if found is None or found.speed <= least:
                return plain
            worst = found.seconds / plain.seconds - 1.0
            return found._replace(worst=worst, risk=max(0.0, worst))

        best = search((math.inf, math.inf))
        most_risk = stakes[max(best.num_drafts.values(), default=0) > self.costs.levels[1]]
        if best.risk <= most_risk:
            return best
        vouched = _num_accepted(counts, best.num_drafts, self._known(num_requests).vouched)
        risk = max(0.0, best.worst - vouched / num_requests)
        if risk <= most_risk:
            return best._replace(risk=risk)
        return search((plain.seconds * (1.0 + stakes[0]), plain.seconds * (1.0 + stakes[1])))

    def _best_alike(
        self,
        counts: Mapping[RequestClass, int],
        num_requests: int,
        context: int,
        most: tuple[float, float],
        least: float,
        before: int,
        worth_more: float,
    ) -> DraftChoice | None:
        """The best choice with one level for all requests, of those that take at most `most` seconds: with the first
        level, and with others; of those that are faster than `least`. The level `before` if more drafts do not gain
        `worth_more` and fewer do not gain `WORTH_MORE`; else fewer drafts, if more do not gain `worth_more`."""
        first = self.costs.levels[1]
        found: dict[int, DraftChoice] = {}
        for level in self.costs.levels_for(num_requests)[1:]:
            num_drafts = dict.fromkeys(counts, level)
            tokens = num_requests + sum(
                number * (self.class_tokens(its_class, num_requests)[level] - 1.0)
                for its_class, number in counts.items()
            )
            seconds = self.costs.step(num_requests, num_requests * (1 + level), level, context)
            if seconds <= most[level > first] and tokens / seconds > least:
                found[level] = DraftChoice(num_drafts, tokens, seconds, tokens)
        if before in found:
            fewer, more = min(worth_more, WORTH_MORE) * found[before].speed, worth_more * found[before].speed
            if not any(choice.speed > (more if k > before else fewer) for k, choice in found.items()):
                return found[before]
        best = None
        for choice in found.values():
            if best is None or choice.speed > worth_more * best.speed:
                best = choice
        return best

    def _best_ragged(
        self, counts: Mapping[RequestClass, int], num_requests: int, context: int, most: tuple[float, float]
    ) -> DraftChoice | None:
        """The best choice that admits `_parts` in order, of those that take at most `most` seconds if anybody has
        drafts: with the first level, and with others. Where only some rounds have drafts, many steps of few requests
        have none at all and are as short as plain ones. Example: one request, with 5 drafts in every fourth round: a
        quarter of the steps have 6 rows, the others 1, and none has the 2.25 rows of the mean."""
        parts = self._parts(counts, num_requests)
        stops, longer = self._stops(num_requests), self._known(num_requests).longer
        step = self.costs.ragged(num_requests, context)
        tokens = float(num_requests)  # emitted by a step
        steps_per_token = float(num_requests)  # the sum over requests of steps per token
        draft_rows = DraftRows()
        nobody = 1.0  # chance that no request has drafts
        most_drafts, best, best_speed = 0, None, 0.0
        admitted: set[RequestClass] = set()
        left = sum(part.worth * counts[part.its_class] for part in parts)
        for number, part in enumerate(parts, 1):
            count = counts[part.its_class]
            left -= part.worth * count
            if part.its_class not in admitted:
                admitted.add(part.its_class)
                nobody *= (1.0 - part.its_class.share) ** count
            tokens += part.num_tokens * count
            steps_per_token -= part.worth * count
            draft_rows.add(part, count)
            most_drafts = max(most_drafts, part.level)
            few, many = draft_rows.usual(nobody)
            num_made = sum(longer[:most_drafts]) if stops else most_drafts
            drafted = step(num_requests + few, num_made)
            if many > few:
                drafted = (drafted + step(num_requests + many, num_made)) / 2
            if drafted > most[most_drafts > self.costs.levels[1]]:
                continue
            seconds = (1.0 - nobody) * drafted + nobody * step(num_requests, num_made) if nobody else drafted
            balanced = num_requests * num_requests / steps_per_token
            if balanced > best_speed * seconds:
                best, best_speed = (number, tokens, seconds, balanced), balanced / seconds
            elif num_requests * num_requests <= best_speed * seconds * (steps_per_token - left):
                break  # not even if all other drafts came for no more time
        if best is None:
            return None
        chosen: dict[RequestClass, int] = {}
        for part in parts[: best[0]]:  # a class's higher levels are later
            chosen[part.its_class] = part.level
        return DraftChoice(chosen, *best[1:])

    def _stops(self, num_requests: int) -> bool:
        """Whether so many requests that decode together have no drafts made beyond those that are proposed."""
        return self.stops and num_requests == 1

    def _known(self, num_requests: int) -> Acceptance | Whole:
        """What is known of the drafts of so many requests that decode together."""
        return Whole(self.acceptance) if self.stops and not self._stops(num_requests) else self.acceptance

    def tokens(self, share: float, odds: int, num_requests: int = 1) -> list[float]:
        """Expected tokens of a request in a step of so many, by its number of drafts."""
        accepted = [0.0, *accumulate(self._known(num_requests).survival(odds))]
        return [1.0 + share * number for number in accepted]

    def class_tokens(self, its_class: RequestClass, num_requests: int) -> list[float]:
        """`tokens` of a request of this class. At its beginning, first drafts count for as much as they will bring
        later: a drafter with keys and values that missed these rows could make none then."""
        share, odds, room = its_class.share, its_class.odds, its_class.room
        tokens = self.tokens(share, odds, num_requests)
        if its_class.opening:
            lasting, tokens = tokens, self.tokens(share, odds + its_class.opening, num_requests)
            first = self.costs.levels[1]
            tokens = [1.0, *(number + lasting[first] - tokens[first] for number in tokens[1:])]
        if room is None:
            return tokens
        return [tokens[min(k, room)] for k in range(len(tokens))]

    def counted_on(self, tokens: Sequence[float]) -> list[float]:
        """What of `tokens` is counted on where steps are not padded; see `DOUBTED`."""
        first = tokens[self.costs.levels[1]]
        return [min(number, first + (1.0 - DOUBTED) * (number - first)) for number in tokens]

    def _parts(self, counts: Iterable[RequestClass], num_requests: int) -> list[Part]:
        """All parts of all classes of so many requests, those of the highest rank first. A part that ranks higher than
        the one before it is joined to that: the drafts before it are its price. All tokens of late drafts are counted
        on if these are only made where they are likely to be right."""
        levels = self.costs.levels
        longer = self._known(num_requests).longer
        lengths = [0.0, *accumulate(longer)]
        # the square of a number n is the sum of the first n odd numbers
        squares = [0.0, *accumulate((2 * i + 1) * chance for i, chance in enumerate(longer))]
        found = []
        for its_class in counts:
            share = its_class.share
            tokens = self.class_tokens(its_class, num_requests)
            counted_on = tokens if self._stops(num_requests) else self.counted_on(tokens)
            own: list[Part] = []
            for low, high in pairwise(levels):
                num_rows = share * (lengths[high] - lengths[low])
                if num_rows < LEAST_GIVEN:
                    break
                worth = 1.0 / counted_on[low] - 1.0 / counted_on[high]
                square = share * (squares[high] - squares[low])
                part = Part(worth, num_rows, square, tokens[high] - tokens[low], high, its_class)
                while own and own[-1].rank < part.rank:
                    part = part.joined(own.pop())
                own.append(part)
            found += own
        found.sort(key=lambda part: -part.rank)
        return found


def _worth_more(num_requests: int, *, began_together: bool) -> float:
    """Least gain for which padded steps of so many requests have more drafts; for one alone any counts."""
    if num_requests == 1:
        return 1.0
    return max(WORTH_MORE, WORTH_MORE_EACH ** math.log2(num_requests)) if began_together else WORTH_MORE


def _num_accepted(
    counts: Mapping[RequestClass, int],
    num_drafts: Mapping[RequestClass, int],
    survival: Callable[[int], Sequence[float]],
) -> float:
    """Expected accepted drafts of a step with these numbers of drafts, by the `survival` of a class's present odds."""
    accepted = 0.0
    for its_class, number in num_drafts.items():
        odds = its_class.odds + its_class.opening
        accepted += counts[its_class] * its_class.share * sum(survival(odds)[:number])
    return accepted
