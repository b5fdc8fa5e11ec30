"""MTP with several modules: each drafts one token further, from the states of the module before it.

Module m's row at position p carries the token at p + 1 + m, so its last m rows were computed from drafts. Once the true
tokens are known those rows are computed again: a request's last target states are kept, and its next pass begins with
their rows, in every module.
Shapes: R requests, T target rows, E kept rows of a slot, N = T + R * E draft rows, M modules, S slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.attention.base import Rows
from draftproof.attention.given import GivenRows
from draftproof.cache.recent import RecentRows, SlotRows
from draftproof.cache.states import PassOfRows
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Draw, Proposal, RoundSize, Verified
from draftproof.drafters.fused import FusedNetwork
from draftproof.drafters.head import PassSize
from draftproof.matmul.linear import PackedLinear
from draftproof.models import cost
from draftproof.models.cost import Cost
from draftproof.runtime.graphs import EAGER


class _Inputs(NamedTuple):
    """The buffers of a draft pass. `draft_MN`: 1-based number of the draft that the row carries; 0: the row carries
    `tokens_MN`."""

    tokens_MN: Tensor
    draft_MN: Tensor
    positions_N: Tensor
    context_lens_N: Tensor
    slots_N: Tensor
    owner_N: Tensor
    source_N: Tensor
    read_R: Tensor
    drawn_MR: Tensor


class ModulesDrafter(Drafter):
    """The drafter around several modules. All modules run even if fewer drafts are wanted, so that their caches have no
    holes."""

    def __init__(
        self,
        modules: Sequence[FusedNetwork],
        embed_VH: Tensor,
        head: PackedLinear,
        spec: DraftSpec,
    ) -> None:
        assert len(modules) > 1 and len(spec.kv) == len(modules)
        kept = SlotRows(count=len(modules) - 1, size=embed_VH.shape[1])
        self.spec = replace(spec, states=(kept,))
        self._modules = tuple(modules)
        self._embed_VH = embed_VH
        self._head = head
        self._runtime: DraftRuntime | None = None
        self._recent: RecentRows  # without rows of cached pages, which never have to be repeated

    def bind(self, runtime: DraftRuntime) -> None:
        self._runtime = runtime
        (recent,) = runtime.cache.states
        assert isinstance(recent, RecentRows)
        self._recent = recent

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """Feed kept and verified rows through all modules; the first `num_drafts` modules draft a token each."""
        runtime = self._runtime
        v = verified
        draw = verified.draw
        assert runtime is not None, "bind comes before propose"
        num = min(num_drafts, len(self._modules))
        num_requests = len(v.slots_R)
        rows = v.pass_of_rows
        table = self._recent.write(rows, v.taps[0])
        own = self._inputs(v, rows)
        inputs = (*own, table, *draw.inputs)
        given = v.given if self.spec.takes_embeddings else None
        # not recordable: a draw without inputs depends on more than the buffers, as do rows with or before embeddings
        is_function = bool(draw.inputs) and given is None and not runtime.has_window

        def run(*buffers: Tensor) -> tuple[Tensor, ...]:
            split = len(own)
            drawn = draw.over(buffers[split + 1 :])
            return self._draft(runtime, _Inputs(*buffers[:split]), buffers[split], drawn, num, given)

        key = (("draft", self), len(v.tokens_T), num_requests, num)
        drawn = (runtime.graphs if is_function else EAGER).run(key, run, inputs)
        tokens_RK = torch.stack(drawn, 1) if num else v.next_R.new_zeros((num_requests, 0))
        return Proposal(tokens_RK, v.k_R.clamp(max=num))

    def cost(self, size: RoundSize) -> Cost:
        """Cost of a round: every module computes every row, kept rows included."""
        num_modules = len(self._modules)
        rows = PassSize(
            requests=size.requests,
            fused=0,
            fed=size.rows + num_modules - 1,
            read=0,
            context=size.context,
            itemsize=size.itemsize,
        )
        logits = cost.linear(self._head, size.requests) * min(size.num_drafts, num_modules)
        return sum((module.cost(rows) for module in self._modules), logits)

    def _inputs(self, v: Verified, rows: PassOfRows) -> _Inputs:
        """The buffers of a pass. Example: M = 2, one request kept a state at 4 and verified [s5 d6 d7]@5..7, of which
        s5 d6 live, next r7: rows @4 @5 @6 pad; tokens of module 0: s5 d6 r7, of module 1: d6 r7 and the first draft."""
        num_modules = len(self._modules)
        R = len(v.slots_R)
        each = num_modules - 1
        device = v.tokens_T.device
        start_R = v.query_start_loc_R1[:-1]
        at_N = torch.arange(len(v.tokens_T) + R * each, device=device)
        begin_R = start_R + torch.arange(R, device=device) * each
        owner_N = torch.searchsorted(begin_R, at_N, right=True) - 1
        # index of a row among its request's verified rows; negative: a kept row
        place_N = at_N - begin_R[owner_N] - each
        first_R = rows.first_R
        live_R = v.live_R
        known_R = self._recent.known(rows)
        live_N = live_R[owner_N]
        stands_N = (place_N >= -known_R[owner_N]) & (place_N < live_N) & (live_N > 0)
        positions_N = torch.where(stands_N, first_R[owner_N] + place_N, -1)
        carried_MN = place_N + 1 + torch.arange(num_modules, device=device)[:, None]
        tokens_MN = self._recent.tokens(rows, owner_N, carried_MN)
        step_M1 = torch.arange(num_modules, device=device)[:, None]
        return _Inputs(
            tokens_MN=torch.where(carried_MN == live_N, v.next_R[owner_N], tokens_MN),
            draft_MN=(carried_MN - live_N).clamp(min=0),
            positions_N=positions_N,
            context_lens_N=positions_N + 1,
            slots_N=v.slots_R[owner_N],
            owner_N=owner_N,
            source_N=self._recent.source(rows, owner_N, place_N),
            read_R=(begin_R + each + live_R - 1).clamp(min=0),
            drawn_MR=(first_R + live_R + 1 + step_M1).masked_fill(step_M1 >= v.k_R, -1),
        )

    def _draft(
        self,
        runtime: DraftRuntime,
        i: _Inputs,
        table: Tensor,
        draw: Draw,
        num: int,
        given: GivenRows | None = None,
    ) -> tuple[Tensor, ...]:
        gather = runtime.ops.gather
        drawn = list[Tensor]()
        state_NH = gather(table, i.source_N)
        rows = Rows(i.positions_N, i.slots_N, i.context_lens_N)
        for m, module in enumerate(self._modules):
            tokens_N = i.tokens_MN[m]
            for number, tokens_R in enumerate(drawn, 1):
                tokens_N = torch.where(i.draft_MN[m] == number, tokens_R[i.owner_N], tokens_N)
            embedded_NH = gather(self._embed_VH, tokens_N)
            if given is not None:
                tokens_at_N = torch.where(i.positions_N >= 0, i.positions_N + 1 + m, -1)
                embedded_NH = given.at(i.slots_N, tokens_at_N).over(embedded_NH)
            state_NH = module(embedded_NH, state_NH, runtime.attention(rows))
            if m < num:
                logits_RV = self._head(gather(state_NH, i.read_R))
                drawn.append(draw(logits_RV, None, i.drawn_MR[m], None))
        return tuple(drawn)
