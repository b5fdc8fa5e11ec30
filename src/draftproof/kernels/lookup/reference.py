"""N-gram lookup, the tokens that followed an earlier occurrence of the newest ones: n-gram drafting as one operator.

Integers only, so all versions give the same numbers.
Shapes: S slots, L positions, R requests, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lookup_torch(
    tokens_SL: Tensor,
    length_S: Tensor,
    slots_R: Tensor,
    k_R: Tensor,
    num_drafts: int,
    shortest: int,
    longest: int,
    most_matched: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Lookup`. Its memory grows with R * L."""
    text_RL = tokens_SL.index_select(0, slots_R)
    length_R = length_S.index_select(0, slots_R)
    at_L = torch.arange(text_RL.shape[1], device=text_RL.device)
    alive_RL = at_L < length_R[:, None] - 1
    matched_RL = torch.zeros_like(text_RL, dtype=torch.int64)
    for back in range(longest):  # compares tokens `back` places back
        newest_R1 = (length_R - 1 - back).clamp(min=0)[:, None]
        before_RL = text_RL.roll(back, dims=1)
        alive_RL = alive_RL & (at_L >= back) & (before_RL == text_RL.gather(1, newest_R1))
        matched_RL = matched_RL + alive_RL
    best_R, where_R = (matched_RL * len(at_L) + at_L).max(dim=1)
    follows_R = where_R + 1
    matched_R = best_R // len(at_L)
    alive_R = (matched_R == longest) & (matched_R >= shortest)
    # the match may be longer than what was looked for
    for back in range(longest, min(most_matched, len(at_L))):
        newest_R, before_R = length_R - 1 - back, where_R - back
        alive_R = alive_R & (before_R >= 0)
        both_R2 = text_RL.gather(1, torch.stack((newest_R, before_R), dim=1).clamp(min=0))
        alive_R = alive_R & (both_R2[:, 0] == both_R2[:, 1])
        matched_R = matched_R + alive_R
    count_R = torch.minimum(k_R.clamp(0, num_drafts), length_R - follows_R) * (matched_R >= shortest)
    draft_RK = torch.arange(num_drafts, device=text_RL.device).expand(len(slots_R), -1)
    source_RK = (follows_R[:, None] + draft_RK).clamp(max=len(at_L) - 1)
    tokens_RK = text_RL.gather(1, source_RK).long()
    return tokens_RK * (draft_RK < count_R[:, None]), count_R, matched_R
