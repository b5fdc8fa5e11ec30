"""A per-slot state: the last permanent rows, each a token and a vector.

Shapes: S slots, E kept rows of a slot, H size of a vector, R requests, T rows of a pass, X and Y arbitrary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.cache.states import PassOfRows


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRows:
    """What is kept per slot: its last `count` rows, with vectors of `size` numbers."""

    count: int
    size: int

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> RecentRows:
        return RecentRows(self, num_slots, dtype, device)


class RecentRows:
    """The kept rows of all slots, right-aligned in E places; the last one is at position `end` - 1."""

    def __init__(self, spec: SlotRows, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        zeros_SE = torch.zeros(num_slots, spec.count, dtype=torch.int64, device=device)
        self.spec = spec
        self.vectors_SEH = torch.zeros(num_slots, spec.count, spec.size, dtype=dtype, device=device)
        self._tokens_SE = zeros_SE
        self._count_S = zeros_SE[:, 0].clone()
        self._end_S = zeros_SE[:, 0].clone()
        self._written: Tensor | None = None  # the table of the current pass

    def admit(self, slot: int) -> None:
        """Forget the previous request's rows."""
        self._count_S[slot] = 0

    def known(self, rows: PassOfRows) -> Tensor:
        """Number of kept rows directly before each request's first row: [R]."""
        follows_R = self._end_S[rows.slots_R] == rows.first_R
        return torch.where(follows_R, self._count_S[rows.slots_R], 0)

    def tokens(self, rows: PassOfRows, owner_X: Tensor, place_YX: Tensor) -> Tensor:
        """The token at a place among a request's rows; kept rows have negative places."""
        each = self.spec.count
        row_YX = (rows.query_start_loc_R1[:-1][owner_X] + place_YX).clamp(0, len(rows.tokens_T) - 1)
        old_YX = self._tokens_SE[
            rows.slots_R[owner_X].expand_as(place_YX), (each + place_YX).clamp(0, each - 1)
        ]
        return torch.where(place_YX < 0, old_YX, rows.tokens_T[row_YX])

    def write(self, rows: PassOfRows, vectors_TH: Tensor) -> Tensor:
        """Take the vectors of a pass; `commit` keeps some of them.

        Returns a table of these vectors followed by the kept vectors of the pass's slots: [T + R * E, H].
        """
        table = torch.cat((vectors_TH, self.vectors_SEH[rows.slots_R].flatten(0, 1)))
        self._written = table
        return table

    def source(self, rows: PassOfRows, owner_X: Tensor, place_YX: Tensor) -> Tensor:
        """Index into `write`'s table of the vector at a place; kept rows have negative places."""
        kept_YX = len(rows.tokens_T) + (owner_X + 1) * self.spec.count + place_YX
        return torch.where(place_YX < 0, kept_YX, rows.query_start_loc_R1[:-1][owner_X] + place_YX)

    def commit(self, rows: PassOfRows) -> None:
        """Keep the last E live rows of each slot. Slots without live rows, and all slots if nothing was written, stay
        unchanged.
        """
        if self._written is None:
            return
        table, self._written = self._written, None
        slots_R, live_R, each = rows.slots_R, rows.live_R, self.spec.count
        device = slots_R.device
        owner_R = torch.arange(len(slots_R), device=device)
        place_ER = live_R - each + torch.arange(each, device=device)[:, None]
        source_ER = self.source(rows, owner_R, place_ER)
        tokens_ER = self.tokens(rows, owner_R, place_ER)
        count_R = self.known(rows) + live_R
        stays_R = live_R == 0
        self._count_S[slots_R] = torch.where(stays_R, self._count_S[slots_R], count_R.clamp(max=each))
        self._end_S[slots_R] = torch.where(stays_R, self._end_S[slots_R], rows.first_R + live_R)
        self._tokens_SE[slots_R] = tokens_ER.t()
        self.vectors_SEH[slots_R] = table[source_ER.t()]
