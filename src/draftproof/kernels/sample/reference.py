"""Law 1's `sample`: filters and Gumbel-max per row, a function of the row alone.

Every filter is a threshold on d = (logit - max) / temperature: a token stays if d >= the row's threshold, so ties at a
boundary are kept together. Order and meaning are vLLM's: min-p, then top-k, then top-p over the remaining tokens.
Shapes: M rows, V columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.kernels.sample.noise import gumbel


def sample_torch(
    logits_MV: Tensor,
    params: RowParams,
    positions_M: Tensor,
    ids_V: Tensor | None,
    failures_M: Tensor | None = None,
) -> Tensor:
    """See `Sample`. A row with NaN, +inf or nothing above -inf has no token."""
    temperature_M = params.temperature_M
    logits_MV = logits_MV.float()
    max_M1 = logits_MV.amax(-1, keepdim=True)
    score_MV = logits_MV - max_M1
    sampled_M = temperature_M > 0
    if _any(sampled_M):
        scaled_MV = _filtered(score_MV, params)
        columns_V = torch.arange(logits_MV.shape[1], device=logits_MV.device) if ids_V is None else ids_V
        noisy_MV = scaled_MV + gumbel(params.seeds_M, positions_M, columns_V)
        score_MV = torch.where(sampled_M[:, None], noisy_MV, score_MV)
    tokens_M = _lowest_argmax(score_MV, ids_V)
    none_M = tokens_M.new_tensor(-1) if failures_M is None else failures_M
    return torch.where(torch.isfinite(max_M1[:, 0]), tokens_M, none_M)


def probabilities_torch(logits_MV: Tensor, params: RowParams) -> Tensor:
    """The distribution that `sample` draws from, fp32 [M, V]; at temperature 0 all mass is on the argmax (the lowest
    id).

    A row with NaN, +inf or nothing above -inf is NaN throughout.
    """
    logits_MV = logits_MV.float()
    max_M1 = logits_MV.amax(-1, keepdim=True)
    score_MV = logits_MV - max_M1
    best_M1 = _lowest_argmax(score_MV, None)[:, None]
    filtered_MV = _filtered(score_MV, params)
    weight_MV = filtered_MV.double().exp_()
    # cumsum adds in column order for any number of rows; torch's sum over a long row does not.
    probs_MV = (weight_MV / weight_MV.cumsum(-1)[:, -1:]).float()
    greedy_MV = torch.zeros_like(probs_MV).scatter_(1, best_M1, 1.0)
    probs_MV = torch.where(params.temperature_M[:, None] > 0, probs_MV, greedy_MV)
    return torch.where(torch.isfinite(max_M1), probs_MV, torch.nan)


def _any(flags: Tensor) -> bool:
    """Whether any flag is set; always True on a device, where doing the work is cheaper than waiting for the answer."""
    return flags.device.type != "cpu" or bool(flags.any())


def _lowest_argmax(score_MV: Tensor, ids_V: Tensor | None) -> Tensor:
    """The lowest id among the largest scores, int64 [M]."""
    if ids_V is None:
        return score_MV.argmax(-1)
    top_MV = score_MV == score_MV.amax(-1, keepdim=True)
    return torch.where(top_MV, ids_V, torch.iinfo(torch.int64).max).amin(-1)


def _filtered(score_MV: Tensor, params: RowParams) -> Tensor:
    """d = score / temperature, -inf for tokens that a filter drops; score is logit - max."""
    temperature_M, top_k_M = params.temperature_M, params.top_k_M
    top_p_M, min_p_M = params.top_p_M, params.min_p_M
    scaled_MV = score_MV / torch.where(temperature_M > 0, temperature_M, 1.0)[:, None]
    filters_M = (top_k_M > 0) | (top_p_M < 1) | (min_p_M > 0)
    if not _any(filters_M):
        return scaled_MV
    threshold_M1 = _threshold(scaled_MV, top_k_M, top_p_M, min_p_M)
    return scaled_MV.masked_fill(scaled_MV < threshold_M1, -torch.inf)


def _threshold(scaled_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor, min_p_M: Tensor) -> Tensor:
    """The smallest d that is kept, fp32 [M, 1]."""
    V = scaled_MV.shape[1]
    threshold_M1 = min_p_M.double().log().float()[:, None]  # p >= min_p * max p; log 0 = -inf keeps all
    if not _any((top_k_M > 0) | (top_p_M < 1)):
        return threshold_M1
    sorted_MV = scaled_MV.sort(-1, descending=True).values
    k_M1 = torch.where((top_k_M > 0) & (top_k_M < V), top_k_M, V)[:, None]
    threshold_M1 = torch.maximum(threshold_M1, sorted_MV.gather(1, k_M1 - 1))
    weight_MV = torch.where(sorted_MV >= threshold_M1, sorted_MV.double().exp(), 0.0)
    mass_MV = weight_MV.cumsum(-1)
    # A token is kept while the mass of the likelier ones is below top_p: the first of a group of ties decides for all.
    inside_MV = mass_MV < top_p_M.double()[:, None] * mass_MV[:, -1:]
    last_M1 = inside_MV.sum(-1, keepdim=True).clamp_(max=V - 1)
    threshold_p_M1 = torch.where(top_p_M[:, None] < 1, sorted_MV.gather(1, last_M1), -torch.inf)
    return torch.maximum(threshold_M1, threshold_p_M1)
