"""Per-slot state that layers keep besides pages, made only of rows that became permanent.

During a pass a layer writes the contributions of all its rows, including those that will be rejected. The engine calls
`commit` in one place, at the end of a step, to make the live ones permanent. So nothing is ever rolled back.
Shapes: S slots, R requests, T rows of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassOfRows:
    """The rows of a pass, request after request: each request's start, the position of its first row, its live rows."""

    slots_R: Tensor
    query_start_loc_R1: Tensor
    first_R: Tensor
    live_R: Tensor
    tokens_T: Tensor

    @classmethod
    def of(
        cls,
        slots_R: Tensor,
        query_start_loc_R1: Tensor,
        positions_T: Tensor,
        live_R: Tensor,
        tokens_T: Tensor,
    ) -> PassOfRows:
        """Rows given by the position of every row."""
        first_R = positions_T[query_start_loc_R1[:-1].clamp(max=len(positions_T) - 1)]
        return cls(slots_R, query_start_loc_R1, first_R, live_R, tokens_T)


class LayerState(Protocol):
    """The state of all slots.

    `admit` is called when a request takes a slot, `commit` after each pass, both in the order of the device's work.
    `commit` is recorded in graphs: no reads on the host, no shapes that depend on data.
    """

    def admit(self, slot: int) -> None:
        """Forget the previous request's state."""
        ...

    def commit(self, rows: PassOfRows) -> None:
        """Make the first `live_R` of each request's rows permanent, if the layer wrote rows in this pass.

        A target's rows are contiguous from position 0. A drafter does not see every pass, nor the contents of cached
        pages: `first_R` says where its rows start.
        """
        ...


class StateSpec(Protocol):
    """A layer's declaration of its state."""

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """The memory for `num_slots` slots, the padding slot included."""
        ...
