"""Processing of logits before the filters: allowed ids, bias, bad words, min_tokens, penalties; a function of the row.

Order and meaning are vLLM's. A row's context is tokens_SL[slot, :position], where draft tokens of the same round
already stand: so the row of a draft counts the drafts before it, without any state.

Each slot has a list of int32, which `pack_list` writes: where bias, words and mask begin (0: no mask), number of stop
ids, the stop ids; number of biases, an id and the bits of a fp32 each; number of bad words, length and ids each; the
mask, a bit an id. Where a grammar decides what may come next the host gives each row a mask of its own, read where
the slot is `MASKED`. Shapes: M rows, V vocabulary, W words of 32 bits, S slots, L positions, N numbers of the longest
list, P positions.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from draftproof.kernels.native import Library
from draftproof.kernels.row_params import CONSTRAINED, MASKED, PENALISED, RowParams

NO_NUMBER = -1  # in place of a token: the target's logits held NaN or inf
NONE_LEFT = -2  # or they were fine, and what the request asks for ruled every token out
HEADER = 4


def pack_list(
    stop_ids: Sequence[int],
    bias: Mapping[int, float],
    words: Sequence[Sequence[int]],
    allowed: Collection[int] | None,
    vocab_size: int,
) -> list[int]:
    """What a slot's list says."""
    out = [0, 0, 0, len(stop_ids), *stop_ids]
    out[0] = len(out)
    out.append(len(bias))
    for token, value in bias.items():
        out += (token, *struct.unpack("<i", struct.pack("<f", value)))
    out[1] = len(out)
    out.append(len(words))
    for word in words:
        out += (len(word), *word)
    if allowed is not None:
        out[2] = len(out)
        mask = [0] * -(-vocab_size // 32)
        for token in allowed:
            mask[token // 32] |= 1 << token % 32
        out += (bits - (1 << 32) if bits >> 31 else bits for bits in mask)
    return out


def process_torch(
    logits_MV: Tensor,
    params: RowParams,
    slots_M: Tensor,
    positions_M: Tensor,
    tokens_SL: Tensor,
    lists_SN: Tensor,
    masks_MW: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `ops.Process`."""
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
    """In place: what the slot's list asks of one row."""
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
    """In place: ids whose bit is 0 are ruled out."""
    ids_V = torch.arange(len(row_V), device=row_V.device)
    row_V.masked_fill_((words_W[ids_V // 32] >> (ids_V % 32)) & 1 == 0, -torch.inf)


def _penalise(row_V: Tensor, tokens_P: Tensor, params: RowParams, prompt_len: int) -> None:
    """In place: repetition penalty over prompt and output, then frequency and presence over the output."""
    count_V = torch.zeros_like(row_V, dtype=torch.int32)
    ones_P = torch.ones_like(tokens_P[prompt_len:], dtype=torch.int32)
    count_V.index_add_(0, tokens_P[prompt_len:], ones_P)
    count_P, values_P = count_V[tokens_P], row_V[tokens_P]
    values_P = torch.where(values_P > 0, values_P / params.repetition_M, values_P * params.repetition_M)
    values_P = values_P - params.frequency_M * count_P
    row_V[tokens_P] = values_P - params.presence_M * (count_P > 0)


class ProcessCompiled:
    """`process_torch` in C++, rows in parallel."""

    def __init__(self, library: Library) -> None:
        self._run, self._pack = library.packed("dp_process", "9P5q")

    def __call__(
        self,
        logits_MV: Tensor,
        params: RowParams,
        slots_M: Tensor,
        positions_M: Tensor,
        tokens_SL: Tensor,
        lists_SN: Tensor,
        masks_MW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `ops.Process`."""
        logits_MV = logits_MV.float().contiguous()
        packed_MC = params.packed_MC.contiguous()
        slots_M, positions_M = slots_M.contiguous(), positions_M.contiguous()
        rows, width = logits_MV.shape
        out_MV, failures_M = torch.empty_like(logits_MV), slots_M.new_empty(rows)
        given = (
            logits_MV,
            packed_MC,
            slots_M,
            positions_M,
            tokens_SL,
            lists_SN,
            masks_MW,
            out_MV,
            failures_M,
        )
        sizes = (rows, width, tokens_SL.shape[1], lists_SN.shape[1], torch.get_num_threads())
        self._run(self._pack(*[x.data_ptr() for x in given], *sizes), out_MV, failures_M)
        return out_MV, failures_M
