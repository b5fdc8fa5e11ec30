"""The kinds of weights: how each stores a weight, and which products take it. KINDS lists them.

A kind is a file (`quantized.py` is fp8's) with its storage format and candidates. Candidates declare which kinds they
take (`spec.Candidate.takes`), and the kind is in the certificate's key.
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
    """A weight [N, K] as stored by its kind."""

    @property
    def kind(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows it multiplies."""
        ...

    @property
    def parts(self) -> Any:
        """The input from which this kind's candidates make a product."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """A plain matrix in the rows' dtype."""

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
    """A kind of weight.

    `store` converts a weight as read. `candidates(device, dense)`: candidates for this kind alone, possibly built from
    those for dense weights. `itemsize(device, dtype)`: bytes of an element as products read it, scales not counted.
    `exact`: its products can be certified; otherwise they are for drafters only.
    """

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
    """The input from which a kind's candidates make a product, for a weight as read."""
    return KINDS[kind].store(weight_NK).parts
