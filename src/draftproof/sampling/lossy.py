"""Verification that is lossless in distribution only: rejection sampling, and block verification.

Both accept more drafts than the exact rule at high temperature. They give other tokens than plain decoding would, from
the same distribution (block: Sun et al., arXiv 2403.10444). They need q, the distribution that drafts were drawn from.
Noise for drafts, acceptance and residual comes from separate domains, keyed by the round: the number of tokens known
before it, which is unique among a request's rounds.
Shapes: M rows, R requests, K draft slots, W = K + 1, V vocabulary, S slots, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftproof.kernels.row_params import RowParams
from draftproof.kernels.sample.reference import probabilities_torch
from draftproof.sampling.noise import Domain, derive, exponential, token_bits, uniform
from draftproof.sampling.sampler import NO_NUMBER, Draw, Sampler
from draftproof.sampling.verifier import VerifyResult, VerifyRows, drafts_of, row_index, verify_result


@dataclass(frozen=True, slots=True)
class Domains:
    """The noise stream for each purpose. Equal streams would bias the output."""

    draft: int = Domain.DRAFT
    accept: int = Domain.ACCEPT
    residual: int = Domain.RESIDUAL


class DraftDistribution:
    """The distributions that each slot's latest drafts were drawn from, kept until verification: fp32 [S, K + 1, V].

    Keyed by slot, so rounds may list their requests in any order. A record is used only for the same round of the same
    request and only if the proposed token is the one that was drawn. Any other draft counts as one-hot, which is
    correct however the token was found.
    """

    def __init__(self, num_slots: int, num_drafts: int, vocab_size: int, device: torch.device | str) -> None:
        self.num_drafts = num_drafts
        shape = (num_slots, num_drafts + 1)  # the last entry takes draws outside the round's K positions
        self._q_SXV = torch.zeros((*shape, vocab_size), dtype=torch.float32, device=device)
        self._drawn_SX = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._length_SX = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._seed_SX = torch.zeros(shape, dtype=torch.int64, device=device)

    def record(
        self,
        slots_M: Tensor,
        seeds_M: Tensor,
        lengths_M: Tensor,
        positions_M: Tensor,
        tokens_M: Tensor,
        q_MV: Tensor,
        ids_V: Tensor | None,
    ) -> None:
        """Record that `tokens_M[m]` was drawn from `q_MV[m]` in the round that knows `lengths_M[m]` tokens."""
        at_M = positions_M - lengths_M
        at_M = torch.where((at_M >= 0) & (at_M < self.num_drafts), at_M, self.num_drafts)
        if ids_V is not None:
            full_MV = q_MV.new_zeros(q_MV.shape[0], self._q_SXV.shape[2])
            q_MV = full_MV.index_copy_(1, ids_V, q_MV)
        self._q_SXV[slots_M, at_M] = q_MV
        self._drawn_SX[slots_M, at_M] = tokens_M
        self._length_SX[slots_M, at_M] = lengths_M
        self._seed_SX[slots_M, at_M] = seeds_M

    def of(self, rows: VerifyRows, seeds_R: Tensor, drafts_RK: Tensor) -> Tensor:
        """q of each draft to verify, fp32 [R, K, V]; one-hot if it has no record."""
        K = drafts_RK.shape[1]
        slots_R = rows.slots_R
        known_RK = (
            (self._drawn_SX[slots_R, :K] == drafts_RK)
            & (self._length_SX[slots_R, :K] == rows.lengths_R[:, None])
            & (self._seed_SX[slots_R, :K] == seeds_R[:, None])
        )
        q_RKV = torch.where(known_RK[..., None], self._q_SXV[slots_R, :K], 0.0)
        certain_RK = torch.where(known_RK, q_RKV.gather(2, drafts_RK[..., None])[..., 0], 1.0)
        return q_RKV.scatter_(2, drafts_RK[..., None], certain_RK[..., None])


class LossyVerifier:
    """`Verifier` for verification="rejection" and "block"; greedy requests get the exact rule's tokens."""

    def __init__(
        self,
        sampler: Sampler,
        mode: Literal["rejection", "block"],
        num_drafts: int,
        domains: Domains | None = None,
    ) -> None:
        table = sampler.table
        self._sampler = sampler
        self._accept = accept_rejection if mode == "rejection" else accept_block
        self._domains = domains or Domains()
        self.distribution = DraftDistribution(table.num_slots, num_drafts, table.vocab_size, table.device)

    def drawer(self, slots_R: Tensor, lengths_R: Tensor) -> Draw:
        """See `Verifier`."""
        return RecordingDraw(self._sampler, self.distribution, self._domains.draft, slots_R, lengths_R)

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
        at_W = torch.arange(rows.width, device=logits_MV.device)
        if logits_MV.shape[0] == 0:
            zero_R = torch.zeros_like(rows.num_R)
            return VerifyResult((zero_R - 1)[:, None].expand(-1, rows.width), zero_R)
        params, failures_M = self._sampler.rows(slots_M), None
        index_RW = row_index(rows, at_W, logits_MV.shape[0])
        processed_MV = logits_MV
        if has_processing:
            given = self._sampler.process(logits_MV, params, slots_M, positions_M, tokens_SL)
            processed_MV, failures_M = given
        p_RWV = _probabilities(processed_MV, params)[index_RW].double()
        drafts_RK = drafts_of(rows, at_W[:-1], tokens_SL).long()
        live_RK = at_W[:-1] < rows.draft_count_R[:, None]
        drafts_RK = torch.where(live_RK, drafts_RK, 0)
        seeds_R = self._sampler.table.params_S.seeds_M[rows.slots_R]
        q_RKV = self.distribution.of(rows, seeds_R, drafts_RK).double() * live_RK[..., None]
        accept_seeds_R = derive(seeds_R, self._domains.accept, rows.lengths_R)
        u_RK = _uniforms(accept_seeds_R, rows.lengths_R, at_W[:-1])
        accepted_R, residual_RV = self._accept(p_RWV, q_RKV, drafts_RK, live_RK, u_RK)
        last_R = self._draw_residual(residual_RV, seeds_R, rows, accepted_R)
        if failures_M is not None:
            failures_R = failures_M[index_RW.gather(1, accepted_R[:, None])[:, 0]]
            last_R = torch.where(last_R < 0, failures_R, last_R)
        padded_RW = torch.nn.functional.pad(drafts_RK, (0, 1))
        tokens_RW = torch.where(at_W == accepted_R[:, None], last_R[:, None], padded_RW)
        return verify_result(tokens_RW, accepted_R, rows, at_W)

    def _draw_residual(
        self, weight_RV: Tensor, seeds_R: Tensor, rows: VerifyRows, accepted_R: Tensor
    ) -> Tensor:
        seeds_R = derive(seeds_R, self._domains.residual, rows.lengths_R)
        return _race(weight_RV, seeds_R, rows.lengths_R + accepted_R, None)


