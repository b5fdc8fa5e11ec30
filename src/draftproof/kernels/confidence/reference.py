"""Confidence in drafts that were copied from earlier text, in plain Python: it runs on the host only.

Shapes: S slots, L positions, R requests, K drafts, M numbers of matching tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.kernels.confidence.record import MOST_MATCHED, MatchRecord

EXPECTED = 0.6  # prior chance of a draft after the fewest matching tokens
PRIOR_WEIGHT = 4.0  # of a prior, in trials


def confidence_torch(
    tokens_SL: Tensor,
    length_S: Tensor,
    slots_R: Tensor,
    tokens_RK: Tensor,
    count_R: Tensor,
    matched_R: Tensor,
    price: Tensor,
    record: MatchRecord,
) -> Tensor:
    """See `Confidence`."""
    others, rows = price.tolist()
    if not rows:
        return count_R.clone()
    slots, counts = slots_R.tolist(), count_R.tolist()
    matched = matched_R.clamp(max=MOST_MATCHED).tolist()
    for slot in slots:
        _learn(tokens_SL[slot], int(length_S[slot]), record, slot)
    chances = chances_of(record)
    found = [num_paying(chances[m:], count, others, rows) for m, count in zip(matched, counts, strict=True)]
    for r, slot in enumerate(slots):
        record.open_S3[slot] = torch.tensor([int(length_S[slot]), counts[r], matched[r]])
        record.drafts_SW[slot, : counts[r]] = tokens_RK[r, : counts[r]]
    return torch.tensor(found, dtype=torch.int64)


def _learn(text_L: Tensor, length: int, record: MatchRecord, slot: int) -> None:
    """Count what became of a slot's last proposal, as far as the tokens since are known."""
    start, count, matched = record.open_S3[slot].tolist()
    known = min(length - start, count)
    if known <= 0:
        return
    is_right = text_L[start : start + known].long() == record.drafts_SW[slot, :known]
    record.count(matched, int(is_right.long().cumprod(0).sum()), known)


def chances_of(record: MatchRecord) -> list[float]:
    """Chance of a draft by matching tokens before it, shrunk towards that with one token less."""
    found = [EXPECTED]
    for hit, tried in zip(record.hits_M.tolist(), record.trials_M.tolist(), strict=True):
        found.append((hit + PRIOR_WEIGHT * found[-1]) / (tried + PRIOR_WEIGHT))
    return found[1:]


def num_paying(chances: Sequence[float], count: int, others: float, rows: float) -> int:
    """Number of drafts before the first that brings less than the tokens per row of the pass without it. Example: a
    pass of one request that takes as long as 3 rows, and drafts with a chance of 0.7: the first pays, 0.7 > 1 / 3; the
    second, 0.49 > 1.7 / 4, too; the third, 0.34 < 2.19 / 5, does not."""
    survival, tokens = 1.0, others + 1.0
    for j in range(count):
        survival *= chances[j]
        if survival * (rows + j) < tokens:
            return j
        tokens += survival
    return count
