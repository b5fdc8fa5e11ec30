"""Several drafters as one: each request uses the member whose drafts it has accepted most.

Shapes: R requests, K drafts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import torch
from torch import Tensor

from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import (
    Drafter,
    DraftRuntime,
    DraftSpec,
    Proposal,
    RoundSize,
    Taps,
    Verified,
    is_lookup,
    name_of,
)
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.models.cost import Cost

EXPECTED = 1.0  # prior: accepted drafts per round of a member
TRIED = 4  # rounds until a member's record is used; before, its acceptance counts as infinite, so it is tried
POOL_MEMORY, OWN_MEMORY = 0.99, 0.9  # decay per round of the record over all requests, and of one request's
POOL_WEIGHT, OWN_WEIGHT = 8.0, 4.0  # weight of the prior in rounds: of EXPECTED, and of the pool


@dataclass(slots=True)
class Record:
    """Decayed counts of one member's accepted drafts and rounds, over all requests and for the request in each slot."""

    accepted: float = 0.0
    rounds: float = 0.0
    num_rounds: int = 0  # ever
    of_slot: dict[int, tuple[float, float]] = field(default_factory=dict)  # slot -> accepted, rounds

    def expected(self, slot: int) -> float:
        """Expected number of accepted drafts in the member's next proposal; infinite until it was tried TRIED times."""
        if self.num_rounds < TRIED:
            return math.inf
        pool = (self.accepted + POOL_WEIGHT * EXPECTED) / (self.rounds + POOL_WEIGHT)
        accepted, rounds = self.of_slot.get(slot, (0.0, 0.0))
        return (accepted + OWN_WEIGHT * pool) / (rounds + OWN_WEIGHT)

    def count(self, slot: int, num_accepted: int) -> None:
        self.num_rounds += 1
        self.accepted = POOL_MEMORY * self.accepted + num_accepted
        self.rounds = POOL_MEMORY * self.rounds + 1
        accepted, rounds = self.of_slot.get(slot, (0.0, 0.0))
        self.of_slot[slot] = OWN_MEMORY * accepted + num_accepted, OWN_MEMORY * rounds + 1


