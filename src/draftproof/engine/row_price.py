"""When a copied draft is worth its row: what a further row of the next pass has to bring."""

from __future__ import annotations

from draftproof.engine.costs import StepCosts
from draftproof.engine.draft_choice import DraftChoice
from draftproof.engine.interface import RowPrice

# Part of a pass's length that counts in `RowPrice` where drafts are copied: a token that is not drafted is not lost,
# and where text repeats the next pass gets it about as cheaply. In recordings of one request of `small` 0.6 to 0.85 are
# within 2 %, 1.0 gains 4 % less, and with 0.5 drafts are often not asked for where they would pay.
PATIENCE = 0.7
LOOKED_AT = 3  # levels, of which the last tells the price where there are no drafts


def row_price(
    costs: StepCosts, choice: DraftChoice, num_made: int, num_requests: int, length: float, *, is_cut: bool
) -> RowPrice:
    """The price in steps like those of `choice`, made for `num_made` requests of which `num_requests` are left. Without
    drafts too: those that are only compared tell whether drafts at this price would pay. `length`: mean tokens of a
    request; `is_cut`: see `AutoPolicy`."""
    most = max(choice.num_drafts.values(), default=costs.levels[:LOOKED_AT][-1])
    context, context_made = round(length * num_requests), round(length * num_made)
    # by the rows of one request's drafts: few have some in the same step, and rows beyond are dearer
    fewest, more_rows = (costs.step(num_requests, num_requests + k, most, context) for k in (0, most))
    each = (more_rows - fewest) / most
    if each <= 0:
        return RowPrice()
    of_others = (num_requests - 1) / num_made
    longer = max(0.0, choice.seconds - costs.step(num_made, num_made, most, context_made))
    patience = PATIENCE if is_cut else 1.0
    return RowPrice(choice.tokens * of_others, patience * (fewest + longer * of_others) / each)
