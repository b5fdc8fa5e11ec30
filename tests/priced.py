"""A policy that asks for a fixed number of drafts, at a price by which the drafter may end proposals."""

from __future__ import annotations

from draftproof.engine.interface import RowPrice
from draftproof.engine.policy import FixedPolicy


class Priced(FixedPolicy):
    def __init__(self, num_drafts: int, price: RowPrice) -> None:
        super().__init__(num_drafts)
        self._price = price

    def price(self) -> RowPrice:
        return self._price
