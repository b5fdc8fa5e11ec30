"""N-gram drafting: copy what followed the most recent earlier occurrence of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext
from draftproof.kernels.confidence.record import MOST_MATCHED, MatchRecord
from draftproof.schema import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions:
    """Settings of the method: longest and shortest suffix that is looked up, in tokens. The default of either adapts to
    the other's value."""

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
    """Proposes what `Ops.lookup` finds; no match, no draft. Where it is known what a row costs, `Ops.confidence` ends
    proposals that do not pay, by what became of earlier ones."""

    spec = DraftSpec(estimates=True)

    def __init__(self, options: NgramOptions, num_drafts: int) -> None:
        self.options = options
        self._num_drafts = num_drafts

    def bind(self, runtime: DraftRuntime) -> None:
        assert runtime.known is not None
        self._lookup = runtime.ops.lookup
        self._known = runtime.known
        self._longest = min(self.options.longest, runtime.known.tokens_SL.shape[1])
        self._price = runtime.price
        self._most_matched = self._longest if self._price is None else max(self._longest, MOST_MATCHED)
        self._confidence = runtime.ops.confidence
        self.record = MatchRecord.empty(len(self._known.length_S), self._num_drafts)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self.record.close(slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        tokens_RK, count_R, matched_R = self._lookup(
            *self._known,
            verified.slots_R,
            verified.k_R,
            num_drafts,
            self.options.shortest,
            self._longest,
            self._most_matched,
        )
        if self._price is not None:
            drafts = (tokens_RK, count_R, matched_R)
            count_R = self._confidence(*self._known, verified.slots_R, *drafts, self._price, self.record)
        return Proposal(tokens_RK, count_R)


def build(ctx: DraftContext) -> NgramDrafter:
    options = parse_options("speculative_config", ctx.options, NgramOptions)
    return NgramDrafter(options, ctx.num_drafts)
