"""Isolates a drafter's faults: whatever the drafter does, the engine gets a valid proposal or none.

Shapes: S slots, R requests.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftproof.drafters.base import (
    Drafter,
    DraftRuntime,
    Proposal,
    RoundSize,
    Verified,
    name_of,
    no_proposal,
)
from draftproof.drafters.contained import describe
from draftproof.models.cost import Cost
from draftproof.runtime.graphs import Graphs

log = logging.getLogger(__name__)

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class DrafterSandbox(Drafter):
    """A wrapper for a drafter that may fail: counts faults, and switches it off after `max_faults`. A chain has one per
    member, so that a fault affects only the member that caused it.

    Built-in drafters, and trusted drafters of users, see live buffers (`new_graphs` is None). Any other gets copies
    (`UsersDrafter`), of the block table too, and `new_graphs` makes its own `Graphs`. `time_limit` in seconds is
    checked when a call returns: code that never returns needs a process of its own.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        max_faults: int,
        time_limit: float | None,
        new_graphs: Callable[[], Graphs] | None = None,
    ) -> None:
        self.drafter = drafter
        self.spec = drafter.spec
        self.name = name_of(drafter)
        self.num_faults = 0
        self.last_fault = ""
        self.off = False
        self.error: Exception | None = None  # raised by the last `propose`
        self._new_graphs = new_graphs
        self._vocab_size = vocab_size
        self._max_faults = max_faults
        self._time_limit = time_limit
        self._lost: set[int] = set()  # slots whose drafter state is lost: no drafts until the next admit
        self._able_S: Tensor | None = None  # 0 for those slots, or for all once it is off; else 1
        # pairs of the engine's block table and the drafter's copy
        self._tables: list[tuple[Tensor, Tensor]] = []

    @property
    def is_trusted(self) -> bool:
        return self._new_graphs is None

    @property
    def must_watch(self) -> bool:
        """Whether each call must run this Python code (time limit, switched off) and so may not be recorded."""
        return self.off or self._time_limit is not None

    def bind(self, runtime: DraftRuntime) -> None:
        """`Drafter.bind`; exceptions propagate to the caller."""
        table_SB = runtime.cache.block_table_SB
        self._able_S = torch.ones(len(table_SB), dtype=torch.int64, device=table_SB.device)
        if self._new_graphs is not None:
            cache, self._tables = runtime.cache.on_copies()
            runtime = replace(runtime, cache=cache, graphs=self._new_graphs())
        self.drafter.bind(runtime)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """`Drafter.propose`. The drafter's exceptions are not raised but kept in `error`."""
        self.error = None
        if self.off:
            return no_proposal(verified)
        start = time.perf_counter()
        try:
            for table_SB, copy_SB in self._tables:
                copy_SB.copy_(table_SB)
            proposal = self.drafter.propose(verified, num_drafts)
            proposal = replace(proposal, tokens_RK=proposal.tokens_RK[:, :num_drafts])
        except Exception as error:
            self.error = error
            self._count(describe(error), error)
            return no_proposal(verified)
        took = time.perf_counter() - start
        if self._time_limit is not None and took > self._time_limit:
            self._count(f"took {took:.3f} s, time_limit is {self._time_limit} s")
        return proposal

    def pass_over(self) -> None:
        """Note that a round does not ask the drafter, so that there is no `error`."""
        self.error = None

    def drafts_for(self, slot: int) -> bool:
        """Whether the drafter may still draft for the request in this slot."""
        return not self.off and slot not in self._lost

    def able(self, slots_R: Tensor) -> Tensor:
        """`drafts_for` of each slot as 1 or 0, on the device, so that a recorded pass reads the current value."""
        assert self._able_S is not None, "bind comes before propose"
        return self._able_S[slots_R]

    def lose(self, slots: Sequence[int]) -> None:
        """Mark the drafter's state of these slots as lost: a round failed, so their rows are missing from it."""
        if not self.spec.kv and not self.spec.states:
            return
        self._lost.update(slots)
        if self._able_S is not None:
            for slot in slots:
                self._able_S[slot] = 0

    def count_bad_ids(self, slots: Sequence[int]) -> None:
        """Count one fault for a round in which the drafts of these slots were cut at an invalid id."""
        self._count(
            f"ids outside the vocabulary of {self._vocab_size}, or no numbers, for {len(slots)} requests"
        )
        self.lose(slots)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        """`Drafter.admit`; exceptions are counted as faults."""
        if slot in self._lost:
            self._lost.discard(slot)
            if self._able_S is not None and not self.off:
                self._able_S[slot] = 1
        self._notify("admit", lambda: self.drafter.admit(slot, tokens, num_cached))

    def release(self, slot: int) -> None:
        """`Drafter.release`; exceptions are counted as faults."""
        self._notify("release", lambda: self.drafter.release(slot))

    def cost(self, size: RoundSize) -> Cost | None:
        return self.drafter.cost(size)

    def _notify(self, name: str, call: Callable[[], None]) -> None:
        if self.off:
            return
        try:
            call()
        except Exception as error:
            self._count(f"{name}: {describe(error)}", error)

    def _count(self, what: str, error: Exception | None = None) -> None:
        self.num_faults = self.num_faults + 1
        self.last_fault = what
        if self.num_faults == 1:
            log.warning(
                "drafter %s: its first fault (output is not affected): %s%s", self.name, what, _places(error)
            )
        if self.num_faults == self._max_faults:
            self.off = True
            if self._able_S is not None:
                self._able_S.zero_()
            warnings.warn(
                f"drafter {self.name} switched off after {self.num_faults} faults; output is not affected, decoding "
                f"goes on without it. Last fault: {what}",
                RuntimeWarning,
                stacklevel=2,
            )


def _places(error: Exception | None) -> str:
    """The error's traceback from the first frame outside this package on, without its message: reading that may run
    user code, and was done once already."""
    if error is None:
        return ""
    origin = error.__cause__ or error
    frames = traceback.extract_tb(origin.__traceback__)
    users = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_PACKAGE)), 0)
    return "\n" + "".join(traceback.format_list(frames[users:])).rstrip()