class ChainDrafter(Drafter):
    """A drafter made of several. Each sees every round, so that all keep their state up to date, but those with a model
    may miss some (`limit_models`). `most[i]`: maximum number of tokens that member i proposes.

    Members are asked in order, each for the requests whose proposal so far has a lower expected acceptance than its
    own. Where the host would have to wait for the device to know that, the first member with a proposal wins. A member
    that fails proposes nothing; if it lost its state for a request, it is not asked for that request again. A request
    may name the members that may propose for it.
    """

    def __init__(self, drafters: Sequence[DrafterSandbox], most: Sequence[int], vocab_size: int) -> None:
        self._drafters = list(drafters)
        self._most = list(most)
        self._vocab_size = vocab_size
        self.name = f"chain of {', '.join(map(name_of, drafters))}"
        self._host_looks = False
        self._is_lookup_alone = False  # see `_has_one_lookup`; known once bound
        self._models = [number for number, drafter in enumerate(drafters) if not is_lookup(drafter)]
        self._most_of_models: int | None = None  # drafts of such a member for a request; see `limit_models`
        self._are_shown = True
        self.records = [Record() for _ in drafters]
        self._proposed_by: dict[int, int] = {}  # slot -> the member whose drafts are being verified
        self._only: dict[int, frozenset[int]] = {}  # slot -> members that may propose; missing: all
        self._may_SM: Tensor | None = None  # int64: 1 where a member may propose; None if the host reads
        specs = [d.spec for d in drafters]
        layers = sorted({i for s in specs for i in s.taps.layers})
        self._taps = Taps(layers=tuple(layers), final=any(s.taps.final for s in specs))
        self.spec = DraftSpec(
            taps=self._taps,
            kv=tuple(shape for s in specs for shape in s.kv),
            states=tuple(state for s in specs for state in s.states),
            borrow=tuple(cache for s in specs for cache in s.borrow),
            embeds=tuple(own for s in specs for own in s.embeds),
            reads_ahead=max(s.reads_ahead for s in specs),
            lookahead=max(s.lookahead for s in specs),
            host_tokens=any(s.host_tokens for s in specs),
            estimates=any(s.estimates for s in specs),
            stops=bool(self._models) and all(specs[number].stops for number in self._models),
        )

    def bind(self, runtime: DraftRuntime) -> None:
        self._host_looks = (
            runtime.host_looks or self.spec.host_tokens
        )  # reading tokens already waits for the device
        self._is_lookup_alone = self._host_looks and self._has_one_lookup()
        if not self._host_looks:
            self._may_SM = runtime.cache.block_table_SB.new_ones(
                (len(runtime.cache.block_table_SB), len(self._drafters)), dtype=torch.int64
            )
        own = iter(runtime.cache.layers)
        lent = iter(runtime.cache.layers[len(self.spec.kv) :])
        states = iter(runtime.cache.states)
        for drafter in self._drafters:
            spec = drafter.spec
            cache = runtime.cache
            layers = [*islice(own, len(spec.kv)), *islice(lent, len(spec.borrow))]
            part = PagedCache(layers, cache.block_table_SB, list(islice(states, len(spec.states))))
            drafter.bind(dataclasses.replace(runtime, cache=part))

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self._proposed_by.pop(slot, None)
        if self._only.pop(slot, None) is not None and self._may_SM is not None:
            self._may_SM[slot] = 1
        for record in self.records:
            record.of_slot.pop(slot, None)
        for drafter in self._drafters:
            drafter.admit(slot, tokens, num_cached)

    def restrict(self, slot: int, members: Sequence[int]) -> None:
        self._only[slot] = frozenset(members)
        if self._may_SM is not None:
            self._may_SM[slot] = self._may_SM.new_tensor(
                [int(number in members) for number in range(len(self._drafters))]
            )

    def limit_models(self, slots: Sequence[int], num_drafts: int | None, *, are_shown: bool) -> Drafter:
        self._most_of_models, self._are_shown = num_drafts, are_shown
        if are_shown:
            return self
        for number in self._models:
            drafter = self._drafters[number]
            drafter.lose([slot for slot in slots if drafter.drafts_for(slot)])
            drafter.pass_over()
        if not self._is_lookup_alone or any(slot in self._only for slot in slots):
            return self
        for slot in slots:  # nobody looks back at this round, and later ones are no competition of members
            self._proposed_by.pop(slot, None)
        return self._drafters[0]

    def _has_one_lookup(self) -> bool:
        """Whether without models only the first member drafts, as many tokens as the chain may. Its own pass can be
        recorded; this chain's takes Python, 0.11 ms for one request where steps of `tiny` take 0.28."""
        is_only = self._models == list(range(1, len(self._drafters)))
        reads_taps = self._drafters[0].spec.taps != Taps()  # which the chain picks from those of all
        return is_only and not reads_taps and self._most[0] == max(self._most)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        return (
            self._on_host(verified, num_drafts) if self._host_looks else self._on_device(verified, num_drafts)
        )

    def _on_host(self, verified: Verified, num_drafts: int) -> Proposal:
        """`propose` where the host reads what members propose. In lists: for few requests, an operation on tensors
        takes as long as a layer of a small model."""
        slots, wanted = verified.slots_R.tolist(), verified.k_R.tolist()
        self._look_back(verified, slots)
        proposals: list[list[int]] = [[] for _ in slots]
        drafters, broken = [0] * len(slots), [0] * len(slots)
        held = [0.0] * len(slots)  # expected acceptance of each request's proposal so far
        for number, (drafter, most) in enumerate(zip(self._drafters, self._most, strict=True)):
            if number in self._models and self._most_of_models is not None:
                if not self._are_shown or not any(map(drafter.drafts_for, slots)):
                    drafter.pass_over()
                    continue
                most = min(most, self._most_of_models)
            asked = [
                min(k, most) if drafter.drafts_for(slot) and self._is_better(number, slot, least) else 0
                for k, slot, least in zip(wanted, slots, held, strict=True)
            ]
            # a member without open requests still ingests the rows, but does not draft
            num = min(num_drafts, most) if any(asked) else 0
            k_R = torch.tensor(asked, device=verified.k_R.device)
            taps = self._taps_for(drafter.spec.taps, verified.taps)
            proposal = drafter.propose(dataclasses.replace(verified, k_R=k_R, taps=taps), num)
            counts, drafts = proposal.count_R.tolist(), proposal.tokens_RK[:, :num].tolist()
            for index, (k, count, ids) in enumerate(zip(asked, counts, drafts, strict=True)):
                given = ids[: max(0, min(k, count))]
                good = given[: self._num_good(given)]
                broken[index] |= (len(good) < len(given)) << number
                if good:
                    proposals[index], drafters[index] = good, number
                    self._proposed_by[slots[index]] = number
                    held[index] = self.records[number].expected(slots[index])
        padded = [[*ids, *([0] * (num_drafts - len(ids)))] for ids in proposals]
        each = torch.tensor([list(map(len, proposals)), drafters, broken], device=verified.k_R.device)
        tokens_RK = torch.tensor(padded, dtype=torch.int64, device=verified.k_R.device)
        return Proposal(tokens_RK.view(len(slots), num_drafts), *each.unbind())

    def _on_device(self, verified: Verified, num_drafts: int) -> Proposal:
        """`propose` without waiting for the device: the first member with a proposal wins."""
        tokens_RK = verified.next_R.new_zeros((verified.num_requests, num_drafts))
        count_R = torch.zeros_like(verified.k_R)
        drafter_R = torch.zeros_like(count_R)
        broken_R = torch.zeros_like(count_R)
        free_R = verified.k_R  # 0 once a request has a proposal
        for number, (drafter, most) in enumerate(zip(self._drafters, self._most, strict=True)):
            open_R = free_R
            if self._may_SM is not None:
                open_R = free_R * self._may_SM[verified.slots_R, number]
            k_R = open_R.clamp(max=most) * drafter.able(verified.slots_R)
            taps = self._taps_for(drafter.spec.taps, verified.taps)
            num = min(num_drafts, most)
            proposal = drafter.propose(dataclasses.replace(verified, k_R=k_R, taps=taps), num)
            drafts_RK = proposal.tokens_RK[:, :num]
            given_R, is_broken_R = self._cut(drafts_RK, torch.minimum(proposal.count_R, k_R))
            broken_R += is_broken_R.long() << number
            take_R = given_R > 0
            width = drafts_RK.shape[1]
            tokens_RK[:, :width] = torch.where(take_R[:, None], drafts_RK, tokens_RK[:, :width])
            count_R = torch.where(take_R, given_R, count_R)
            drafter_R = drafter_R.masked_fill(take_R, number)
            free_R = free_R.masked_fill(take_R, 0)
        return Proposal(tokens_RK, count_R, drafter_R, broken_R)

    def _num_good(self, ids: Sequence[int]) -> int:
        """Number of drafts before the first id outside the vocabulary."""
        return next((i for i, its in enumerate(ids) if not 0 <= its < self._vocab_size), len(ids))

    def _cut(self, drafts_RK: Tensor, count_R: Tensor) -> tuple[Tensor, Tensor]:
        """(number of drafts before the first id outside the vocabulary, whether there is such an id)."""
        at_K = torch.arange(drafts_RK.shape[1], device=drafts_RK.device)
        count_R = count_R.clamp(0, len(at_K))
        is_id_RK = (drafts_RK >= 0) & (drafts_RK < self._vocab_size)
        num_good_R = (is_id_RK & (at_K < count_R[:, None])).long().cumprod(1).sum(1)
        return num_good_R, num_good_R < count_R

    def _is_better(self, number: int, slot: int, held: float) -> bool:
        """Whether a member may propose for a request and its expected acceptance exceeds `held`."""
        if slot in self._only and number not in self._only[slot]:
            return False
        return number == 0 or self.records[number].expected(slot) > held

    def _look_back(self, verified: Verified, slots: Sequence[int]) -> None:
        """Count the acceptance of the last round's proposals: live rows after the first are accepted drafts. A request
        with one row had its drafts dropped for lack of space, so it is not counted."""
        if not self._proposed_by:
            return
        starts = verified.query_start_loc_R1.tolist()
        for slot, live, rows in zip(slots, verified.live_R.tolist(), pairwise(starts), strict=True):
            number = self._proposed_by.pop(slot, None)
            if number is not None and live > 0 and rows[1] - rows[0] > 1:
                self.records[number].count(slot, live - 1)

    def cost(self, size: RoundSize) -> Cost | None:
        """Lower bound: if the host reads, the first member may draft for all requests and the others for none."""
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
