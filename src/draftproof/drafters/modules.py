"""MTP with several modules: each drafts one token further, from the states of the one before it.

Module m's row at position p carries the token at p + 1 + m, so its last m rows were made of drafts. Once the true
tokens are known those rows are computed again: a request's last target states are kept, and its next pass begins with
their rows, in every module alike.
Shapes: R requests, T target rows, E kept rows of a slot, N = T + R * E draft rows, M modules, S slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.attention.base import Rows
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Draw, Proposal, RoundSize, Verified
from draftproof.drafters.fused import FusedNetwork
from draftproof.drafters.head import PassSize
from draftproof.kernels.graphs import EAGER
from draftproof.kernels.linear import PackedLinear
from draftproof.models import cost
from draftproof.models.cost import Cost


class _Inputs(NamedTuple):
    """The buffers of a draft pass. `draft_MN`: number of the draft that the row carries, from 1; 0: it carries
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


class _Kept(NamedTuple):
    """The rows that a slot's next pass begins with: its last `count` target states and tokens, at the end of E places;
    the last of them is at position `end` - 1."""

    states_SEH: Tensor
    tokens_SE: Tensor
    count_S: Tensor
    end_S: Tensor


class ModulesDrafter(Drafter):
    """The drafter around several modules. Those beyond the drafts asked for run too: their keys must be there when they
    are wanted."""

    def __init__(
        self,
        modules: Sequence[FusedNetwork],
        embed_VH: Tensor,
        head: PackedLinear,
        spec: DraftSpec,
        num_slots: int,
    ) -> None:
        assert len(modules) > 1 and len(spec.kv) == len(modules)
        self.spec = spec
        self._modules = tuple(modules)
        self._embed_VH = embed_VH
        self._head = head
        self._runtime: DraftRuntime | None = None
        kept = len(modules) - 1
        hidden = embed_VH.shape[1]
        zeros = torch.zeros(num_slots, kept, dtype=torch.int64, device=embed_VH.device)
        states_SEH = embed_VH.new_zeros(num_slots, kept, hidden)
        self._kept = _Kept(states_SEH, zeros, zeros[:, 0].clone(), zeros[:, 0].clone())

    def bind(self, runtime: DraftRuntime) -> None:
        self._runtime = runtime

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        """Forget what was kept for another request. Rows of cached pages are done with: none has to be repeated."""
        self._kept.count_S[slot] = 0

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """Feed rows kept and verified through all modules; draft a token from each, as many as are wanted."""
        runtime = self._runtime
        v = verified
        draw = verified.draw
        assert runtime is not None, "bind comes before propose"
        num = min(num_drafts, len(self._modules))
        num_requests = len(v.slots_R)
        table = torch.cat((v.taps[0], self._kept.states_SEH[v.slots_R].flatten(0, 1)))
        own = self._inputs(v)
        inputs = (*own, table, *draw.inputs)

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            split = len(own)
            return self._draft(
                runtime, _Inputs(*given[:split]), given[split], draw.over(given[split + 1 :]), num
            )

        key = ("draft", self, len(v.tokens_T), num_requests, num)
        drawn = (runtime.graphs if draw.inputs else EAGER).run(key, run, inputs)
        self._keep(v, table)
        tokens_RK = torch.stack(drawn, 1) if num else v.next_R.new_zeros((num_requests, 0))
        return Proposal(tokens_RK, v.k_R.clamp(max=num))

    def cost(self, size: RoundSize) -> Cost:
        """Every module computes every row, those that were kept too."""
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

    def _inputs(self, v: Verified) -> _Inputs:
        """The buffers of a pass. Example: M = 2, one request kept a state at 4 and verified [s5 d6 d7]@5..7, of which
        s5 d6 live, next r7: rows @4 @5 @6 pad; tokens of module 0: s5 d6 r7, of module 1: d6 r7 and the first draft."""
        kept = self._kept
        num_modules = len(self._modules)
        R = len(v.slots_R)
        each = num_modules - 1
        device = v.tokens_T.device
        start_R = v.query_start_loc_R1[:-1]
        at_N = torch.arange(len(v.tokens_T) + R * each, device=device)
        begin_R = start_R + torch.arange(R, device=device) * each
        owner_N = torch.searchsorted(begin_R, at_N, right=True) - 1
        # a row's place among its request's verified ones; below 0 it is a kept one
        place_N = at_N - begin_R[owner_N] - each
        first_R = _first(v)
        live_R = v.live_R
        known_R = torch.where(kept.end_S[v.slots_R] == first_R, kept.count_S[v.slots_R], 0)
        live_N = live_R[owner_N]
        stands_N = (place_N >= -known_R[owner_N]) & (place_N < live_N) & (live_N > 0)
        positions_N = torch.where(stands_N, first_R[owner_N] + place_N, -1)
        kept_at_N = len(v.tokens_T) + (owner_N + 1) * each + place_N
        source_N = torch.where(place_N < 0, kept_at_N, start_R[owner_N] + place_N)
        carried_MN = place_N + 1 + torch.arange(num_modules, device=device)[:, None]
        tokens_MN = self._tokens(v, owner_N, carried_MN)
        step_M1 = torch.arange(num_modules, device=device)[:, None]
        return _Inputs(
            tokens_MN=torch.where(carried_MN == live_N, v.next_R[owner_N], tokens_MN),
            draft_MN=(carried_MN - live_N).clamp(min=0),
            positions_N=positions_N,
            context_lens_N=positions_N + 1,
            slots_N=v.slots_R[owner_N],
            owner_N=owner_N,
            source_N=source_N,
            read_R=(begin_R + each + live_R - 1).clamp(min=0),
            drawn_MR=(first_R + live_R + 1 + step_M1).masked_fill(step_M1 >= v.k_R, -1),
        )

    def _tokens(self, v: Verified, owner_X: Tensor, place_YX: Tensor) -> Tensor:
        """The token at a place among a request's verified ones; kept ones lie below 0."""
        each = self._kept.tokens_SE.shape[1]
        row_YX = (v.query_start_loc_R1[:-1][owner_X] + place_YX).clamp(0, len(v.tokens_T) - 1)
        old_YX = self._kept.tokens_SE[
            v.slots_R[owner_X].expand_as(place_YX), (each + place_YX).clamp(0, each - 1)
        ]
        return torch.where(place_YX < 0, old_YX, v.tokens_T[row_YX])

    def _draft(
        self, runtime: DraftRuntime, i: _Inputs, table: Tensor, draw: Draw, num: int
    ) -> tuple[Tensor, ...]:
        gather = runtime.ops.gather
        drawn = list[Tensor]()
        state_NH = gather(table, i.source_N)
        rows = Rows(i.positions_N, i.slots_N, i.context_lens_N)
        for m, module in enumerate(self._modules):
            tokens_N = i.tokens_MN[m]
            for number, tokens_R in enumerate(drawn, 1):
                tokens_N = torch.where(i.draft_MN[m] == number, tokens_R[i.owner_N], tokens_N)
            state_NH = module(gather(self._embed_VH, tokens_N), state_NH, runtime.attention(rows))
            if m < num:
                logits_RV = self._head(gather(state_NH, i.read_R))
                drawn.append(draw(logits_RV, None, i.drawn_MR[m], None))
        return tuple(drawn)

    def _keep(self, v: Verified, table: Tensor) -> None:
        """Keep the last E live rows for the next pass; where none lives, what was kept stays."""
        kept = self._kept
        R = len(v.slots_R)
        each = kept.tokens_SE.shape[1]
        owner_R = torch.arange(R, device=v.slots_R.device)
        place_ER = v.live_R - each + torch.arange(each, device=v.slots_R.device)[:, None]
        kept_at_ER = len(v.tokens_T) + (owner_R + 1) * each + place_ER
        source_ER = torch.where(place_ER < 0, kept_at_ER, v.query_start_loc_R1[:-1] + place_ER)
        tokens_ER = self._tokens(v, owner_R, place_ER)
        first_R = _first(v)
        slots_R = v.slots_R
        follows_R = kept.end_S[slots_R] == first_R
        count_R = torch.where(follows_R, kept.count_S[slots_R], 0) + v.live_R
        stays_R = v.live_R == 0
        kept.count_S[slots_R] = torch.where(stays_R, kept.count_S[slots_R], count_R.clamp(max=each))
        kept.end_S[slots_R] = torch.where(stays_R, kept.end_S[slots_R], first_R + v.live_R)
        kept.tokens_SE[slots_R] = tokens_ER.t()
        kept.states_SEH[slots_R] = table[source_ER.t()]


def _first(v: Verified) -> Tensor:
    """Position of each request's first row."""
    return v.positions_T[v.query_start_loc_R1[:-1].clamp(max=len(v.positions_T) - 1)]
