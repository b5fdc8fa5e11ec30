"""Keeps a drafter's faults from the user: whatever it does, what comes out is a valid proposal or none.

Shapes: R requests, K drafts.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters.base import Drafter, Draw, Proposal, Verified, no_proposal


@dataclass(slots=True)
class Guarded:
    """A proposal of the right form; its ids and counts are still to be cut. `raised`: there is none, and every
    request's draft state is suspect."""

    proposal: Proposal
    raised: bool = False


class Guard:
    """Runs `propose`, checks what comes back, counts faults, and gives up after `max_faults` of them.

    `trusted` drafters (ours) see live buffers; others get copies, and before each call `refresh` brings up to date what
    they were lent at start. `time_limit` in seconds is checked when a call returns: code that never returns needs a
    process of its own.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        trusted: bool,
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
        self._trusted = trusted
        self._max_faults = max_faults
        self._time_limit = time_limit

    def propose(self, verified: Verified, num_drafts: int) -> Guarded:
        """Never raises for the drafter's sake."""
        if self.off:
            return Guarded(no_proposal(verified))
        start = time.perf_counter()
        try:
            given = verified
            if not self._trusted:
                self._refresh()
                given = _copy(verified)
            proposal = self.drafter.propose(given, num_drafts)
            if not self._trusted:
                _check_form(proposal, verified.num_requests)
            k_R = verified.k_R  # a user's code may well think on the host
            proposal = Proposal(proposal.tokens_RK[:, :num_drafts].to(k_R), proposal.count_R.to(k_R))
        except Exception as error:
            self._count(f"{type(error).__name__}: {error}")
            return Guarded(no_proposal(verified), raised=True)
        took = time.perf_counter() - start
        if self._time_limit is not None and took > self._time_limit:
            self._count(f"took {took:.3f} s, time_limit is {self._time_limit} s")
        return Guarded(proposal)

    def count_bad_ids(self, num_requests: int) -> None:
        """A round in which so many requests' drafts had to be cut at an id."""
        self._count(
            f"ids outside the vocabulary of {self._vocab_size}, or no numbers, for {num_requests} requests"
        )

    def call(self, name: str, *args: Any) -> None:
        """One of the optional verbs (admit, release), guarded alike."""
        verb = getattr(self.drafter, name, None)
        if verb is None or self.off:
            return
        try:
            verb(*args)
        except Exception as error:
            self._count(f"{name}: {type(error).__name__}: {error}")

    def _count(self, what: str) -> None:
        self.num_faults, self.last_fault = self.num_faults + 1, what
        name = type(self.drafter).__name__
        if self.num_faults == self._max_faults:
            self.off = True
            warnings.warn(
                f"drafter {name} switched off after {self.num_faults} faults; output is not affected, decoding goes "
                f"on plainly. Last fault: {what}",
                RuntimeWarning,
                stacklevel=2,
            )


def _check_form(proposal: object, num_requests: int) -> None:
    if not isinstance(proposal, Proposal):
        raise TypeError(f"propose returned {type(proposal).__name__}, not Proposal")
    tokens, count = proposal.tokens_RK, proposal.count_R
    for name, tensor, dims in (("tokens_RK", tokens, 2), ("count_R", count, 1)):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or tensor.shape[0] != num_requests:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"{name} is {shape}, expected {dims} dimensions with {num_requests} requests first"
            )
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected integers")
    if num_requests and not 0 <= int(count.min()) <= int(count.max()) <= tokens.shape[1]:
        raise ValueError(f"count_R={count.tolist()} does not fit tokens_RK of {tokens.shape[1]} columns")


def _copy(verified: Verified) -> Verified:
    """Custom code may write where it likes: nothing it holds is ours."""
    copies: dict[str, Any] = {
        f.name: value.clone()
        for f in dataclasses.fields(verified)
        if isinstance(value := getattr(verified, f.name), Tensor)
    }
    history, draw = verified.history, verified.draw
    return dataclasses.replace(
        verified,
        **copies,
        taps=tuple(t.clone() for t in verified.taps),
        history=lambda r: torch.as_tensor(history(r)).clone(),
        draw=_CopyingDraw(draw),
    )


@dataclass(frozen=True, slots=True)
class _CopyingDraw:
    """A draw that hands out nothing of ours."""

    draw: Draw

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in self.draw.inputs)

    def over(self, inputs: tuple[Tensor, ...]) -> Draw:
        return _CopyingDraw(self.draw.over(inputs))

    def __call__(
        self, logits_MV: Tensor, rows_M: Tensor | None, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        rows_M = None if rows_M is None else rows_M.clone()
        ids_V = None if ids_V is None else ids_V.clone()
        return self.draw(logits_MV.clone(), rows_M, positions_M.clone(), ids_V).clone()
