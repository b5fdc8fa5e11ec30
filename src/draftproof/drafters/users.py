"""Wrappers for users' drafters: copies as input, containment while it runs, checked proposals; or trusted access.

Shapes: R requests, K drafts, M rows that are sampled, V columns of logits.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Draw, Proposal, RoundSize, Verified
from draftproof.drafters.contained import DrafterError, contained
from draftproof.models.cost import Cost


class TrustedDrafter(Drafter):
    """A wrapper for a user's drafter that is trusted: it sees live buffers, and only the shapes of its proposals are
    checked."""

    def __init__(self, drafter: Any, name: str) -> None:
        """Call inside `contained`: the user's `spec` is read here, and never again."""
        self.drafter: Any = drafter
        self.name = name
        self.spec: DraftSpec = drafter.spec

    def bind(self, runtime: DraftRuntime) -> None:
        try:
            with contained():
                _call_if_there(self.drafter, "bind", runtime)
        except DrafterError as error:
            raise DrafterError(f"{self.name}.bind(runtime) raised {error}") from error

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        _call_if_there(self.drafter, "admit", slot, tokens, num_cached)

    def release(self, slot: int) -> None:
        _call_if_there(self.drafter, "release", slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        found = self.drafter.propose(verified, num_drafts)
        if not isinstance(found, Proposal):
            ids = _plain_ids(found, verified.num_requests, num_drafts)
            return _proposal(ids, verified.k_R.device)
        _check_shapes(found, verified.num_requests)
        return found

    def cost(self, size: RoundSize) -> Cost | None:
        """Unknown if it has a KV cache; else assumed to be a lookup, which costs nothing."""
        return None if self.spec.kv else Cost()


class UsersDrafter(Drafter):
    """A wrapper for a user's drafter. Raises `DrafterError` for its faults; `name` is for messages."""

    def __init__(self, drafter: Any, name: str) -> None:
        """Call inside `contained`: the user's `spec` is read here, and never again."""
        self.drafter: Any = drafter
        self.name = name
        # it is lent no price, so that it ends no proposals by that
        self.spec: DraftSpec = dataclasses.replace(drafter.spec, estimates=False, stops=False)

    def bind(self, runtime: DraftRuntime) -> None:
        lent = dataclasses.replace(runtime, known=None, price=None)
        try:
            with contained():
                _call_if_there(self.drafter, "bind", lent)
        except DrafterError as error:
            raise DrafterError(f"{self.name}.bind(runtime) raised {error}") from error

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        with contained():
            _call_if_there(self.drafter, "admit", slot, list(tokens), num_cached)

    def release(self, slot: int) -> None:
        with contained():
            _call_if_there(self.drafter, "release", slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        given = _copy(verified)
        with contained():
            ids = _plain_ids(self.drafter.propose(given, num_drafts), verified.num_requests, num_drafts)
        return _proposal(ids, verified.k_R.device)

    def cost(self, size: RoundSize) -> Cost | None:
        """Unknown if it has a KV cache; else assumed to be a lookup, which costs nothing."""
        return None if self.spec.kv else Cost()


def _call_if_there(drafter: Any, name: str, *args: object) -> None:
    """Call a method that a user's class may leave out."""
    method = getattr(drafter, name, None)
    if method is not None:
        method(*args)


def _proposal(ids: list[list[int]], device: torch.device) -> Proposal:
    """Lists of drafts, one per request, as a proposal."""
    counts = [len(row) for row in ids]
    width = max(counts, default=0)
    padded = [row + [0] * (width - len(row)) for row in ids]
    tokens_RK = torch.tensor(padded, dtype=torch.int64, device=device).view(len(ids), width)
    return Proposal(tokens_RK, torch.tensor(counts, dtype=torch.int64, device=device))


def _plain_ids(proposal: object, num_requests: int, num_drafts: int) -> list[list[int]]:
    """The result of a user's `propose` as one list of plain Python ints per request."""
    if isinstance(proposal, Proposal):
        _check_shapes(proposal, num_requests)
        _check_counts(proposal, num_requests)
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
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"a draft is of type {type(token).__name__}, expected an integer")
    plain = int(operator.index(token))
    return plain if -1 <= plain < 1 << 31 else -1  # -1 stands for any id outside every vocabulary


def _check_shapes(proposal: Proposal, num_requests: int) -> None:
    tokens = proposal.tokens_RK
    count = proposal.count_R
    for name, tensor, dims in (("tokens_RK", tokens, 2), ("count_R", count, 1)):
        if not isinstance(tensor, Tensor) or tensor.dim() != dims or tensor.shape[0] != num_requests:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"{name} is {shape}, expected {dims} dimensions with {num_requests} requests first"
            )
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected integers")


def _check_counts(proposal: Proposal, num_requests: int) -> None:
    """Check the counts' values; on a GPU this waits for them."""
    tokens, count = proposal.tokens_RK, proposal.count_R
    if num_requests and not 0 <= int(count.min()) <= int(count.max()) <= tokens.shape[1]:
        raise ValueError(f"count_R={count.tolist()} does not fit tokens_RK of {tokens.shape[1]} columns")


def _copy(verified: Verified) -> Verified:
    """A deep copy of `verified`, because user code may write to its tensors."""
    copies: dict[str, Any] = {
        f.name: value.clone()
        for f in dataclasses.fields(verified)
        if isinstance(value := getattr(verified, f.name), Tensor)
    }
    history = verified.history
    draw = verified.draw
    return dataclasses.replace(
        verified,
        **copies,
        taps=tuple(t.clone() for t in verified.taps),
        given=None,
        history=lambda r: torch.as_tensor(history(r)).clone(),
        draw=_CopyingDraw(draw, verified.num_requests, verified.k_R.device),
    )


@dataclass(frozen=True, slots=True)
class _CopyingDraw:
    """A draw for user code: returns copies, and checks shapes so that compiled code never reads out of bounds."""

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
        """A checked copy of `length` integers; None if `given` is None."""
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
