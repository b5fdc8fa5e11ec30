"""The likeliest continuation of texts, in Python: it runs on the host only.

Shapes: N rows of tokens, L positions, R requests, K drafts, M matches (places), D tokens of the suffix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftproof.kernels.continuation.index import END, SlotTexts, TextIndex
from draftproof.kernels.continuation.spec import MOST_PLACES, ContinuationOps, Limits


class TorchContinuation:
    """Implements `ContinuationOps`."""

    def add(self, index: TextIndex, tokens: Sequence[int]) -> None:
        before = int(index.tokens_C[(index.end - 1) % index.capacity])
        for token in map(int, tokens):
            bucket = index.bucket(before, token)
            cell = index.end % index.capacity
            index.tokens_C[cell] = token
            index.previous_C[cell] = index.newest_B[bucket]
            index.newest_B[bucket] = index.end
            index.end += 1
            before = token

    def propose(
        self,
        own: SlotTexts,
        shared: TextIndex | None,
        slots_R: Tensor,
        tokens_NL: Tensor,
        length_N: Tensor,
        row_R: Tensor,
        k_R: Tensor,
        num_drafts: int,
        limits: Limits,
    ) -> tuple[Tensor, Tensor]:
        tokens_RK = torch.zeros((len(slots_R), num_drafts), dtype=torch.int64)
        count_R = torch.zeros(len(slots_R), dtype=torch.int64)
        for r, (slot, row, k) in enumerate(zip(slots_R.tolist(), row_R.tolist(), k_R.tolist(), strict=True)):
            index = own.indexes[slot]
            if index is None:
                continue
            text_L = tokens_NL[row, : int(length_N[row])].numpy()
            self.add(index, text_L[index.end :].tolist())
            found = _continuation(index, shared, text_L, min(k, num_drafts), limits)
            tokens_RK[r, : len(found)] = torch.tensor(found, dtype=torch.int64)
            count_R[r] = len(found)
        return tokens_RK, count_R


TORCH_CONTINUATION: ContinuationOps = TorchContinuation()


def _continuation(
    own: TextIndex, shared: TextIndex | None, text_L: np.ndarray, k: int, limits: Limits
) -> list[int]:
    best: tuple[float, list[int]] = 0.0, []
    suffix_D = text_L[-limits.longest :]
    if k <= 0 or len(suffix_D) < 2:
        return []
    for index in (own, shared) if shared is not None else (own,):
        lengths_M, follow_MK = find(index, suffix_D, k)
        for length in sorted({n for n in lengths_M.tolist() if n > 1}, reverse=True):
            most = min(k, int(length * limits.each))
            followed = _followed(follow_MK[lengths_M >= length, :most].tolist(), limits.least)
            best = max(best, followed, key=lambda found: found[0])
    return best[1]


def find(index: TextIndex, suffix_D: np.ndarray, num_ahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Places where at least the suffix's last two tokens match, newest first: number of matching tokens, int [M], and
    the tokens that followed, [M, K]."""
    start, end, capacity = index.start, index.end, index.capacity
    places = list[int]()
    place = int(index.newest_B[index.bucket(*suffix_D[-2:].tolist())])
    while place > start and len(places) < MOST_PLACES:
        if place < end - 1:  # skip the text's own end
            places.append(place)
        place = int(index.previous_C[place % capacity])
    places_M1 = np.array(places, dtype=np.int64)[:, None]
    back_MD = places_M1 - np.arange(len(suffix_D))
    same_MD = (index.tokens_C[back_MD % capacity] == suffix_D[::-1]) & (back_MD >= start)
    ahead_MK = places_M1 + np.arange(1, num_ahead + 1)
    follow_MK = np.where(ahead_MK < end, index.tokens_C[ahead_MK % capacity], END)
    return np.logical_and.accumulate(same_MD, axis=1).sum(1), follow_MK


def _followed(follow_MK: list[list[int]], least: float) -> tuple[float, list[int]]:
    """(expected number of accepted tokens, path of the commonest next tokens)."""
    expected, likely = 0.0, 1.0
    path = list[int]()
    for step in range(len(follow_MK[0])):
        ahead = [row[step] for row in follow_MK if row[step] != END]
        if not ahead:
            break
        token, count = Counter(ahead).most_common(1)[0]  # the newest of equally common ones
        likely *= count / len(ahead)
        if likely < least:
            break
        expected += likely
        path.append(token)
        follow_MK = [row for row in follow_MK if row[step] == token]
    return expected, path
