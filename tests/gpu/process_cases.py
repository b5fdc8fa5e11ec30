"""Random requests and rows for the operator that processes logits."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.sampling.params import SamplingTable
from draftproof.types import SamplingParams

NUM_SLOTS, LENGTH, NUM_ROWS = 9, 60, 48


Given = tuple[Tensor, RowParams, Tensor, Tensor, Tensor, Tensor, Tensor]


def case(width: int, device: torch.device) -> Given:
    """The arguments of `Process`. Slot 0 needs no processing; some rows hold NaN, inf, or only -inf."""
    rng = random.Random(width)
    few = [rng.randrange(width) for _ in range(6)]  # texts consist of these, so that tokens repeat
    tokens = [[rng.choice(few) for _ in range(LENGTH)] for _ in range(NUM_SLOTS)]
    table = SamplingTable(NUM_SLOTS, width, device, max_rows=NUM_ROWS)
    for slot in range(1, NUM_SLOTS):
        wants = random.Random(slot)
        bias = {rng.randrange(width): rng.uniform(-9, 9) for _ in range(200)}
        words = [[rng.choice(few) for _ in range(rng.randrange(1, 4))] for _ in range(9)]
        params = SamplingParams(
            repetition_penalty=wants.choice([1.0, 0.7, 1.3]),
            presence_penalty=wants.choice([0.0, 0.4]),
            frequency_penalty=wants.choice([0.0, 0.1, -0.3]),
            min_tokens=wants.choice([0, 9]),
            max_tokens=None,
            logit_bias=wants.choice([None, bias]),
            allowed_token_ids=wants.choice([None, None, few + list(range(0, width, 3))]),
        )
        own_words = words if wants.random() < 0.5 else None
        table.admit(slot, params, slot, 8, frozenset(few[:2]), own_words, is_masked=slot % 3 == 0)
    logits_MV = torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(width))
    logits_MV[3, 5], logits_MV[4, 6], logits_MV[5] = torch.nan, torch.inf, -torch.inf
    slots_M = torch.tensor([m % NUM_SLOTS for m in range(NUM_ROWS)], device=device)
    positions_M = torch.tensor([rng.randrange(1, LENGTH + 1) for _ in range(NUM_ROWS)], device=device)
    tokens_SL = torch.tensor(tokens, dtype=torch.int32, device=device)
    row_bytes = 4 * table.masks_MW.shape[1]
    table.load_masks([(m, rng.randbytes(2 * row_bytes)) for m in range(0, NUM_ROWS, 2)])
    lists = table.lists_SN, table.masks_MW
    return logits_MV.to(device), table.params_S[slots_M], slots_M, positions_M, tokens_SL, *lists
