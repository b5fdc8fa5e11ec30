"""Cross entropy with the target's probabilities, whose gradient is made with it in one pass, compiled on a GPU.

Shapes: M drafts, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def soft_cross_entropy(logits_MC: Tensor, p_MC: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum, and its gradient. `p_MC` sums to less than 1: the draft vocabulary is a part."""
    x, p = logits_MC.float(), p_MC.float()
    total_M1 = x.logsumexp(-1, keepdim=True)
    mass_M1 = p.sum(-1, keepdim=True)
    loss = (weight_M * (mass_M1[:, 0] * total_M1[:, 0] - (p * x).sum(-1))).sum()
    return loss, (weight_M[:, None] * (mass_M1 * (x - total_M1).exp() - p)).to(logits_MC.dtype)


class _Weighted(torch.autograd.Function):
    """Keeps the gradient that `loss` made, instead of what it was made from."""

    @staticmethod
    def forward(ctx: Any, loss: Loss, logits_MC: Tensor, p_MC: Tensor, weight_M: Tensor) -> Tensor:
        value, gradient = loss(logits_MC, p_MC, weight_M)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return None, ctx.saved_tensors[0], None, None


def weighted(loss: Loss, logits_MC: Tensor, p_MC: Tensor, weight_M: Tensor) -> Tensor:
    """`loss` as torch differentiates it; nothing but a sum may follow, since the gradient is taken as it is."""
    return _Weighted.apply(loss, logits_MC, p_MC, weight_M)  # type: ignore[no-untyped-call]


def make_loss(num_choices: int, device: torch.device) -> Loss:
    """The loss as the device runs it best; compiled now, so that training does not wait."""
    if device.type != "cuda":
        return soft_cross_entropy
    compiled: Loss = torch.compile(soft_cross_entropy, dynamic=True)
    for num in (100, 60):
        x = torch.randn(num, num_choices, device=device, dtype=torch.bfloat16)
        compiled(x, x.softmax(-1), torch.ones(num, device=device))
    return compiled
