"""Several drafters as one: per request, the first that has a proposal wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import (
    Drafter,
    DraftRuntime,
    DraftSpec,
    InputLayout,
    Proposal,
    RoundSize,
    Taps,
    Verified,
    name_of,
)
from draftproof.models.cost import Cost


class ChainDrafter(Drafter):
    """A drafter made of several. Each sees every round, so that all keep their state in step. `most[i]`: tokens that
    member i proposes at most."""

    def __init__(self, drafters: Sequence[Drafter], most: Sequence[int]) -> None:
        self._drafters = list(drafters)
        self._most = list(most)
        self.name = f"chain of {', '.join(map(name_of, drafters))}"
        self._host_looks = False
        specs = [d.spec for d in drafters]
        layers = sorted({i for s in specs for i in s.taps.layers})
        self._taps = Taps(layers=tuple(layers), final=any(s.taps.final for s in specs))
        self.spec = DraftSpec(
            taps=self._taps,
            layout=lambda k: _widest([s.layout(k) for s in specs]),
            kv=tuple(shape for s in specs for shape in s.kv),
            borrow=tuple(cache for s in specs for cache in s.borrow),
            reads_ahead=max(s.reads_ahead for s in specs),
            host_tokens=any(s.host_tokens for s in specs),
        )

    def bind(self, runtime: DraftRuntime) -> None:
        self._host_looks = runtime.host_looks
        own = iter(runtime.cache.layers)
        lent = iter(runtime.cache.layers[len(self.spec.kv) :])
        for drafter in self._drafters:
            spec = drafter.spec
            cache = runtime.cache
            layers = [*islice(own, len(spec.kv)), *islice(lent, len(spec.borrow))]
            part = PagedCache(layers, cache.block_table_SB)
            drafter.bind(dataclasses.replace(runtime, cache=part))

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        for drafter in self._drafters:
            drafter.admit(slot, tokens, num_cached)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        tokens_RK = verified.next_R.new_zeros((verified.num_requests, num_drafts))
        count_R = torch.zeros_like(verified.k_R)
        open_R = verified.k_R
        for drafter, most in zip(self._drafters, self._most, strict=True):
            # a member without open requests still ingests the rows, but does not draft
            idle = self._host_looks and not bool(open_R.any())
            num = 0 if idle else min(num_drafts, most)
            k_R = open_R.clamp(max=most)
            given = dataclasses.replace(
                verified, k_R=k_R, taps=self._taps_for(drafter.spec.taps, verified.taps)
            )
            proposal = drafter.propose(given, num)
            width = min(proposal.tokens_RK.shape[1], num)
            given_R = proposal.count_R.clamp(max=width)
            take_R = (open_R > 0) & (given_R > 0)
            tokens_RK[:, :width] = torch.where(
                take_R[:, None], proposal.tokens_RK[:, :width], tokens_RK[:, :width]
            )
            count_R = torch.where(take_R, given_R, count_R)
            open_R = open_R.masked_fill(take_R, 0)
        return Proposal(tokens_RK, count_R)

    def cost(self, size: RoundSize) -> Cost | None:
        """Where the host looks, the first member may have drafts for everybody, and the others none to make."""
        found = Cost()
        for number, (drafter, most) in enumerate(zip(self._drafters, self._most, strict=True)):
            num_drafts = 0 if self._host_looks and number else min(size.num_drafts, most)
            its = drafter.cost(dataclasses.replace(size, num_drafts=num_drafts))
            if its is None:
                return None
            found += its
        return found

    def _taps_for(self, wanted: Taps, taps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own = [taps[self._taps.layers.index(i)] for i in wanted.layers]
        return (*own, taps[-1]) if wanted.final else tuple(own)


def _widest(layouts: Sequence[InputLayout]) -> InputLayout:
    """A layout with all that the engine reads of one: whether rows look one token ahead, and how many follow the
    verified ones."""
    return InputLayout(
        context="all",
        shift=1 if any(layout.shift for layout in layouts) else 0,
        masks=max(layout.anchor + layout.masks for layout in layouts),
    )