@dataclass(frozen=True, slots=True)
class RecordingDraw:
    """A `Draw` for the lossy modes: draws from q with the draft domain's noise and records q."""

    sampler: Sampler
    distribution: DraftDistribution
    domain: int
    slots_R: Tensor
    lengths_R: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Empty: the draw depends on more than tensors, so it cannot be replayed."""
        return ()

    def over(self, inputs: tuple[Tensor, ...]) -> RecordingDraw:
        return self

    def __call__(
        self, logits_MV: Tensor, rows_M: Tensor | None, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        """See `sampler.Draw`."""
        slots_M = self.slots_R
        lengths_M = self.lengths_R
        if rows_M is not None:
            slots_M = slots_M[rows_M]
            lengths_M = lengths_M[rows_M]
        params = self.sampler.rows(slots_M)
        q_MV = _probabilities(logits_MV, params)
        seeds_M = derive(params.seeds_M, self.domain, lengths_M)
        tokens_M = _race(q_MV, seeds_M, positions_M, ids_V)
        self.distribution.record(slots_M, params.seeds_M, lengths_M, positions_M, tokens_M, q_MV, ids_V)
        return tokens_M


def accept_rejection(
    p_RWV: Tensor, q_RKV: Tensor, drafts_RK: Tensor, live_RK: Tensor, u_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """Draft-by-draft acceptance with probability min(1, p/q), up to the first rejection.

    Returns (accepted_R, weights_RV from which the next token is drawn: (p - q)+ after a rejection, else p).
    """
    p_RK, q_RK = _chosen(p_RWV, q_RKV, drafts_RK)
    accepted_R = ((u_RK * q_RK < p_RK) & live_RK).cumprod(1).sum(1)
    return accepted_R, _residual(p_RWV, q_RKV, accepted_R, torch.ones_like(p_RWV[:, 0, 0]))


def accept_block(
    p_RWV: Tensor, q_RKV: Tensor, drafts_RK: Tensor, live_RK: Tensor, u_RK: Tensor
) -> tuple[Tensor, Tensor]:
    """Joint acceptance of all drafts: the longest prefix that passes its own test is accepted.

    The prefix of i drafts has weight w_i = min(1, w_{i-1} p/q). With s_i the mass of (w_i p - q)+ at the row after it,
    the prefix passes with probability s_i / (s_i + 1 - w_i); the last row has q = 0, hence w_i. Returns as
    `accept_rejection`, with (w p - q)+.
    """
    p_RK, q_RK = _chosen(p_RWV, q_RKV, drafts_RK)
    w_R = torch.ones_like(p_RWV[:, 0, 0])
    weights = [w_R]
    accepted_R = torch.zeros_like(w_R, dtype=torch.int64)
    for i in range(drafts_RK.shape[1]):
        w_R = torch.where(q_RK[:, i] > 0, w_R * p_RK[:, i] / q_RK[:, i], 0.0).clamp(max=1.0)
        weights.append(w_R)
        q_next_RV = q_RKV[:, i + 1] if i + 1 < q_RKV.shape[1] else 0.0
        s_R = _mass((w_R[:, None] * p_RWV[:, i + 1] - q_next_RV).clamp_(min=0))
        # w_i = 1 with s_i = 0 means p = q: any next draft keeps w = 1, so acceptance never ends at this prefix.
        passes_R = (u_RK[:, i] * (s_R + 1 - w_R) < s_R) & live_RK[:, i]
        accepted_R = torch.where(passes_R, i + 1, accepted_R)
    w_R = torch.stack(weights, 1).gather(1, accepted_R[:, None])[:, 0]
    return accepted_R, _residual(p_RWV, q_RKV, accepted_R, w_R)


def _chosen(p_RWV: Tensor, q_RKV: Tensor, drafts_RK: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of each draft token, [R, K]."""
    at = drafts_RK[..., None]
    return p_RWV[:, :-1].gather(2, at)[..., 0], q_RKV.gather(2, at)[..., 0]


