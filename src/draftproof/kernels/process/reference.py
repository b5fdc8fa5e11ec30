"""Processing of logits before the filters: allowed ids, bias, bad words, min_tokens, penalties; a function of the row.

Order and meaning are vLLM's. A row's context is tokens_SL[slot, :position], which contains the round's draft tokens: so
a draft's row counts the drafts before it, without any state. See `spec.py` for the format of a list.
Shapes: M rows, V vocabulary, W words of 32 bits, S slots, L positions, N entries of the longest list, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.process.spec import HEADER, NO_NUMBER, NONE_LEFT
from draftproof.kernels.row_params import CONSTRAINED, MASKED, PENALISED, RowParams


def process_torch(
    logits_MV: Tensor,
    params: RowParams,
    slots_M: Tensor,
    positions_M: Tensor,
    tokens_SL: Tensor,
    lists_SN: Tensor,
    masks_MW: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `Process`."""
    out_MV = logits_MV.float().clone()
    rows = zip(
        slots_M.tolist(),
        positions_M.tolist(),
        params.flags_M.tolist(),
        params.prompt_len_M.tolist(),
        params.held_until_M.tolist(),
        strict=True,
    )
    for m, (slot, position, flags, prompt_len, held_until) in enumerate(rows):
        tokens_P = tokens_SL[slot, :position].long()
        if flags & CONSTRAINED:
            _constrain(out_MV[m], lists_SN[slot], tokens_P, prompt_len, position < held_until)
        if flags & MASKED:
            _mask(out_MV[m], masks_MW[m])
        if flags & PENALISED and position > 0:
            _penalise(out_MV[m], tokens_P, params[slice(m, m + 1)], prompt_len)
    has_numbers_M = torch.isfinite(logits_MV.amax(-1))
    return out_MV, torch.where(has_numbers_M, NONE_LEFT, NO_NUMBER)


def _constrain(row_V: Tensor, list_N: Tensor, tokens_P: Tensor, prompt_len: int, is_early: bool) -> None:
    """Apply the slot's list to one row, in place."""
    numbers, tokens = list_N.tolist(), tokens_P.tolist()
    at_bias, at_words, at_mask, num_stops = numbers[:HEADER]
    if at_mask:
        _mask(row_V, list_N[at_mask:])
    for number in range(numbers[at_bias]):
        at = at_bias + 1 + 2 * number
        row_V[numbers[at]] += list_N[at + 1 : at + 2].view(torch.float32)[0]
    at = at_words + 1
    for _ in range(numbers[at_words]):
        *prefix, last = numbers[at + 1 : at + 1 + numbers[at]]
        begin = len(tokens) - len(prefix)
        if begin >= prompt_len and tokens[begin:] == prefix:
            row_V[last] = -torch.inf
        at += 1 + numbers[at]
    if is_early:
        row_V[list_N[HEADER : HEADER + num_stops].long()] = -torch.inf


def _mask(row_V: Tensor, words_W: Tensor) -> None:
    """Rule out ids whose bit is 0, in place."""
    ids_V = torch.arange(len(row_V), device=row_V.device)
    row_V.masked_fill_((words_W[ids_V // 32] >> (ids_V % 32)) & 1 == 0, -torch.inf)


def _penalise(row_V: Tensor, tokens_P: Tensor, params: RowParams, prompt_len: int) -> None:
    """Apply, in place, the repetition penalty over prompt and output, then frequency and presence over the output."""
    count_V = torch.zeros_like(row_V, dtype=torch.int32)
    ones_P = torch.ones_like(tokens_P[prompt_len:], dtype=torch.int32)
    count_V.index_add_(0, tokens_P[prompt_len:], ones_P)
    count_P, values_P = count_V[tokens_P], row_V[tokens_P]
    values_P = torch.where(values_P > 0, values_P / params.repetition_M, values_P * params.repetition_M)
    values_P = values_P - params.frequency_M * count_P
    row_V[tokens_P] = values_P - params.presence_M * (count_P > 0)
