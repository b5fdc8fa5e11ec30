"""N-gram drafting: copy what followed the most recent earlier occurrence of the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext
from draftproof.schema import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions:
    """Settings of the method: longest and shortest suffix that is looked up, in tokens; one that is left out makes room
    for the other."""

    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.prompt_lookup_min, self.prompt_lookup_max) if x is not None]
        if not all(is_whole(x) for x in given) or not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min!r}, "
                f"prompt_lookup_max={self.prompt_lookup_max!r}: must be integers with 1 <= min <= max"
            )

    @property
    def longest(self) -> int:
        """5, or `prompt_lookup_min` if that is more."""
        return (
            max(5, self.prompt_lookup_min or 0) if self.prompt_lookup_max is None else self.prompt_lookup_max
        )

    @property
    def shortest(self) -> int:
        """2, or `prompt_lookup_max` if that is less."""
        return min(2, self.longest) if self.prompt_lookup_min is None else self.prompt_lookup_min


class NgramDrafter(Drafter):
    """Proposes what `lookup` finds; no match, no draft. It reads the history only, so it keeps no state."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, options: NgramOptions) -> None:
        self._options = options

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        wanted = verified.k_R.tolist()
        tokens = np.zeros((len(wanted), num_drafts), dtype=np.int64)
        counts = np.zeros(len(wanted), dtype=np.int64)
        for r, k in enumerate(wanted):
            if k > 0:
                found = lookup(np.asarray(verified.history(r)), self._options, k)
                tokens[r, : len(found)] = found
                counts[r] = len(found)
        device = verified.k_R.device
        return Proposal(torch.from_numpy(tokens).to(device), torch.from_numpy(counts).to(device))


def build(ctx: DraftContext) -> NgramDrafter:
    return NgramDrafter(parse_options("speculative_config", ctx.options, NgramOptions))


def lookup(history: np.ndarray, options: NgramOptions, num_drafts: int) -> np.ndarray:
    """Up to `num_drafts` tokens that followed the longest suffix's most recent earlier occurrence.

    Example: history a b c a b, longest 2: suffix (a b) occurred at 0, what followed is c a b.
    """
    num = len(history)
    if num < 2:
        return history[:0]
    # candidates end (exclusive) where the token before the end equals the newest one
    ends = np.flatnonzero(history[:-1] == history[-1]) + 1
    length = 1
    longest = ends
    while len(ends) and length < min(options.longest, num - 1):
        ends = ends[ends > length]
        ends = ends[history[ends - 1 - length] == history[num - 1 - length]]
        if not len(ends):
            break
        length += 1
        longest = ends
    if length < options.shortest or not len(longest):
        return history[:0]
    end = int(longest[-1])
    return history[end : end + num_drafts]
