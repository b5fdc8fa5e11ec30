"""Confidence in drafts that were copied from earlier text, in plain Python: it runs on the host only.

Shapes: S slots, L positions, R requests, K drafts, B branchings, M numbers of matching tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftproof.kernels.confidence.record import MOST_MATCHED, Branching, MatchRecord

EXPECTED = 0.6  # prior chance of a draft after the fewest matching tokens
PRIOR_WEIGHT = 4.0  # of a prior, in trials
# Tokens among which branchings are looked for: the time for that must not grow with the text.
LOOKED_BACK = 4096


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
    others, rows = price[:2].tolist()
    if not rows:
        return count_R.clone()
    slots, counts = slots_R.tolist(), count_R.tolist()
    matched = matched_R.clamp(max=MOST_MATCHED).tolist()
    for slot in slots:
        _learn(tokens_SL[slot], int(length_S[slot]), record, slot)
    chances_BM = chances_of(record)
    found = []
    for r, slot in enumerate(slots):
        length, count = int(length_S[slot]), counts[r]
        text_L, drafts = tokens_SL[slot], tokens_RK[r, :count].tolist()
        places = (branching(text_L, length, drafts[:j]) for j in range(count))
        chances = (chances_BM[place][matched[r] + j] for j, place in enumerate(places))
        found.append(num_paying(chances, others, rows))
        record.open_S3[slot] = torch.tensor([length, count, matched[r]])
        record.drafts_SW[slot, :count] = tokens_RK[r, :count]
    return torch.tensor(found, dtype=torch.int64)


def _learn(text_L: Tensor, length: int, record: MatchRecord, slot: int) -> None:
    """Count what became of a slot's last proposal, as far as the tokens since are known."""
    start, count, matched = record.open_S3[slot].tolist()
    known = min(length - start, count)
    if known <= 0:
        return
    drafts = record.drafts_SW[slot, :known]
    is_right = text_L[start : start + known].long() == drafts
    num_right = int(is_right.long().cumprod(0).sum())
    num_tried = min(num_right + 1, known)
    branchings = [branching(text_L, start, drafts[:j].tolist()) for j in range(num_tried)]
    record.count(matched, branchings, num_right)


def branching(text_L: Tensor, length: int, drafts: Sequence[int]) -> Branching:
    """The `Branching` after `drafts`, which follow the first `length` tokens of a text. Example: a b c a b d, and the
    drafts a b: the two latest places after a b have c and d, so it is `DIFFERENT`."""
    known_L = text_L[max(0, length - LOOKED_BACK) : length].long()
    before, newest = [0, 0, *known_L[-2:].tolist(), *drafts][-2:]
    is_place = (known_L[:-2] == before) & (known_L[1:-1] == newest)
    places = is_place.nonzero()[-2:, 0]
    if len(places) < 2:
        return Branching.UNKNOWN
    one, other = known_L[places + 2].tolist()
    return Branching.ALIKE if one == other else Branching.DIFFERENT


def chances_of(record: MatchRecord) -> list[list[float]]:
    """Chance of a draft by branching and matching tokens before it, shrunk towards that with one token less."""
    found = []
    for hits, trials in zip(record.hits_BM.tolist(), record.trials_BM.tolist(), strict=True):
        chances = [EXPECTED]
        for hit, tried in zip(hits, trials, strict=True):
            chances.append((hit + PRIOR_WEIGHT * chances[-1]) / (tried + PRIOR_WEIGHT))
        found.append(chances[1:])
    return found


def num_paying(chances: Iterable[float], others: float, rows: float) -> int:
    """Number of drafts before the first that brings less than the tokens per row of the pass without it, of drafts with
    these `chances`. Example: a pass of one request that takes as long as 3 rows, and drafts with a chance of 0.7: the
    first pays, 0.7 > 1 / 3; the second, 0.49 > 1.7 / 4, too; the third, 0.34 < 2.19 / 5, does not."""
    survival, tokens, number = 1.0, others + 1.0, 0
    for chance in chances:
        survival *= chance
        if survival * (rows + number) < tokens:
            break
        tokens += survival
        number += 1
    return number
