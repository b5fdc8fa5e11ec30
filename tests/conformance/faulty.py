"""Drafters that do everything wrong that a drafter can do. Each must cost acceptance only."""

from __future__ import annotations

from typing import Any

import torch

from draftproof import DraftSpec, EngineConfig, Proposal, Taps, Verified
from draftproof.drafters.head import DraftMemory


class Faulty:
    """Proposes the newest token twice; subclasses spoil that."""

    spec = DraftSpec(taps=Taps(layers=(4,)))

    def __init__(self, config: EngineConfig) -> None:
        pass

    def propose(self, verified: Verified, num_drafts: int) -> Any:
        tokens_RK = verified.next_R[:, None].expand(-1, num_drafts).clone()
        return self.spoil(verified, tokens_RK, torch.full_like(verified.k_R, num_drafts))

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        raise NotImplementedError


class Raises(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        raise RuntimeError("no idea")


class RaisesInAdmit(Faulty):
    def admit(self, slot: int, tokens: list[int], num_cached: int) -> None:
        tokens.clear()
        raise KeyError(slot)

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK, count_R)


class TooLarge(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK + 1_000_000, count_R)


class Negative(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK * 0 - 7, count_R)


class NotANumber(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK.double() * float("nan"), count_R)


class DrawsFromNotANumber(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        rows = torch.arange(len(count_R))
        logits = torch.full((len(rows), 8192), float("nan"))
        tokens_RK[:, 0] = verified.draw(logits, rows, verified.positions_T[verified.cu_R1[1:] - 1] + 2)
        return Proposal(tokens_RK, count_R)


class CountsTooMany(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK, count_R + 5)


class CountsNegative(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK, count_R - 50)


class WrongShape(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK.flatten(), count_R)


class OneRequestMore(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(torch.cat([tokens_RK, tokens_RK[:1]]), count_R)


class NotAProposal(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return [1, 2, 3]


class Mutates(Faulty):
    """Writes into everything it was given. Its proposals are fine, so this is no fault that can be seen."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        proposal = Proposal(tokens_RK.clone(), count_R.clone())
        history = verified.history(0)
        for tensor in (history, verified.tokens_T, verified.positions_T, verified.cu_R1, verified.slots_R):
            tensor.fill_(3)
        for tensor in (verified.live_R, verified.next_R, verified.k_R, *verified.taps):
            tensor.fill_(5)
        return proposal


class KeepsTheTaps(Faulty):
    """Holds on to what an earlier round gave it and writes into that."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        for tensor in getattr(self, "kept", ()):
            tensor.fill_(float("inf"))
        self.kept = verified.taps
        return Proposal(tokens_RK, count_R)


class SpoilsWhatItWasLent(Faulty):
    """Writes into the block table and runs graphs of its own under the engine's names."""

    def bind(self, memory: DraftMemory) -> None:
        self.memory = memory

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        self.memory.cache.block_table_SB.fill_(0)
        rows = len(verified.tokens_T)
        for sampled in range(1, rows + 1):
            key = ("target", rows, sampled, rows)
            self.memory.graphs.run(key, lambda *given: given, (verified.tokens_T,))
        return Proposal(tokens_RK, count_R)


class RaisesInBind(Faulty):
    def bind(self, memory: DraftMemory) -> None:
        raise OSError("no such thing")
