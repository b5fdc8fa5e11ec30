"""The one rule of exact verification: accept drafts while draft == sample.

Shapes: M sampled rows of the pass, R requests, K draft slots, W = K + 1 sampled rows of a request at most,
S slots, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftproof.kernels.step.reference import TORCH_STEP
from draftproof.kernels.step.spec import StepOps
from draftproof.sampling.sampler import Draw, Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRows:
    """The sampled rows of each request. Row j of request r samples position lengths_R[r] + j."""

    first_R: Tensor  # int64: index into M of the request's first row; arbitrary where num_R is 0
    num_R: Tensor  # int64: 0 in mid-prefill, else at least 1 + draft_count
    slots_R: Tensor  # int64
    lengths_R: Tensor  # int64: known tokens before this pass
    draft_count_R: Tensor  # int64: drafts to verify, at tokens_SL[slot, length:]
    width: int  # W, an upper bound known to the host; 1 = no request has drafts


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The tokens that a pass emitted: request r's are tokens_RW[r, :num_emitted_R[r]].

    A negative emitted token means that no token was possible for the row: `NO_NUMBER` or `NONE_LEFT`.
    """

    tokens_RW: Tensor  # int64, -1 beyond the emitted ones
    num_emitted_R: Tensor  # int64: 0 in mid-prefill, else 1 + accepted


class Verifier(Protocol):
    """A rule by which drafts are drawn and verified: `ExactVerifier`, or `lossy.LossyVerifier`."""

    def verify(
        self,
        logits_MV: Tensor,
        slots_M: Tensor,
        positions_M: Tensor,
        tokens_SL: Tensor,
        rows: VerifyRows,
        *,
        has_processing: bool,
    ) -> VerifyResult:
        """The emitted tokens, from raw logits of the sampled rows; logits_MV is not modified."""
        ...

    def drawer(self, slots_R: Tensor, lengths_R: Tensor) -> Draw:
        """The next round's `draw` (see `sampler.Draw`); lengths_R: known tokens, the newest included."""
        ...


@dataclass(frozen=True, slots=True)
class ExactVerifier:
    """The rule of law 1: the tokens are those of plain decoding, bit for bit."""

    sampler: Sampler

    def verify(
        self,
        logits_MV: Tensor,
        slots_M: Tensor,
        positions_M: Tensor,
        tokens_SL: Tensor,
        rows: VerifyRows,
        *,
        has_processing: bool,
    ) -> VerifyResult:
        """See `Verifier`."""
        sampled_M = self.sampler.sample(
            logits_MV, slots_M, positions_M, tokens_SL, has_processing=has_processing
        )
        return accept_exact(sampled_M, rows, tokens_SL, self.sampler.ops.step)

    def drawer(self, slots_R: Tensor, lengths_R: Tensor) -> Draw:
        """See `Verifier`."""
        return self.sampler.drawer(slots_R, lengths_R)


def accept_exact(
    sampled_M: Tensor, rows: VerifyRows, tokens_SL: Tensor, ops: StepOps = TORCH_STEP
) -> VerifyResult:
    """Accept drafts while they equal the samples; the first sample that differs, or the bonus, ends the round."""
    return VerifyResult(
        *ops.accept(
            tokens_SL,
            rows.slots_R,
            rows.num_R,
            rows.first_R,
            rows.lengths_R,
            rows.draft_count_R,
            sampled_M,
            rows.width,
        )
    )


def row_index(rows: VerifyRows, at_W: Tensor, num_rows: int) -> Tensor:
    """Index into M of each request's W rows, int64 [R, W]; entries beyond a request's rows point at some valid row."""
    return (rows.first_R[:, None] + at_W).clamp_(0, num_rows - 1)


def drafts_of(rows: VerifyRows, at_K: Tensor, tokens_SL: Tensor) -> Tensor:
    """The drafts of each request, [R, K]; arbitrary tokens past its draft count."""
    length = tokens_SL.shape[1]
    at_RK = (rows.lengths_R[:, None] + at_K).clamp_(max=length - 1)
    return tokens_SL.take(at_RK + (rows.slots_R * length)[:, None])


def verify_result(tokens_RW: Tensor, accepted_R: Tensor, rows: VerifyRows, at_W: Tensor) -> VerifyResult:
    """The result of emitting `accepted` drafts and the token after them; nothing in mid-prefill."""
    emitted_R = (accepted_R + 1) * (rows.num_R > 0)
    return VerifyResult(torch.where(at_W < emitted_R[:, None], tokens_RW, -1), emitted_R)
