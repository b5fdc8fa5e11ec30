"""Keeps a drafter's faults from the user: whatever it does, what comes out is a valid proposal or none.

Shapes: R requests, K drafts.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters.base import Drafter, Proposal, Verified

BAD_IDS = 1  # seen on the device, so counted when the host hears of it
RAISED = 2  # counted already


@dataclass(slots=True)
class Guarded:
    """A clean proposal. `broken_R` (int64): what broke a request's draft state, 0 = nothing."""

    proposal: Proposal
    broken_R: Tensor


class Guard:
    """Runs `propose`, checks what comes back, counts faults, and gives up after `max_faults` of them.

    `trusted` drafters (ours) see live buffers; others get copies. `time_limit` in seconds is checked when a call
    returns: code that never returns needs a process of its own.
    """

    def __init__(
        self, drafter: Drafter, *, vocab_size: int, trusted: bool, max_faults: int, time_limit: float | None
    ) -> None:
        self.drafter = drafter
        self.num_faults = 0
        self.off = False
        self._vocab_size = vocab_size
        self._trusted = trusted
        self._max_faults = max_faults
        self._time_limit = time_limit

    def propose(self, verified: Verified, num_drafts: int) -> Guarded:
        """Never raises for the drafter's sake. Counts are trimmed to k_R and cut at the first id out of range."""
        num_requests = len(verified.num_rows_R)
        if self.off:
            return no_proposal(verified)
        start = time.perf_counter()
        try:
            given = verified if self._trusted else _copy(verified)
            proposal = self.drafter.propose(given, num_drafts)
            _check_form(proposal, num_requests)
        except Exception as error:
            self._count(f"{type(error).__name__}: {error}")
            return no_proposal(verified, RAISED)
        took = time.perf_counter() - start
        if self._time_limit is not None and took > self._time_limit:
            self._count(f"took {took:.3f} s, time_limit is {self._time_limit} s")
        tokens_RK = proposal.tokens_RK[:, :num_drafts].long()
        claimed_R = torch.minimum(proposal.count_R.long(), verified.k_R).clamp_(0, tokens_RK.shape[1])
        claimed_RK = torch.arange(tokens_RK.shape[1], device=tokens_RK.device) < claimed_R[:, None]
        valid_RK = (tokens_RK >= 0) & (tokens_RK < self._vocab_size) & claimed_RK
        count_R = valid_RK.long().cumprod(1).sum(1)
        broken_R = (count_R < claimed_R).long() * BAD_IDS
        return Guarded(Proposal(tokens_RK.clamp(0, self._vocab_size - 1), count_R), broken_R)

    def count_bad_ids(self, num_requests: int) -> None:
        """A round in which so many requests turned out to be broken by BAD_IDS."""
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
        self.num_faults += 1
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


def no_proposal(verified: Verified, broken: int = 0) -> Guarded:
    """Nothing for anybody."""
    k_R = verified.k_R
    nothing = Proposal(k_R.new_zeros((len(k_R), 0)), torch.zeros_like(k_R))
    return Guarded(nothing, torch.full_like(k_R, broken))


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
        num_rows_R=tuple(verified.num_rows_R),
        history=lambda r: torch.as_tensor(history(r)).clone(),
        draw=lambda logits, rows, positions, ids=None: draw(
            logits.clone(), rows.clone(), positions.clone(), None if ids is None else ids.clone()
        ).clone(),
    )
