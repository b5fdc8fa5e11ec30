"""Routing, grouping rows by expert and combining outputs, in torch. Shapes as in kernels/experts/spec.py."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.experts.spec import TINY, Routing
from draftproof.kernels.sums import row_sum


class TorchExperts:
    """`ExpertOps` in torch: the reference."""

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
        """Softmax with a fixed order of sums; torch's may choose its layout by the number of rows."""
        exps_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
        return exps_TE / row_sum(exps_TE)


def _keep_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """`choice_TE` with -inf for the experts outside the best groups."""
    inside_TGE = choice_TE.unflatten(1, (routing.groups, -1))
    best_TG2 = inside_TGE.sort(dim=-1, descending=True).values[..., :2]
    score_TG = best_TG2[..., 0] + best_TG2[..., 1]
    order_TG = score_TG.sort(dim=-1, descending=True, stable=True).indices
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(
        1, order_TG[:, : routing.top_groups], True
    )
    return inside_TGE.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


TORCH_EXPERTS = TorchExperts()