def _residual(p_RWV: Tensor, q_RKV: Tensor, accepted_R: Tensor, w_R: Tensor) -> Tensor:
    """(w p - q)+ of the row after the accepted drafts, [R, V]; p where rounding leaves no mass."""
    each_R = torch.arange(len(accepted_R), device=accepted_R.device)
    p_RV = p_RWV[each_R, accepted_R]
    q_RV = torch.nn.functional.pad(q_RKV, (0, 0, 0, 1))[each_R, accepted_R]
    rest_RV = (w_R[:, None] * p_RV - q_RV).clamp_(min=0)
    return torch.where(rest_RV.amax(1, keepdim=True) > 0, rest_RV, p_RV)


def _mass(weight_RV: Tensor) -> Tensor:
    """Sum over V in column order, independent of the number of rows."""
    return weight_RV.cumsum(1)[:, -1]


def _probabilities(logits_MV: Tensor, p: RowParams) -> Tensor:
    return probabilities_torch(logits_MV, p)


def _uniforms(seeds_R: Tensor, lengths_R: Tensor, at_K: Tensor) -> Tensor:
    """One uniform number per draft, float64 [R, K]."""
    positions_RK = lengths_R[:, None] + at_K
    bits_RK1 = token_bits(seeds_R[:, None].expand_as(positions_RK), positions_RK, at_K.new_zeros(1))
    return uniform(bits_RK1)[..., 0].double()


def _race(weight_MV: Tensor, seeds_M: Tensor, positions_M: Tensor, ids_V: Tensor | None) -> Tensor:
    """A draw from unnormalised weights: target ids, int64 [M]; `NO_NUMBER` for rows without a positive weight."""
    columns_V = torch.arange(weight_MV.shape[1], device=weight_MV.device) if ids_V is None else ids_V
    best_M = (exponential(seeds_M, positions_M, columns_V) / weight_MV).argmin(-1)
    tokens_M = columns_V[best_M]
    return torch.where(weight_MV.amax(-1) > 0, tokens_M, NO_NUMBER)
