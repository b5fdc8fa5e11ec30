"""Keeps a drafter's faults from the user: whatever it does, what comes out is a valid proposal or none.

Shapes: R requests, K drafts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters.base import Drafter, Draw, Proposal, Verified, no_proposal, tell
from draftproof.drafters.contained import DrafterError, contained, describe


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
            proposal = self._ask(verified, num_drafts)
        except Exception as error:
            self._count(str(error) if isinstance(error, DrafterError) else describe(error))
            return Guarded(no_proposal(verified), raised=True)
        took = time.perf_counter() - start
        if self._time_limit is not None and took > self._time_limit:
            self._count(f"took {took:.3f} s, time_limit is {self._time_limit} s")
        return Guarded(proposal)

    def _ask(self, verified: Verified, num_drafts: int) -> Proposal:
        if self._trusted:
            proposal = self.drafter.propose(verified, num_drafts)
            return Proposal(proposal.tokens_RK[:, :num_drafts], proposal.count_R)
        self._refresh()
        given = _copy(verified)
        with contained():
            ids = _plain_ids(self.drafter.propose(given, num_drafts), verified.num_requests, num_drafts)
        k_R, width = verified.k_R, max(map(len, ids), default=0)
        padded = [row + [0] * (width - len(row)) for row in ids]
        tokens_RK = torch.tensor(padded, dtype=torch.int64, device=k_R.device).view(len(ids), width)
        return Proposal(tokens_RK, torch.tensor([len(row) for row in ids], device=k_R.device))

    def count_bad_ids(self, num_requests: int) -> None:
        """A round in which so many requests' drafts had to be cut at an id."""
        self._count(
            f"ids outside the vocabulary of {self._vocab_size}, or no numbers, for {num_requests} requests"
        )

    def call(self, name: str, *args: Any) -> None:
        """One of the optional verbs (admit, release), guarded alike."""
        if self.off:
            return
        try:
            with contextlib.nullcontext() if self._trusted else contained():
                tell(self.drafter, name, *args)
        except Exception as error:
            self._count(f"{name}: {error if isinstance(error, DrafterError) else describe(error)}")

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


def _plain_ids(proposal: object, num_requests: int, num_drafts: int) -> list[list[int]]:
    """What a user's `propose` returned, as a list of drafts a request, made of nothing but Python's own ints."""
    if isinstance(proposal, Proposal):
        _check_form(proposal, num_requests)
        counts = proposal.count_R.tolist()
        rows = [row[:n] for row, n in zip(proposal.tokens_RK.tolist(), counts, strict=True)]
    elif isinstance(proposal, (list, tuple)):
        rows = [list(row.tolist() if hasattr(row, "tolist") else row) for row in proposal]
    else:
        raise TypeError(f"propose returned {type(proposal).__name__}, not Proposal or a list of lists of ids")
    if len(rows) != num_requests:
        raise TypeError(f"propose returned drafts for {len(rows)} requests, expected {num_requests}")
    return [[_plain_id(token) for token in row[:num_drafts]] for row in rows]


def _plain_id(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError("a draft is a bool, expected an integer")
    plain = int(operator.index(token))
    return plain if -1 <= plain < 1 << 31 else -1  # no vocabulary has it, whichever it is


def _check_form(proposal: Proposal, num_requests: int) -> None:
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
        draw=_CopyingDraw(draw, verified.num_requests, verified.k_R.device),
    )


@dataclass(frozen=True, slots=True)
class _CopyingDraw:
    """A draw that hands out nothing of ours, and takes nothing that compiled code would read beyond its end."""

    draw: Draw
    num_requests: int
    device: torch.device

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in self.draw.inputs)

    def over(self, inputs: tuple[Tensor, ...]) -> Draw:
        return dataclasses.replace(self, draw=self.draw.over(inputs))

    def __call__(
        self, logits_MV: Tensor, rows_M: Tensor | None, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        if logits_MV.dim() != 2:
            raise ValueError(f"draw: logits of shape {tuple(logits_MV.shape)}, expected two dimensions")
        num_rows, size = logits_MV.shape
        rows_M = self._taken("rows", rows_M, num_rows)
        if rows_M is None and num_rows != self.num_requests:
            raise ValueError(f"draw: {num_rows} rows of logits for {self.num_requests} requests, and no rows")
        if (
            rows_M is not None
            and num_rows
            and not 0 <= int(rows_M.min()) <= int(rows_M.max()) < self.num_requests
        ):
            raise ValueError(
                f"draw: rows={rows_M.tolist()!r:.80}: requests go from 0 to {self.num_requests - 1}"
            )
        positions_M = self._taken("positions", positions_M, num_rows)
        logits_MV = self._on_device("logits", logits_MV).float().contiguous().clone()
        return self.draw(logits_MV, rows_M, positions_M, self._taken("ids", ids_V, size)).clone()

    def _taken(self, name: str, given: Any, length: int) -> Any:
        """A copy of so many integers; None where none are given."""
        if given is None:
            return None
        if given.shape != (length,) or given.is_floating_point():
            raise ValueError(
                f"draw: {name} of shape {tuple(given.shape)} and {given.dtype}, expected {length} integers"
            )
        return self._on_device(name, given).long().contiguous().clone()

    def _on_device(self, name: str, given: Tensor) -> Tensor:
        if given.device != self.device:
            raise ValueError(f"draw: {name} on {given.device}, expected {self.device}")
        return given
