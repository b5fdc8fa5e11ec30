"""What fp32 results are held against: the same arithmetic in fp64, and how far fp32 may be from it.

Two fp32 implementations differ by the noise of both, and how much that is depends on the model and on how the
processor at hand adds up. fp64 is the same everywhere. How far fp32 may be from it is measured in fp64 too: each
weight is moved by half a unit in fp32's last place, up or down by chance, and what that does to the result is the
noise of one rounding a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftproof.models.weights import Weights

SEEDS = range(4)
# An fp32 pass rounds sums, norms, angles and scores too. Measured over all models here and five ways of adding up:
# transformers in fp32 is up to 5.4 times the noise away from fp64, and we are up to 7.9 times, on each of the five.
ROUNDINGS = 16
READING = (torch.asarray, torch.frombuffer, torch.Tensor.view)


class Double(TorchFunctionMode):
    """Computes in fp64 whatever asks for fp32; bytes that a file calls fp32 are read as that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **given)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def jittered(weight: Tensor, generator: torch.Generator) -> Tensor:
    """In fp64, each number half a unit in fp32's last place up or down."""
    up = torch.randint(0, 2, weight.shape, generator=generator)
    return weight.double() * (1 + 2.0**-24 * (2 * up - 1))


def doubled(folder: Path, seed: int | None) -> Weights:
    """A folder's tensors in fp64, jittered where there is a seed."""
    tensors = load_file(folder / "model.safetensors")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        real = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        tensors |= {name: jittered(tensor, generator) for name, tensor in real.items()}
    return Weights.of(tensors, str(folder))


@dataclass(frozen=True)
class Exact:
    """A result in fp64, and its noise: how far it moves where the weights do."""

    value: Tensor
    noise: float

    @property
    def bound(self) -> float:
        """How far fp32 may be from it."""
        return ROUNDINGS * self.noise

    def check(self, found: Tensor) -> None:
        assert found.dtype == torch.float32 and found.shape == self.value.shape
        assert torch.equal(found.isfinite(), self.value.isfinite())
        error = (found.double() - self.value).abs().max().item()
        assert error <= self.bound, f"{error:.1e} from fp64, the bound is {self.bound:.1e}"


def settle(run: Callable[[int | None], Sequence[Tensor]]) -> list[Exact]:
    """The results of `run`, which computes in fp64: with the weights as they are (None), or jittered with a seed."""
    values = run(None)
    assert all(value.dtype == torch.float64 for value in values)
    moved = [run(seed) for seed in SEEDS]
    noise = [
        max((others[i] - value).abs().max().item() for others in moved) for i, value in enumerate(values)
    ]
    return [Exact(value, n) for value, n in zip(values, noise, strict=True)]
