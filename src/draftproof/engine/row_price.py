"""When a copied draft is worth its row: what a further row of the next pass has to bring."""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.engine.costs import StepCosts
from draftproof.engine.draft_choice import DraftChoice
from draftproof.engine.interface import RowPrice

# Part of a pass's length that counts in `RowPrice` where drafts are copied: a token that is not drafted is not lost,
# and where text repeats the next pass gets it about as cheaply. In recordings of one request of `small` 0.6 to 0.85 are
# within 2 %, 1.0 gains 4 % less, and with 0.5 drafts are often not asked for where they would pay.
PATIENCE = 0.7
LOOKED_AT = 3  # levels, of which the last tells the price where there are no drafts


@dataclass(frozen=True, slots=True)
class RowPrices:
    """The prices in steps like those of a choice, while fewer and fewer of its requests are left: looked up once, since
    that takes a tenth of a small model's step. Seconds are those of a step of one request and of one of all, and linear
    between the two.

    `fewest`: of a step that verifies none; `more`: of one that verifies `most` of one request, since few have some in
    the same step and rows beyond are dearer; `longer`: what drafts add to a step on average; `tokens`: that a step of
    all brings."""

    num_made: int
    fewest: tuple[float, float]
    more: tuple[float, float]
    most: int
    longer: float
    tokens: float
    patience: float

    def at(self, num_requests: int) -> RowPrice:
        """The price with so many requests left."""
        share = (num_requests - 1) / max(1, self.num_made - 1)
        fewest, more = (alone + share * (all_ - alone) for alone, all_ in (self.fewest, self.more))
        each = (more - fewest) / self.most
        if each <= 0:
            return RowPrice()
        of_others = (num_requests - 1) / self.num_made
        return RowPrice(self.tokens * of_others, self.patience * (fewest + self.longer * of_others) / each)


def row_prices(
    costs: StepCosts, choice: DraftChoice, num_made: int, length: float, *, is_cut: bool
) -> RowPrices:
    """The prices in steps like those of `choice`, made for `num_made` requests. Without drafts too: those that are only
    compared tell whether drafts at this price would pay. `length`: mean tokens of a request; `is_cut`: see
    `AutoPolicy`."""
    most = max(choice.num_drafts.values(), default=costs.levels[:LOOKED_AT][-1])

    def seconds(num_requests: int, num_more: int) -> float:
        return costs.step(num_requests, num_requests + num_more, most, round(length * num_requests))

    fewest, more = ((seconds(1, k), seconds(num_made, k)) for k in (0, most))
    longer = max(0.0, choice.seconds - fewest[1])
    return RowPrices(num_made, fewest, more, most, longer, choice.tokens, PATIENCE if is_cut else 1.0)
