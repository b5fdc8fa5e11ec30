"""The operators around the products of a mixture of experts: choosing experts, sorting rows by them, summing up.

A row's experts and their weights are a function of the row's scores alone; ties go to the lowest expert. Its outputs
are added in ascending order of the experts, in fp32.
Shapes: T rows, E experts, K experts a row, P = T * K pairs of row and expert sorted by expert, H width, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

TINY = 1e-20  # keeps a sum of scores that all vanish from dividing by zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How scores become experts and weights. `sigmoid`: else softmax over all experts.

    `normalize`: a row's weights are divided by their sum; then they are multiplied by `scale`. With `groups` > 1 only
    the `top_groups` groups whose two best experts score highest are looked at.
    """

    top_k: int
    sigmoid: bool = False
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


class ExpertOps(Protocol):
    """One implementation of each of the three operators."""

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """(experts int64 [T, K] ascending in each row, weights fp32 [T, K]) of fp32 scores before sigmoid or softmax;
        bias_E: fp32 correction of the choice."""
        ...

    def group(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """(source int64 [P]: the row of each pair, place int64 [T, K]: where a pair went, starts int64 [E + 1])."""
        ...

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """sum over k of weights * y[place], in order, plus base: fp32 [P, H] -> [T, H] of `dtype`."""
        ...
