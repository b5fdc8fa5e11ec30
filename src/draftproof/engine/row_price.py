"""When a copied draft is worth its row: what a further row of the next pass has to bring."""

from __future__ import annotations

from draftproof.engine.costs import StepCosts
from draftproof.engine.draft_choice import DraftChoice
from draftproof.engine.interface import RowPrice

# Part of a pass's length that counts in `RowPrice` where drafts are copied: a token that is not drafted is not lost,
# and where text repeats the next pass gets it about as cheaply: for a request alone, and for `MANY` or more together,
# whose pass takes much longer by a first draft than by the next. Measured: at 4 requests of `small` 0.5 gains 2 % over
# 0.75 and at 16 it loses 3 %.
PATIENCE, PATIENCE_OF_MANY, MANY = 0.5, 0.75, 16


def row_price(
    costs: StepCosts, choice: DraftChoice, num_made: int, num_requests: int, *, is_cut: bool
) -> RowPrice:
    """The price in steps like those of `choice`, made for `num_made` requests of which `num_requests` are left. Without
    drafts too: those that are only compared tell whether drafts at this price would pay. `is_cut`: see
    `AutoPolicy`."""
    most = max(choice.num_drafts.values(), default=costs.levels[1])
    fewest, all_rows = (costs.step(num_requests, num_requests * (1 + k), most) for k in (0, most))
    each = (all_rows - fewest) / (num_requests * most)
    if each <= 0:
        return RowPrice()
    of_others = (num_requests - 1) / num_made
    longer = max(0.0, choice.seconds - costs.step(num_made, num_made, most))
    patience = 1.0
    if is_cut:
        patience = PATIENCE + (PATIENCE_OF_MANY - PATIENCE) * min(1.0, (num_requests - 1) / (MANY - 1))
    return RowPrice(choice.tokens * of_others, patience * (fewest + longer * of_others) / each)
