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

from draftproof.kernels.native import DTYPE_CODES, Library
from draftproof.kernels.norm import row_sum

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


class TorchExperts:
    """`ExpertOps` in torch: the twin."""

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See `ExpertOps`."""
        scores_TE = 1.0 / (1.0 + torch.exp(-logits_TE)) if routing.sigmoid else self._softmax(logits_TE)
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if routing.groups > 1:
            choice_TE = _keep_groups(choice_TE, routing)
        order_TE = choice_TE.sort(dim=-1, descending=True, stable=True).indices
        experts_TK = order_TE[:, : routing.top_k].sort(dim=-1).values
        weights_TK = scores_TE.gather(1, experts_TK)
        if routing.normalize:
            total_T1 = torch.zeros_like(weights_TK[:, :1])
            for column_T1 in weights_TK.split(1, dim=1):
                total_T1 = total_T1 + column_T1
            weights_TK = weights_TK / (total_T1 + TINY)
        return experts_TK, weights_TK * routing.scale

    def group(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertOps`."""
        order_P = experts_TK.flatten().sort(stable=True).indices
        place_TK = torch.empty_like(order_P)
        place_TK[order_P] = torch.arange(len(order_P), device=order_P.device)
        counts_E = torch.bincount(experts_TK.flatten(), minlength=num_experts)
        starts_E1 = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
        return order_P // experts_TK.shape[1], place_TK.view_as(experts_TK), starts_E1

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `ExpertOps`."""
        total_TH = y_PH.new_zeros(place_TK.shape[0], y_PH.shape[1])
        for place_T, weight_T in zip(place_TK.unbind(1), weights_TK.unbind(1), strict=True):
            total_TH = total_TH + weight_T[:, None] * y_PH[place_T]
        return (total_TH if base_TH is None else total_TH + base_TH.float()).to(dtype)

    def _softmax(self, logits_TE: Tensor) -> Tensor:
        """Softmax in a fixed order of sums; torch's own may choose its layout by the number of rows."""
        exps_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
        return exps_TE / row_sum(exps_TE)


def _keep_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """`choice_TE` with -inf for the experts of all but the best groups."""
    inside_TGE = choice_TE.unflatten(1, (routing.groups, -1))
    best_TG2 = inside_TGE.sort(dim=-1, descending=True).values[..., :2]
    score_TG = best_TG2[..., 0] + best_TG2[..., 1]
    order_TG = score_TG.sort(dim=-1, descending=True, stable=True).indices
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(
        1, order_TG[:, : routing.top_groups], True
    )
    return inside_TGE.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


TORCH_EXPERTS = TorchExperts()


class CompiledExperts:
    """`ExpertOps` in csrc/experts.cpp; dtypes it does not know go to the twin."""

    def __init__(self, library: Library) -> None:
        self._route, self._pack_route = library.packed("dp_route", "4P8qd")
        self._group, self._pack_group = library.packed("dp_group", "4P3q")
        self._combine, self._pack_combine = library.packed("dp_combine", "5P5q")

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See `ExpertOps`."""
        assert logits_TE.dtype == torch.float32 and (bias_E is None or bias_E.dtype == torch.float32)
        logits_TE = logits_TE.contiguous()
        rows, num_experts = logits_TE.shape
        experts_TK = torch.empty((rows, routing.top_k), dtype=torch.int64)
        weights_TK = torch.empty((rows, routing.top_k), dtype=torch.float32)
        args = self._pack_route(
            logits_TE.data_ptr(),
            0 if bias_E is None else bias_E.data_ptr(),
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            rows,
            num_experts,
            routing.top_k,
            routing.sigmoid,
            routing.normalize,
            routing.groups,
            routing.top_groups,
            torch.get_num_threads(),
            routing.scale,
        )
        self._route(args, experts_TK, weights_TK)
        return experts_TK, weights_TK

    def group(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertOps`."""
        pairs = experts_TK.numel()
        top_k = experts_TK.shape[1]
        source_P = torch.empty(pairs, dtype=torch.int64)
        place_TK = torch.empty_like(experts_TK)
        starts_E1 = torch.empty(num_experts + 1, dtype=torch.int64)
        tensors = (experts_TK, source_P, place_TK, starts_E1)
        args = self._pack_group(*(t.data_ptr() for t in tensors), pairs, top_k, num_experts)
        self._group(args, source_P, place_TK, starts_E1)
        return source_P, place_TK, starts_E1

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `ExpertOps`."""
        code = DTYPE_CODES.get(dtype)
        if code is None or (base_TH is not None and base_TH.dtype != dtype):
            return TORCH_EXPERTS.combine(y_PH, place_TK, weights_TK, base_TH, dtype)
        assert y_PH.dtype == torch.float32
        y_PH = y_PH.contiguous()
        base_TH = None if base_TH is None else base_TH.contiguous()
        rows, top_k = place_TK.shape
        width = y_PH.shape[1]
        out_TH = torch.empty((rows, width), dtype=dtype)
        args = self._pack_combine(
            y_PH.data_ptr(),
            place_TK.data_ptr(),
            weights_TK.data_ptr(),
            0 if base_TH is None else base_TH.data_ptr(),
            out_TH.data_ptr(),
            rows,
            top_k,
            width,
            code,
            torch.get_num_threads(),
        )
        self._combine(args, out_TH)
        return out_TH
