"""What layers keep of a slot beside pages: state made of the rows that became permanent, and of no others.

While a pass runs, a layer writes what its rows bring, those that will be rejected too. `commit`, which the engine calls
in one place, at the end of a step, makes the live ones permanent: so nothing is ever rolled back.
Shapes: S slots, R requests, T rows of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassOfRows:
    """The rows of a pass, request after request: where each one's begin, the position of its first, how many live."""

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
        """Rows whose positions are known one by one."""
        first_R = positions_T[query_start_loc_R1[:-1].clamp(max=len(positions_T) - 1)]
        return cls(slots_R, query_start_loc_R1, first_R, live_R, tokens_T)


class LayerState(Protocol):
    """The state of all slots. `admit` is called when a request takes a slot, `commit` after each pass; both in the
    order of the device's work, and `commit` as part of what graphs record: no look at the host, no shape that depends
    on data."""

    def admit(self, slot: int) -> None:
        """Forget what was kept for another request."""
        ...

    def commit(self, rows: PassOfRows) -> None:
        """Make the first `live_R` of each request's rows permanent, where the layer has written rows in this pass.

        A target's rows follow each other from position 0. A drafter is not shown every pass, nor what cached pages
        hold: `first_R` says where its rows begin.
        """
        ...


class StateSpec(Protocol):
    """State as a layer declares it."""

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """The memory for so many slots, the one of nobody included."""
        ...
