"""Faulty drafters, one for each thing that a drafter can do wrong. Each may cost acceptance only."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import DraftSpec, EngineConfig, Proposal, Taps, Verified
from draftproof.drafters.base import DraftRuntime


class Faulty:
    """Proposes the newest token twice; subclasses spoil the proposal."""

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
        tokens_RK[:, 0] = verified.draw(
            logits, rows, verified.positions_T[verified.query_start_loc_R1[1:] - 1] + 2
        )
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
    """Writes into everything it was given. Its proposals are valid, so no fault can be detected."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        proposal = Proposal(tokens_RK.clone(), count_R.clone())
        history = verified.history(0)
        for tensor in (
            history,
            verified.tokens_T,
            verified.positions_T,
            verified.query_start_loc_R1,
            verified.slots_R,
        ):
            tensor.fill_(3)
        for tensor in (verified.live_R, verified.next_R, verified.k_R, *verified.taps):
            tensor.fill_(5)
        return proposal


class KeepsTheTaps(Faulty):
    """Keeps the tensors of an earlier round and writes into them."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        for tensor in getattr(self, "kept", ()):
            tensor.fill_(float("inf"))
        self.kept = verified.taps
        return Proposal(tokens_RK, count_R)


class SpoilsWhatItWasLent(Faulty):
    """Writes into the block table, and runs graphs of its own with the engine's keys."""

    def bind(self, runtime: DraftRuntime) -> None:
        self.memory = runtime

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        self.memory.cache.block_table_SB.fill_(0)
        rows = len(verified.tokens_T)
        for sampled in range(1, rows + 1):
            key = ("target", rows, sampled, rows)
            self.memory.graphs.run(key, lambda *given: given, (verified.tokens_T,))
        return Proposal(tokens_RK, count_R)


class Exits(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        raise SystemExit(3)


class ClosesGenerators(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        raise GeneratorExit


class ExitsInRelease(Faulty):
    def release(self, slot: int) -> None:
        raise SystemExit(3)

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK, count_R)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise self


class RaisesWhatCannotBeShown(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        raise UnspeakableError


class Touchy(torch.Tensor):
    """A tensor that can be read, but raises in every computation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("__get__", "dim", "is_floating_point", "is_complex", "min", "max", "tolist"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UnspeakableError


class GivesTouchyTensors(Faulty):
    """Not a fault: the engine only reads the tensors."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK.as_subclass(Touchy), count_R.as_subclass(Touchy))


class TouchyToTheEnd(Touchy):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnspeakableError


class GivesTensorsThatCannotBeRead(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return Proposal(tokens_RK.as_subclass(TouchyToTheEnd), count_R.as_subclass(TouchyToTheEnd))


class GivesListsOfOtherThings(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return [["a"] for _ in count_R]


class GivesHugeNumbers(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return [[10**30] for _ in count_R]


class DrawsOnAnotherDevice(Faulty):
    """Compiled code would dereference an invalid pointer."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        logits = torch.zeros(len(count_R), 8192, device="meta")
        verified.draw(logits, None, verified.positions_T[verified.query_start_loc_R1[1:] - 1] + 2)


class DrawsOfTooFewPositions(Faulty):
    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        verified.draw(torch.zeros(len(count_R), 8192), None, torch.zeros(0, dtype=torch.int64))


class GivesLists(Faulty):
    """Not a fault: a list of drafts per request is a valid proposal."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        return [row.tolist() if r % 2 else tuple(row) for r, row in enumerate(tokens_RK)]


class Meddles(Faulty):
    """Changes global state of the process; its proposals are valid."""

    def spoil(self, verified: Verified, tokens_RK: torch.Tensor, count_R: torch.Tensor) -> Any:
        self.meddle()
        return Proposal(tokens_RK, count_R)

    def meddle(self) -> None:
        """What all subclasses do, at once."""
        for kind in Meddles.__subclasses__():
            kind.meddle(self)  # type: ignore[arg-type]


class Blanks(TorchDispatchMode):
    """Makes every operator return zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if isinstance(found, torch.Tensor) and found.is_floating_point() else found


class MeddlesWithModes(Meddles):
    """Leaves modes entered, as an unfinished generator does. Must be the first subclass: when such a mode is freed,
    much later, it restores the state of when it was entered."""

    kept: Any = ()

    def meddle(self) -> None:
        self.kept = [torch.inference_mode(), torch.device("meta"), Blanks()]
        for mode in self.kept:
            mode.__enter__()


class MeddlesWithRounding(Meddles):
    def meddle(self) -> None:
        ctypes.CDLL(None).fesetround(0x800)  # upwards


class MeddlesWithDenormals(Meddles):
    def meddle(self) -> None:
        torch.set_flush_denormal(True)


class MeddlesWithTheDevice(Meddles):
    def meddle(self) -> None:
        torch.set_default_device("meta")


class MeddlesWithTheDtype(Meddles):
    def meddle(self) -> None:
        torch.set_default_dtype(torch.float64)


class MeddlesWithThreads(Meddles):
    def meddle(self) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)


class MeddlesWithFlags(Meddles):
    def meddle(self) -> None:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.set_autocast_enabled("cpu", True)


class RaisesInBind(Faulty):
    def bind(self, runtime: DraftRuntime) -> None:
        raise OSError("no such thing")
