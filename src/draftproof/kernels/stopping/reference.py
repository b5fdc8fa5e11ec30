"""When a drafter that makes one draft after the other stops, in plain Python: it runs on the host only.

Shapes: R requests, V columns of logits, S slots, L positions, B bins of confidence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.stopping.record import MOST_KEPT, StopRecord, bin_of


def stopping_torch(
    step: int,
    logits_RV: Tensor,
    drawn_R: Tensor,
    slots_R: Tensor,
    k_R: Tensor,
    tokens_SL: Tensor,
    length_S: Tensor,
    price: Tensor,
    record: StopRecord,
    count_R: Tensor,
) -> None:
    """See `Stopping`."""
    of_draft, of_row = price.tolist()[2:]
    is_free = not (of_draft or of_row)
    slots = slots_R.tolist()
    if not step:
        count_R.zero_()
        record.is_over_1.zero_()
        record.survival_S[slots_R] = 1.0
        for slot in () if is_free else slots:
            _learn(tokens_SL[slot], int(length_S[slot]), record, slot)
    if is_free:
        count_R.copy_(k_R.clamp(max=step + 1))
        return
    if int(record.is_over_1):
        return
    confidence_R = torch.softmax(logits_RV.float(), -1).amax(-1)
    chances, gained, num_going_on = record.chances(), 0.0, 0
    for r, slot in enumerate(slots):
        survival = float(record.survival_S[slot])
        if step >= int(k_R[r]) or not survival:
            continue
        its_bin = bin_of(float(confidence_R[r]))
        if step < MOST_KEPT:
            record.drafts_SW[slot, step], record.bins_SW[slot, step] = drawn_R[r], its_bin
            record.open_S2[slot, 0], record.open_S2[slot, 1] = length_S[slot], step + 1
        count_R[r] = step + 1
        survival *= chances[its_bin]
        expected = survival * chances[its_bin]
        goes_on = step + 1 < int(k_R[r]) and expected >= of_row
        record.survival_S[slot] = survival if goes_on else 0.0
        if goes_on:
            gained += expected - of_row
            num_going_on += 1
    record.is_over_1.fill_(not num_going_on or gained < of_draft)


def _learn(text_L: Tensor, length: int, record: StopRecord, slot: int) -> None:
    """Count what became of a slot's last proposal, as far as the tokens since are known."""
    start, count = record.open_S2[slot].tolist()
    known = min(length - start, count)
    record.open_S2[slot] = 0
    if known <= 0:
        return
    is_right = text_L[start : start + known].long() == record.drafts_SW[slot, :known]
    num_right = int(is_right.long().cumprod(0).sum())
    record.count(record.bins_SW[slot, : min(num_right + 1, known)].tolist(), num_right)
