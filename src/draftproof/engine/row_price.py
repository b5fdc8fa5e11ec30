"""When a draft is worth its time: what a further row of the next pass has to bring, or a further draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftproof.engine.costs import StepCosts, rounded_rows
from draftproof.engine.draft_choice import DraftChoice
from draftproof.engine.interface import RowPrice

# Part of a pass's length that counts in `RowPrice` where drafts are copied: a token that is not drafted is not lost,
# and where text repeats the next pass gets it about as cheaply. Tokens per second of `tiny` and `small`, compared with
# the best fixed number, for 1, 4 and 16 requests: 1.00 to 1.02 with 0.85, 0.97 to 1.02 with 0.7, 0.99 to 1.02 with 1.
PATIENCE = 0.85
LOOKED_AT = 3  # levels, of which the last tells the price where there are no drafts


@dataclass(frozen=True, slots=True)
class RowPrices:
    """The prices in steps like those of a choice, while fewer and fewer of its requests are left: looked up once, since
    that takes a tenth of a small model's step. Seconds are those of a step of one request and of one of all, and linear
    between the two.

    `fewest`: of a step that verifies none; `each`: that a further row of one request takes, on the average of all its
    drafts, since few have some in the same step and rows beyond are dearer; `longer`: what drafts add to a step on
    average; `tokens`: that a step of all brings.

    If others have drafts, the step verifies some in any case, and only further rows are to be paid for. Example: by the
    first steps of 16 requests any drafts made a step a third longer. If a single one has to bring that, it never does:
    no drafts were left to be compared, and nothing told that those of 16 together pay."""

    num_made: int
    fewest: tuple[float, float]
    each: tuple[float, float]
    longer: float
    tokens: float
    patience: float

    def at(self, num_requests: int) -> RowPrice:
        """The price with so many requests left."""
        share = (num_requests - 1) / max(1, self.num_made - 1)
        fewest, each = (alone + share * (all_ - alone) for alone, all_ in (self.fewest, self.each))
        if each <= 0:
            return RowPrice()
        of_others = (num_requests - 1) / self.num_made
        return RowPrice(self.tokens * of_others, self.patience * (fewest + self.longer * of_others) / each)


def row_prices(
    costs: StepCosts, choice: DraftChoice, num_made: int, length: float, share: float, *, is_cut: bool
) -> RowPrices:
    """The prices in steps like those of `choice`, made for `num_made` requests. Without drafts too: those that are only
    compared tell whether drafts at this price would pay, if all made some. `length`: mean tokens of a request; `share`:
    of steps in which a request has drafts; `is_cut`: see `AutoPolicy`."""
    most = max(choice.num_drafts.values(), default=costs.levels[:LOOKED_AT][-1])
    others = 1.0 - (1.0 - share) ** (num_made - 1) if choice.num_drafts else float(num_made > 1)

    of_one, of_all = (costs.ragged(number, round(length * number)) for number in (1, num_made))
    fewest = of_one(1, most), of_all(num_made, most)
    each = (
        _further_row(of_one, 1, most, 0.0, costs.levels[-1]),
        _further_row(of_all, num_made, most, others, costs.levels[-1]),
    )
    longer = max(0.0, choice.seconds - fewest[1])
    return RowPrices(num_made, fewest, each, longer, choice.tokens, PATIENCE if is_cut else 1.0)


def _further_row(
    step: Callable[[int, int], float], num_requests: int, most: int, others: float, most_drafts: int
) -> float:
    """Seconds of a row more, on the average of the first `most`; in the part `others` of the steps, in which other
    requests have drafts, of those after the first. `step`: seconds by rows and drafts. Both ends of the latter are
    numbers of rows that steps are padded to: else there might be as many rows at both."""
    alone = (step(num_requests + most, most) - step(num_requests, most)) / most
    if not others:
        return alone
    first = rounded_rows(num_requests, num_requests + 1, most_drafts)
    last = rounded_rows(num_requests, num_requests + most, most_drafts)
    if last == first:
        last = rounded_rows(num_requests, first + 1, most_drafts)
    beside = (step(last, most) - step(first, most)) / (last - first)
    return alone + others * (beside - alone)


def stop_price(costs: StepCosts, choice: DraftChoice, length: int) -> RowPrice:
    """What a request of `length` tokens that decodes alone has to expect of another draft, if drafts are made one after
    the other: the tokens that come in the time of making and verifying it, in steps like those of `choice`."""
    most = costs.levels[-1]
    if most == 1:
        return RowPrice()  # there is never another one
    step, speed = costs.ragged(1, length), choice.tokens / choice.seconds
    of_draft = (step(1 + most, most) - step(1 + most, 1)) / (most - 1)
    of_row = (step(1 + most, most) - step(2, most)) / (most - 1)
    return RowPrice(of_draft=speed * max(0.0, of_draft), of_row=speed * max(0.0, of_row))
