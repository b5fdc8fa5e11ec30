"""Processing of logits before the filters: allowed ids, bad words, min_tokens, bias, penalties.

Order and meaning are vLLM's. Everything is a function of the row's context, tokens_SL[slot, :position], where draft
tokens of the same round already stand: so the row of a draft counts the drafts before it, without any state.
Shapes: M rows, V vocabulary, S slots, L positions, P rows of one request or rows with penalties, W bad words,
C tokens of the longest bad word but its last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.sampling.params import BadWords, Constraints, SamplingTable


def process(
    table: SamplingTable,
    logits_MV: Tensor,
    slots_M: Tensor,
    positions_M: Tensor,
    tokens_SL: Tensor,
    slots_host: Sequence[int],
) -> Tensor:
    """Processed logits [M, V], a new tensor, or `logits_MV` itself where no row asks for anything.

    positions_M: the position each row samples; slots_host: slots_M as the host knows it. A row of a request without
    features is copied, not touched.
    """
    if table.graph_safe(slots_host):
        return logits_MV
    out_MV = logits_MV.clone()
    for slot in dict.fromkeys(s for s in slots_host if s in table.constraints):
        rows_P = _index([m for m, s in enumerate(slots_host) if s == slot], out_MV.device)
        _constrain(table.constraints[slot], out_MV, rows_P, positions_M[rows_P], tokens_SL[slot])
    penalised = [m for m, s in enumerate(slots_host) if s in table.penalised]
    if len(penalised) == len(slots_host):
        _penalise(table, out_MV, slots_M, positions_M, tokens_SL)
    elif penalised:
        rows_P = _index(penalised, out_MV.device)
        logits_PV = out_MV[rows_P]
        _penalise(table, logits_PV, slots_M[rows_P], positions_M[rows_P], tokens_SL)
        out_MV[rows_P] = logits_PV
    return out_MV


def _index(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _constrain(c: Constraints, out_MV: Tensor, rows_P: Tensor, positions_P: Tensor, tokens_L: Tensor) -> None:
    """Apply one request's constraints to its rows of `out_MV`."""
    logits_PV = out_MV[rows_P]
    if c.forbidden_V is not None:
        logits_PV.masked_fill_(c.forbidden_V, -torch.inf)
    if c.bad_words is not None:
        banned_PV = _banned(c.bad_words, logits_PV.shape, positions_P, tokens_L, c.prompt_len)
        logits_PV.masked_fill_(banned_PV, -torch.inf)
    if c.stop_N is not None:
        early_P1 = (positions_P < c.prompt_len + c.min_tokens)[:, None]
        logits_PV[:, c.stop_N] = logits_PV[:, c.stop_N].masked_fill_(early_P1, -torch.inf)
    if c.bias_N is not None:
        assert c.bias_ids_N is not None
        logits_PV[:, c.bias_ids_N] += c.bias_N
    out_MV[rows_P] = logits_PV


def _banned(
    words: BadWords, shape: torch.Size, positions_P: Tensor, tokens_L: Tensor, prompt_len: int
) -> Tensor:
    """Which ids would complete a bad word: bool [P, V]. A word counts only if it lies wholly in the output."""
    width = words.prefix_WC.shape[1]
    back_C = torch.arange(-width, 0, device=tokens_L.device)
    window_PC = tokens_L[(positions_P[:, None] + back_C).clamp_(min=0)]
    same_PWC = (window_PC[:, None] == words.prefix_WC) | (words.prefix_WC < 0)
    begins_in_output_PW = positions_P[:, None] - words.length_W >= prompt_len
    complete_PW = same_PWC.all(-1) & begins_in_output_PW
    count_PV = torch.zeros(shape, dtype=torch.int32, device=tokens_L.device)
    count_PV.scatter_add_(1, words.last_W.expand_as(complete_PW), complete_PW.int())
    return count_PV > 0


def _penalise(
    table: SamplingTable, logits_PV: Tensor, slots_P: Tensor, positions_P: Tensor, tokens_SL: Tensor
) -> None:
    """In place: repetition penalty over prompt and output, then frequency and presence over the output.

    Works on the logits of the context's tokens only; a token that stands there twice gets the same value twice.
    """
    length = tokens_SL.shape[1]
    if positions_P.device.type == "cpu":
        length = max(int(positions_P.max()), 1)
    at_L = torch.arange(length, device=tokens_SL.device)
    known_PL = at_L < positions_P[:, None]
    output_PL = known_PL & (at_L >= table.prompt_len_S[slots_P][:, None])
    tokens_PL = tokens_SL[slots_P, :length].long()
    tokens_PL = torch.where(known_PL, tokens_PL, tokens_PL[:, :1])  # unknown places count as the first token
    zeros_PV = torch.zeros(logits_PV.shape, dtype=torch.int32, device=logits_PV.device)
    count_PL = zeros_PV.scatter_add_(1, tokens_PL, output_PL.int()).gather(1, tokens_PL)

    values_PL = logits_PV.gather(1, tokens_PL)
    repetition_P1 = table.repetition_S[slots_P][:, None]
    values_PL = torch.where(values_PL > 0, values_PL / repetition_P1, values_PL * repetition_P1)
    values_PL = values_PL - table.frequency_S[slots_P][:, None] * count_PL
    values_PL = values_PL - table.presence_S[slots_P][:, None] * (count_PL > 0)
    logits_PV.scatter_(1, tokens_PL, values_PL)
