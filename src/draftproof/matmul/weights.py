"""The kinds of weights: how each keeps a weight, and which products take it. A row here enrols one.

A kind is a file (`quantized.py` is fp8's) with what it stores and the candidates for it. Candidates declare which kinds
they take (`spec.Candidate.takes`), and the kind is in the certificate's key.
Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftproof.matmul import quantized
from draftproof.matmul.spec import DENSE, Candidate


class Weight(Protocol):
    """A weight [N, K] as its kind keeps it."""

    @property
    def kind(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that it multiplies."""
        ...

    @property
    def parts(self) -> Any:
        """What candidates for this kind make a product of."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Numbers of the rows' dtype, and nothing else."""

    weight_NK: Tensor

    @property
    def kind(self) -> str:
        return DENSE

    @property
    def size(self) -> tuple[int, int]:
        return self.weight_NK.shape[0], self.weight_NK.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight_NK.dtype

    @property
    def parts(self) -> Tensor:
        return self.weight_NK


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightKind:
    """`store` makes it of a weight as read. `candidates(device, dense)`: those for it alone, perhaps made of those for
    dense weights. `itemsize(device, dtype)`: bytes of an element as products read it, scales not counted. `exact`:
    its products may get certificates, else they are for drafters only."""

    store: Callable[[Tensor], Weight]
    candidates: Callable[[torch.device, Sequence[Candidate]], list[Candidate]]
    itemsize: Callable[[torch.device, torch.dtype], int]
    exact: bool


KINDS: dict[str, WeightKind] = {
    DENSE: WeightKind(
        store=Dense,
        candidates=lambda device, dense: [],
        itemsize=lambda device, dtype: dtype.itemsize,
        exact=True,
    ),
    quantized.KIND: WeightKind(
        store=quantized.Fp8.store, candidates=quantized.candidates, itemsize=quantized.itemsize, exact=False
    ),
}


def parts(kind: str, weight_NK: Tensor) -> Any:
    """What candidates for a kind make a product of, for a weight as read."""
    return KINDS[kind].store(weight_NK).parts
