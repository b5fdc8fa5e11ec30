"""N-gram lookup, the tokens that followed an earlier occurrence of the newest ones: its interface and versions.

Shapes: S slots, L positions, R requests, K drafts.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.lookup.compiled import LookupCompiled
from draftproof.kernels.lookup.reference import lookup_torch
from draftproof.kernels.versions import Versions


class Lookup(Protocol):
    def __call__(
        self,
        tokens_SL: Tensor,  # int32, tokens of every slot
        length_S: Tensor,  # int64: number of known tokens
        slots_R: Tensor,  # int64
        k_R: Tensor,  # int64: drafts wanted
        num_drafts: int,
        shortest: int,
        longest: int,
        most_matched: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens after the most recent earlier occurrence of the longest suffix that has one, `shortest` to
        `longest` tokens.

        Returns int64 tokens_RK, 0 beyond count_R; count_R, which is at most k_R and 0 if there was no match; and
        matched_R, how many tokens match there, counted up to `most_matched`, at least `longest`: fewer than `shortest`
        if there was no match. Example: tokens a b c a b, longest 2: the suffix (a b) occurred at 0, followed by c a b.
        With x a b c x a b and longest 2 that suffix is found at 1, and three tokens match: x a b.
        """
        ...


def _triton() -> Lookup:
    from draftproof.kernels.lookup.triton import lookup

    return lookup


LOOKUP: Versions[Lookup] = Versions(lookup_torch, compiled=LookupCompiled, triton=_triton)
