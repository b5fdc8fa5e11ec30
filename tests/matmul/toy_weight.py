"""A kind of weight of its own: 8-bit integers and a scale for each output, multiplied as the numbers that they are.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.matmul.spec import Candidate, LinearFn
from draftproof.matmul.weights import WeightKind

KIND = "int8"


@dataclass(frozen=True, slots=True)
class Int8:
    codes_NK: Tensor
    scale_N: Tensor
    dtype: torch.dtype

    @classmethod
    def store(cls, weight_NK: Tensor) -> Int8:
        scale_N = weight_NK.float().abs().amax(dim=1).clamp(min=1e-20) / 127
        codes_NK = (weight_NK.float() / scale_N[:, None]).round().to(torch.int8)
        return cls(codes_NK, scale_N, weight_NK.dtype)

    @property
    def kind(self) -> str:
        return KIND

    @property
    def size(self) -> tuple[int, int]:
        return self.codes_NK.shape[0], self.codes_NK.shape[1]

    @property
    def parts(self) -> Int8:
        return self

    def numbers(self) -> Tensor:
        return (self.codes_NK.float() * self.scale_N[:, None]).to(self.dtype)


def candidates(device: torch.device, dense: Sequence[Candidate]) -> list[Candidate]:
    def make(weight: Int8, bias_N: Tensor | None, out_dtype: torch.dtype) -> LinearFn:
        return dense[0].make(weight.numbers(), bias_N, out_dtype)

    return [Candidate("integers", make, dense[0].any_rows, takes=frozenset({KIND}))]


ROW = WeightKind(store=Int8.store, candidates=candidates, itemsize=lambda device, dtype: 1, exact=True)
