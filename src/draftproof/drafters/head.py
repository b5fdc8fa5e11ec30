"""Runs a draft network: feeds it the rows its layout declares, unrolls it, draws its tokens.

Shapes: R requests, T target rows, N draft rows, M read rows, K drafts, F feature width, V columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, PagedAttention, Rows
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import DraftSpec, Draw, Proposal, Verified
from draftproof.kernels.graphs import EAGER, Graphs
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
        """-> hidden_NH for `logits`, and the next row's features, None where rows have none."""
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


class DraftInputs(NamedTuple):
    """The buffers of a draft pass: `kernels.step.DraftRows` and the requests' slots."""

    tokens_N: Tensor
    source_N: Tensor
    positions_N: Tensor
    ends_N: Tensor
    slots_N: Tensor
    read_R: Tensor
    slots_R: Tensor
    drawn_KR: Tensor
    positions_KR: Tensor
    ends_KR: Tensor


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

        The row of step j sits at the read row's position + j. All of it is one function of buffers, so it can be run
        again without Python.
        """
        fed = self._bound.ops.step.draft_rows(
            self._layout,
            verified.cu_R1,
            verified.tokens_T,
            verified.positions_T,
            verified.slots_R,
            verified.live_R,
            verified.next_R,
            verified.k_R,
            num_drafts,
        )
        draw, read_R = verified.draw, fed.read_RJ[:, 0].contiguous()
        inputs = (
            *(fed.tokens_N, fed.source_N, fed.positions_N, fed.ends_N, fed.slots_N, read_R),
            *(verified.slots_R, fed.drawn_KR, fed.positions_KR, fed.ends_KR),
            *(*draw.inputs, *verified.taps),
        )

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            split = 10 + len(draw.inputs)
            return self._draft(DraftInputs(*given[:10]), draw.over(given[10:split]), given[split:])

        key = ("draft", self, len(verified.tokens_T), len(fed.tokens_N), len(read_R), num_drafts)
        # a draw without inputs depends on more than the buffers
        drawn = (self._bound.graphs if draw.inputs else EAGER).run(key, run, inputs)
        tokens_RK = torch.stack(drawn, 1) if drawn else read_R.new_zeros((len(read_R), 0))
        return Proposal(tokens_RK, verified.k_R)

    def _draft(self, given: DraftInputs, draw: Draw, taps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The whole draft pass: the verified rows, then one drafted row a request and step. K tensors of R tokens."""
        gather, logits = self._bound.ops.gather, self._head.logits
        features_TF = self._head.features(taps)
        features_NF = None if features_TF is None else gather(features_TF, given.source_N)
        attn = self._attention(given.positions_N, given.slots_N, given.ends_N)
        hidden_NH, feedback_NF = self._head(given.tokens_N, features_NF, attn)
        hidden_RH = gather(hidden_NH, given.read_R)
        feedback_RF = None if feedback_NF is None else gather(feedback_NF, given.read_R)
        drawn: list[Tensor] = []
        for step in range(len(given.drawn_KR)):
            if step:
                attn = self._attention(given.positions_KR[step], given.slots_R, given.ends_KR[step])
                hidden_RH, feedback_RF = self._head(drawn[-1], feedback_RF, attn)
            drawn.append(draw(logits(hidden_RH), None, given.drawn_KR[step], self._head.ids_V))
        return tuple(drawn)

    @property
    def _bound(self) -> DraftMemory:
        assert self._memory is not None, "bind comes before propose"
        return self._memory

    def _attention(self, positions_N: Tensor, slots_N: Tensor, ends_N: Tensor) -> PagedAttention:
        m = self._bound
        return PagedAttention(m.ops, m.backend, m.cache, Rows(positions_N, slots_N, ends_N))
