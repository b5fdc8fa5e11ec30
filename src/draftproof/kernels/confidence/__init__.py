"""Confidence in drafts that were copied from earlier text: its interface and versions.

A copied draft is likelier to be right the more tokens before it match: those of the suffix that was looked up, and the
drafts between; and if the text went on alike after the two tokens before it (`Branching`). How likely is learned from
what became of earlier proposals, verified or not.

Shapes: S slots, L positions, R requests, K drafts.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.confidence.compiled import ConfidenceCompiled
from draftproof.kernels.confidence.record import MatchRecord
from draftproof.kernels.confidence.reference import confidence_torch
from draftproof.kernels.versions import Versions


class Confidence(Protocol):
    def __call__(
        self,
        tokens_SL: Tensor,  # int32, tokens of every slot
        length_S: Tensor,  # int64: number of known tokens
        slots_R: Tensor,  # int64, each at most once
        tokens_RK: Tensor,  # int64: drafts
        count_R: Tensor,  # int64: number of drafts
        matched_R: Tensor,  # int64: matching tokens before the first draft
        price: Tensor,  # fp32 [4]: see `DraftRuntime.price`
        record: MatchRecord,
    ) -> Tensor:
        """Compare each slot's last proposal with the tokens known since, keep the new one, and return the number of
        drafts before the first that does not pay. Where each draft pays, none is compared or kept.

        Example: of three drafts after two matching tokens the first was right and the second wrong. Then drafts after
        two have one hit more, and drafts after three one miss, each with the branching there.
        """
        ...


CONFIDENCE: Versions[Confidence] = Versions(confidence_torch, compiled=ConfidenceCompiled, triton=None)
