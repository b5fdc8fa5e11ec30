"""N-gram drafting: copy what followed the most recent earlier occurrence of the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext
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
    """Proposes what `Ops.lookup` finds; no match, no draft. It reads only the known tokens, so it keeps no state."""

    spec = DraftSpec()

    def __init__(self, options: NgramOptions) -> None:
        self._options = options

    def bind(self, runtime: DraftRuntime) -> None:
        assert runtime.known is not None
        self._lookup = runtime.ops.lookup
        self._known = runtime.known
        self._longest = min(self._options.longest, runtime.known.tokens_SL.shape[1])

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        found = self._lookup(
            *self._known,
            verified.slots_R,
            verified.k_R,
            num_drafts,
            self._options.shortest,
            self._longest,
        )
        return Proposal(*found)


def build(ctx: DraftContext) -> NgramDrafter:
    return NgramDrafter(parse_options("speculative_config", ctx.options, NgramOptions))
