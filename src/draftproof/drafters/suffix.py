"""Suffix drafting: continue as earlier texts did after the longest matching suffixes. Oliaro et al., arXiv 2411.04975.

Texts are the request's own prompt and output, and earlier outputs of other requests.
Shapes: C matches (places), D tokens of the suffix, K drafts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Verified
from draftproof.drafters.context import DraftContext
from draftproof.schema import check_number, check_whole

END = -1  # separator of two texts, and padding after a text's end
MOST_PLACES = 64  # candidate matches looked at per lookup, newest first
MOST_BUCKETS = 1 << 20
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


class SuffixIndex:
    """The newest `capacity` tokens of one or more texts, in fixed memory. Each place links to the previous place where
    the same pair of tokens ended (or another pair with its hash), so earlier occurrences are found by following links.
    """

    def __init__(self, capacity: int, most_texts: int | None = None) -> None:
        self.end = 0  # tokens ever added
        self._capacity = capacity
        self._starts: deque[int] | None = None if most_texts is None else deque(maxlen=most_texts)
        self._tokens = np.full(capacity, END, dtype=np.int32)
        self._previous = np.full(capacity, -1, dtype=np.int64)
        self._newest = np.full(1 << max(8, min(capacity, MOST_BUCKETS).bit_length() - 1), -1, dtype=np.int64)

    @property
    def start(self) -> int:
        """Index of the oldest token that is still kept."""
        full = self._starts is not None and len(self._starts) == self._starts.maxlen
        return max(self.end - self._capacity, self._starts[0] if self._starts and full else 0)

    def add(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text."""
        before = int(self._tokens[(self.end - 1) % self._capacity])
        for token in map(int, tokens):
            place = self._bucket(before, token)
            cell = self.end % self._capacity
            self._tokens[cell] = token
            self._previous[cell] = self._newest[place]
            self._newest[place] = self.end
            self.end = self.end + 1
            before = token

    def add_whole(self, tokens: Sequence[int]) -> None:
        """Append a separate text: no match crosses its ends."""
        assert self._starts is not None
        self._starts.append(self.end)
        self.add([*tokens[-self._capacity + 1 :], END])

    def tail(self, start: int) -> list[int]:
        """The tokens from `start` on that are still kept."""
        return self._tokens[np.arange(max(start, self.start), self.end) % self._capacity].tolist()

    def find(self, suffix_D: np.ndarray, num_ahead: int) -> tuple[np.ndarray, np.ndarray]:
        """Places where at least the suffix's last two tokens match, newest first: number of matching tokens, int [C],
        and the tokens that followed, [C, K]."""
        start = self.start
        places = list[int]()
        place = int(self._newest[self._bucket(*suffix_D[-2:].tolist())])
        while place > start and len(places) < MOST_PLACES:
            if place < self.end - 1:  # skip the text's own end
                places.append(place)
            place = int(self._previous[place % self._capacity])
        places_C1 = np.array(places, dtype=np.int64)[:, None]
        back_CD = places_C1 - np.arange(len(suffix_D))
        same_CD = (self._tokens[back_CD % self._capacity] == suffix_D[::-1]) & (back_CD >= start)
        ahead_CK = places_C1 + np.arange(1, num_ahead + 1)
        follow_CK = np.where(ahead_CK < self.end, self._tokens[ahead_CK % self._capacity], END)
        return np.logical_and.accumulate(same_CD, axis=1).sum(1), follow_CK

    def _bucket(self, first: int, second: int) -> int:
        return ((first * 1_000_003 + second) * 2_654_435_761 >> 8) & (len(self._newest) - 1)


class SuffixDrafter(Drafter):
    """Proposes the continuation with the highest expected length: for each text and each matching suffix of two or more
    tokens, follow the most frequent next token while counts support it. No match, no draft."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, options: SuffixOptions, max_positions: int) -> None:
        self._options = options
        self._max_positions = max_positions
        num_texts = options.suffix_decoding_max_cached_requests
        num_tokens = options.suffix_decoding_max_cached_tokens
        self._shared = SuffixIndex(num_tokens, num_texts) if num_texts else None
        # slot -> its text, and the number of tokens it was admitted with
        self._requests: dict[int, tuple[SuffixIndex, int]] = {}

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        text = SuffixIndex(self._max_positions)
        text.add(tokens)
        self._requests[slot] = text, len(tokens)

    def release(self, slot: int) -> None:
        """Keep the output for other requests; prompts and failed admissions are not kept."""
        text, num_given = self._requests.pop(slot, (None, 0))
        if text is not None and text.end > num_given and self._shared is not None:
            self._shared.add_whole(text.tail(num_given))

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        k_R = verified.k_R.tolist()
        slots_R = verified.slots_R.tolist()
        tokens_RK = np.zeros((len(k_R), num_drafts), dtype=np.int64)
        count_R = np.zeros(len(k_R), dtype=np.int64)
        for r, (slot, k) in enumerate(zip(slots_R, k_R, strict=True)):
            history = np.asarray(verified.history(r))
            if slot not in self._requests:
                self.admit(slot, history.tolist(), 0)
            text, _ = self._requests[slot]
            text.add(history[text.end :].tolist())
            found = self._continue(text, history, k)
            tokens_RK[r, : len(found)] = found
            count_R[r] = len(found)
        device = verified.k_R.device
        return Proposal(torch.from_numpy(tokens_RK).to(device), torch.from_numpy(count_R).to(device))

    def _continue(self, own: SuffixIndex, history: np.ndarray, k: int) -> list[int]:
        """The best continuation: highest expected length, then the request's own text, then the longer suffix."""
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
        """(expected number of accepted tokens, path of the most frequent next tokens)."""
        expected = 0.0
        likely = 1.0
        path = list[int]()
        for step in range(len(follow_CK[0])):
            ahead = [row[step] for row in follow_CK if row[step] != END]
            if not ahead:
                break
            token, count = Counter(ahead).most_common(1)[0]  # ties: the newest
            likely *= count / len(ahead)
            if likely < self._options.suffix_decoding_min_token_prob:
                break
            expected += likely
            path.append(token)
            follow_CK = [row for row in follow_CK if row[step] == token]
        return expected, path


def build(ctx: DraftContext) -> SuffixDrafter:
    return SuffixDrafter(parse_options("speculative_config", ctx.options, SuffixOptions), ctx.max_positions)
