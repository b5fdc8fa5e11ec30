"""The operators around the products of a mixture of experts: routing, grouping rows by expert, combining outputs.

A row's experts and weights are a function of the row's scores alone; ties go to the lowest expert. The experts' outputs
are added in ascending order of the experts, in fp32.
Shapes: T rows, E experts, K experts per row, P = T * K pairs of row and expert sorted by expert, H width, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

TINY = 1e-20  # prevents division by zero if all scores underflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How scores become experts and weights. `sigmoid`: scores are sigmoids, else a softmax over all experts.

    `normalize`: a row's weights are divided by their sum. Then they are multiplied by `scale`. With `groups` > 1 only
    experts of the `top_groups` groups with the largest sums of their two best scores are candidates.
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
        """(experts int64 [T, K] ascending in each row, weights fp32 [T, K]).

        logits_TE: fp32 scores before sigmoid or softmax; bias_E: fp32, added to the scores for the choice only.
        """
        ...

    def group(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """(source int64 [P]: the row of each pair, place int64 [T, K]: the index of each pair, starts int64 [E +
        1]).
        """
        ...

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """sum over k of weights * y[place], in order, plus base: fp32 [P, H] -> [T, H] of `dtype`."""
        ...
