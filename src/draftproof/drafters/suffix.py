"""Suffix drafting: continue as earlier texts did after the longest matching suffixes. Oliaro et al., arXiv 2411.04975.

Texts are the request's own prompt and output, and earlier outputs of other requests.
Shapes: S slots, L positions, R requests, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext
from draftproof.kernels.continuation.index import END, SlotTexts, TextIndex
from draftproof.kernels.continuation.spec import Limits
from draftproof.schema import check_number, check_whole

# Bounds of the fields below, in their order; texts have at most 2**20 tokens, proposals at most 64.
_BOUNDS = ((2, 1 << 20), (0, 1 << 20), (2, 1 << 26), (0.0, 64.0), (0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions:
    """Settings of the method. `max_tree_depth`: longest suffix looked up, in tokens; `max_spec_factor`: maximum drafts
    per matched token; `min_token_prob`: the proposal ends where its estimated probability falls below. Outputs are
    shared across requests up to both `max_cached` limits; 0 requests: not shared."""

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 1 << 20  # at most 20 bytes each, allocated at the start
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        for f, (low, high) in zip(fields(self), _BOUNDS, strict=True):
            name = f"speculative_config: {f.name}"
            value = getattr(self, f.name)
            if isinstance(low, int) and isinstance(high, int):
                check_whole(name, value, low, high)
            else:
                check_number(name, value, low, high)


class SuffixDrafter(Drafter):
    """Proposes the continuation that `Ops.continuation` finds. No match, no draft. It runs on the host."""

    def __init__(self, options: SuffixOptions, max_positions: int, *, waits: bool) -> None:
        """`waits`: the host must wait for the device to know the tokens."""
        self.spec = DraftSpec(host_tokens=waits)
        self._limits = Limits(
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        self._max_positions = max_positions
        num_texts = options.suffix_decoding_max_cached_requests
        num_tokens = options.suffix_decoding_max_cached_tokens
        self._shared = TextIndex(num_tokens, num_texts) if num_texts else None
        self._num_given: dict[int, int] = {}  # slot -> number of tokens that its request was admitted with

    def bind(self, runtime: DraftRuntime) -> None:
        assert runtime.known is not None
        self._ops = runtime.ops.continuation
        self._known = runtime.known
        self._own = SlotTexts(len(runtime.known.length_S))

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self._own.put(slot, TextIndex(self._max_positions))
        self._num_given[slot] = len(tokens)

    def release(self, slot: int) -> None:
        """Keep the output for other requests; prompts and failed admissions are not kept."""
        text, num_given = self._own.put(slot, None), self._num_given.pop(slot, 0)
        if text is None or self._shared is None or text.end <= num_given:
            return
        self._shared.begin_text()
        # so that no match crosses two texts' ends
        self._ops.add(self._shared, [*text.tail(num_given)[-self._shared.capacity + 1 :], END])

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        slots_R, k_R, device = verified.slots_R, verified.k_R, verified.slots_R.device
        known, row_R = self._known.on_host(slots_R)
        tokens_RK, count_R = self._ops.propose(
            self._own,
            self._shared,
            slots_R.cpu(),
            known.tokens_SL,
            known.length_S,
            row_R,
            k_R.cpu(),
            num_drafts,
            self._limits,
        )
        return Proposal(tokens_RK.to(device), count_R.to(device))


def build(ctx: DraftContext) -> SuffixDrafter:
    options = parse_options("speculative_config", ctx.options, SuffixOptions)
    return SuffixDrafter(options, ctx.max_positions, waits=ctx.device.type != "cpu")
