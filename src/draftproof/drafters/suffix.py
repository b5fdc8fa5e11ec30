"""Suffix drafting: go on as earlier texts did after the longest suffixes met there. Oliaro et al., arXiv 2411.04975.

Texts are the request's own prompt and output, and earlier answers to others. Shapes: C places, K drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext
from draftproof.drafters.suffix_text import END, SuffixIndex
from draftproof.schema import check_number, check_whole

# of the fields below, in their order; no text is longer than 2**20 tokens, and no proposal than 64
_BOUNDS = ((2, 1 << 20), (0, 1 << 20), (2, 1 << 26), (0.0, 64.0), (0.0, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOptions:
    """`max_tree_depth`: longest suffix looked up, in tokens; `max_spec_factor`: most drafts per token of it;
    `min_token_prob`: a draft that is less likely, by counting, ends the proposal. Answers are shared across requests
    up to both `max_cached`; 0 requests: not at all."""

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 1 << 20  # at most 20 bytes each, taken at the start
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        for f, (low, high) in zip(fields(self), _BOUNDS, strict=True):
            name, value = f"speculative_config: {f.name}", getattr(self, f.name)
            if isinstance(low, int) and isinstance(high, int):
                check_whole(name, value, low, high)
            else:
                check_number(name, value, low, high)


class SuffixDrafter(Drafter):
    """Proposes the continuation that is likeliest to be long: of each text and each suffix of two tokens or more, the
    commonest next token, then the commonest after that, as long as counts support it. No match, no draft."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, options: SuffixOptions, max_positions: int) -> None:
        self._options = options
        self._max_positions = max_positions
        num_texts = options.suffix_decoding_max_cached_requests
        num_tokens = options.suffix_decoding_max_cached_tokens
        self._shared = SuffixIndex(num_tokens, num_texts) if num_texts else None
        self._requests: dict[
            int, tuple[SuffixIndex, int]
        ] = {}  # of a slot: text, and how much of it was given

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        text = SuffixIndex(self._max_positions)
        text.add(tokens)
        self._requests[slot] = text, len(tokens)

    def release(self, slot: int) -> None:
        """What was answered is there for others from now on; prompts are not, and neither is a failed admission."""
        text, num_given = self._requests.pop(slot, (None, 0))
        if text is not None and text.end > num_given and self._shared is not None:
            self._shared.add_whole(text.tail(num_given))

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        k_R, slots_R = verified.k_R.tolist(), verified.slots_R.tolist()
        tokens_RK = np.zeros((len(k_R), num_drafts), dtype=np.int64)
        count_R = np.zeros(len(k_R), dtype=np.int64)
        for r, (slot, k) in enumerate(zip(slots_R, k_R, strict=True)):
            history = np.asarray(verified.history(r))
            if slot not in self._requests:
                self.admit(slot, history.tolist(), 0)
            text, _ = self._requests[slot]
            text.add(history[text.end :].tolist())
            found = self._continue(text, history, k)
            tokens_RK[r, : len(found)], count_R[r] = found, len(found)
        device = verified.k_R.device
        return Proposal(torch.from_numpy(tokens_RK).to(device), torch.from_numpy(count_R).to(device))

    def _continue(self, own: SuffixIndex, history: np.ndarray, k: int) -> list[int]:
        """The best of all continuations: most tokens to be expected, then the own text, then the longer suffix."""
        best: tuple[float, list[int]] = 0.0, []
        suffix = history[-self._options.suffix_decoding_max_tree_depth :]
        if k == 0 or len(suffix) < 2:
            return []
        for text in (own, self._shared) if self._shared is not None else (own,):
            lengths_C, follow_CK = text.find(suffix, k)
            for length in sorted({n for n in lengths_C.tolist() if n > 1}, reverse=True):
                most = min(k, int(length * self._options.suffix_decoding_max_spec_factor))
                best = max(
                    best, self._walk(follow_CK[lengths_C >= length, :most].tolist()), key=lambda b: b[0]
                )
        return best[1]

    def _walk(self, follow_CK: list[list[int]]) -> tuple[float, list[int]]:
        """(tokens to be expected of it, the path of the commonest next tokens)."""
        expected, likely, path = 0.0, 1.0, list[int]()
        for step in range(len(follow_CK[0])):
            ahead = [row[step] for row in follow_CK if row[step] != END]
            if not ahead:
                break
            token, count = Counter(ahead).most_common(1)[0]  # among equals the newest
            likely *= count / len(ahead)
            if likely < self._options.suffix_decoding_min_token_prob:
                break
            expected += likely
            path.append(token)
            follow_CK = [row for row in follow_CK if row[step] == token]
        return expected, path


def build(ctx: DraftContext) -> SuffixDrafter:
    return SuffixDrafter(parse_options("speculative_config", ctx.options, SuffixOptions), ctx.max_positions)
