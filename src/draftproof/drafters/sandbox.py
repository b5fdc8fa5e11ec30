"""Keeps a drafter's faults from the user: whatever it does, the result is a proposal or none."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftproof.drafters.base import Drafter, Proposal, Verified, name_of, no_proposal
from draftproof.drafters.contained import describe

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ProposalResult:
    """A proposal of the right shape; its ids and counts are still to be cut. `raised`: the drafter raised, so there are
    no drafts, and every request's draft state is suspect."""

    proposal: Proposal
    raised: bool = False


class DrafterSandbox:
    """Runs `propose`, counts faults, and gives up after `max_faults` of them.

    Drafters of ours see live buffers; a user's is a `UsersDrafter`, which gets copies, and before each call `refresh`
    brings up to date what it was lent at start. `time_limit` in seconds is checked when a call returns: code that never
    returns needs a process of its own.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        max_faults: int,
        time_limit: float | None,
        refresh: Callable[[], object] = lambda: None,
    ) -> None:
        self.drafter = drafter
        self._refresh = refresh
        self.num_faults = 0
        self.last_fault = ""
        self.off = False
        self._vocab_size = vocab_size
        self._max_faults = max_faults
        self._time_limit = time_limit

    @property
    def must_watch(self) -> bool:
        """Whether each call has to come through here: one that is run again without Python has no clock."""
        return self.off or self._time_limit is not None

    def propose(self, verified: Verified, num_drafts: int) -> ProposalResult:
        """Never raises for the drafter's sake."""
        if self.off:
            return ProposalResult(no_proposal(verified))
        start = time.perf_counter()
        try:
            self._refresh()
            proposal = self.drafter.propose(verified, num_drafts)
            proposal = replace(proposal, tokens_RK=proposal.tokens_RK[:, :num_drafts])
        except Exception as error:
            self._count(describe(error), error)
            return ProposalResult(no_proposal(verified), raised=True)
        took = time.perf_counter() - start
        if self._time_limit is not None and took > self._time_limit:
            self._count(f"took {took:.3f} s, time_limit is {self._time_limit} s")
        return ProposalResult(proposal)

    def count_bad_ids(self, num_requests: int) -> None:
        """Count a fault: in this round the drafts of `num_requests` requests had to be cut at an id."""
        self._count(
            f"ids outside the vocabulary of {self._vocab_size}, or no numbers, for {num_requests} requests"
        )

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        """`Drafter.admit`; what it raises is counted."""
        self._notify("admit", slot, tokens, num_cached)

    def release(self, slot: int) -> None:
        """`Drafter.release`; what it raises is counted."""
        self._notify("release", slot)

    def _notify(self, name: str, *args: Any) -> None:
        if self.off:
            return
        try:
            getattr(self.drafter, name)(*args)
        except Exception as error:
            self._count(f"{name}: {describe(error)}", error)

    def _count(self, what: str, error: Exception | None = None) -> None:
        self.num_faults = self.num_faults + 1
        self.last_fault = what
        name = name_of(self.drafter)
        if self.num_faults == 1:
            log.warning(
                "drafter %s: its first fault (output is not affected): %s%s", name, what, _places(error)
            )
        if self.num_faults == self._max_faults:
            self.off = True
            warnings.warn(
                f"drafter {name} switched off after {self.num_faults} faults; output is not affected, decoding goes "
                f"on plainly. Last fault: {what}",
                RuntimeWarning,
                stacklevel=2,
            )


def _places(error: Exception | None) -> str:
    """Files and lines that an error came through. Its own words have been read, and are not asked for again: they may
    be foreign code."""
    if error is None:
        return ""
    origin = error.__cause__ or error
    return "\n" + "".join(traceback.format_tb(origin.__traceback__)).rstrip()
