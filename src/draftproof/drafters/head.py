"""Runs a draft network: feeds it the rows its layout declares, unrolls it, draws its tokens.

Shapes: R requests, T target rows, N draft rows, M read rows, K drafts, F feature width, V columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import DraftSpec, Proposal, Verified
from draftproof.kernels.graphs import Graphs
from draftproof.kernels.ops import Ops
from draftproof.kernels.step import Layout


class DraftHead(Protocol):
    """Level 2: a network that predicts the target's next tokens. `ids_V` maps its columns to target ids."""

    spec: DraftSpec
    ids_V: Tensor | None

    def features(self, taps: tuple[Tensor, ...]) -> Tensor | None:
        """Fusion of the tapped target states, [T, F]; None where the head reads tokens only."""
        ...

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor | None]:
        """-> hidden_NH for `logits`, and the next row's features where spec.feedback."""
        ...

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """fp32 [M, V]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """What the engine lends a drafter at start: its layers' cache on the target's block table, and operators."""

    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    graphs: Graphs


class HeadDrafter:
    """The drafter around a head. Final: a method that does not fit implements `Drafter` itself."""

    def __init__(self, head: DraftHead, num_drafts: int) -> None:
        self.spec = head.spec
        self._head = head
        given = head.spec.layout(num_drafts)
        self._layout = Layout(
            context=("none", "last", "all").index(given.context),
            shift=given.shift,
            anchor=int(given.anchor),
            masks=given.masks,
            num_read=1,
            mask_token=0,
        )
        self._memory: DraftMemory | None = None

    def bind(self, memory: DraftMemory) -> None:
        self._memory = memory

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """Feed the verified rows, then draft `num_drafts` tokens per request, one row a step.

        The row of step j sits at the read row's position + j; its draw is for position anchor + 1 + j.
        """
        fed = self._bound.ops.step.draft_rows(
            self._layout,
            verified.num_rows_R,
            verified.cu_R1,
            verified.tokens_T,
            verified.positions_T,
            verified.slots_R,
            verified.live_R,
            verified.next_R,
        )
        read_R = fed.read_RJ[:, 0].contiguous()
        inputs = (
            fed.tokens_N,
            fed.source_N,
            fed.positions_N,
            fed.positions_N + 1,
            fed.slots_N,
            read_R,
            *verified.taps,
        )
        out = self._bound.graphs.run(("feed", self, len(fed.tokens_N), len(read_R)), self._feed, inputs)

        k_R, slots_R = verified.k_R, verified.slots_R
        tokens_RK = fed.tokens_N.new_zeros((len(read_R), num_drafts))
        position_R = fed.positions_N.index_select(0, read_R)
        all_R = torch.arange(len(read_R), device=read_R.device)
        for step in range(num_drafts):
            drawn_R = verified.draw(out[0], all_R, fed.anchor_position_R + 1 + step, self._head.ids_V)
            tokens_RK[:, step] = drawn_R
            if step + 1 == num_drafts:
                break
            position_R = position_R + 1
            live_R = position_R.masked_fill(k_R <= step + 1, -1)
            # -1 says "no number here": the guard drops it, but it must not reach the embedding
            inputs = (drawn_R.clamp(min=0), live_R, live_R + 1, slots_R, *out[1:])
            out = self._bound.graphs.run(("step", self, len(read_R)), self._step, inputs)
        return Proposal(tokens_RK, k_R)

    def _feed(
        self,
        tokens_N: Tensor,
        source_N: Tensor,
        positions_N: Tensor,
        ends_N: Tensor,
        slots_N: Tensor,
        read_R: Tensor,
        *taps: Tensor,
    ) -> tuple[Tensor, ...]:
        """The verified rows: (logits, feedback if any) of those that are read."""
        features_TF = self._head.features(taps)
        gather = self._bound.ops.gather
        features_NF = None if features_TF is None else gather(features_TF, source_N)
        attn = self._attention(positions_N, slots_N, ends_N)
        hidden_NH, feedback_NF = self._head(tokens_N, features_NF, attn)
        logits_RV = self._head.logits(gather(hidden_NH, read_R))
        return (logits_RV,) if feedback_NF is None else (logits_RV, gather(feedback_NF, read_R))

    def _step(
        self, tokens_R: Tensor, positions_R: Tensor, ends_R: Tensor, slots_R: Tensor, *feedback: Tensor
    ) -> tuple[Tensor, ...]:
        """One drafted row per request: (logits, feedback if any)."""
        attn = self._attention(positions_R, slots_R, ends_R)
        hidden_RH, feedback_RF = self._head(tokens_R, feedback[0] if feedback else None, attn)
        logits_RV = self._head.logits(hidden_RH)
        return (logits_RV,) if feedback_RF is None else (logits_RV, feedback_RF)

    @property
    def _bound(self) -> DraftMemory:
        assert self._memory is not None, "bind comes before propose"
        return self._memory

    def _attention(self, positions_N: Tensor, slots_N: Tensor, ends_N: Tensor) -> PagedAttention:
        m = self._bound
        return PagedAttention(m.ops, m.backend, m.cache, Rows(positions_N, slots_N, ends_N))
