"""Cross entropy with the target's probabilities; loss and gradient are computed in one pass, compiled on a GPU.

Shapes: M drafts, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def soft_cross_entropy(logits_MC: Tensor, p_MC: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted loss, its gradient). `p_MC` sums to less than 1, as the draft vocabulary is only a part."""
    x, p = logits_MC.float(), p_MC.float()
    total_M1 = x.logsumexp(-1, keepdim=True)
    mass_M1 = p.sum(-1, keepdim=True)
    loss = (weight_M * (mass_M1[:, 0] * total_M1[:, 0] - (p * x).sum(-1))).sum()
    return loss, (weight_M[:, None] * (mass_M1 * (x - total_M1).exp() - p)).to(logits_MC.dtype)


class _Weighted(torch.autograd.Function):
    """Stores the gradient computed by `loss` instead of its inputs."""

    @staticmethod
    def forward(ctx: Any, loss: Loss, logits_MC: Tensor, p_MC: Tensor, weight_M: Tensor) -> Tensor:
        value, gradient = loss(logits_MC, p_MC, weight_M)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return None, ctx.saved_tensors[0], None, None


def weighted(loss: Loss, logits_MC: Tensor, p_MC: Tensor, weight_M: Tensor) -> Tensor:
    """`loss` as a differentiable function; only a sum may follow, since the incoming gradient is ignored."""
    return _Weighted.apply(loss, logits_MC, p_MC, weight_M)  # type: ignore[no-untyped-call]


def make_loss(num_choices: int, device: torch.device) -> Loss:
    """The loss function for the device; on a GPU compiled here, not during training."""
    if device.type != "cuda":
        return soft_cross_entropy
    compiled: Loss = torch.compile(soft_cross_entropy, dynamic=True)
    for num in (100, 60):
        x = torch.randn(num, num_choices, device=device, dtype=torch.bfloat16)
        compiled(x, x.softmax(-1), torch.ones(num, device=device))
    return compiled
