"""A draft model with another tokenizer than its target: it reads the text, continues it in its own tokens, and the
continuation is encoded for the target. It has its own cache, because its tokens' positions differ from the target's.

Shapes: R requests drafted for, S slots, B blocks of a slot, N rows of a pass, K target drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention, Rows
from draftproof.cache.pages import PageAllocator
from draftproof.cache.pool import allocate
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, RoundSize, Verified
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import PassSize
from draftproof.drafters.model_head import pass_cost
from draftproof.drafters.retokenize import DraftIds, TargetText
from draftproof.drafters.token_map import token_texts
from draftproof.models.cost import Cost
from draftproof.models.decoder import Decoder

MOST_CONTEXT = 4096  # draft tokens; of a longer text only the end is read
MOST_STEPS = 4  # maximum draft tokens generated per target draft
MOST_BYTES = 2 << 30  # size of the cache; a request that gets no blocks has no drafts


@dataclass(slots=True)
class _Request:
    text: TargetText
    draft: DraftIds
    blocks: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # ids with cached keys and values, from position 0 on


@dataclass(frozen=True, slots=True)
class _Job:
    """One request's part of a round: draft `steps` tokens after `ids`, of which the first `num_kept` are cached."""

    index: int
    slot: int
    request: _Request
    ids: list[int]
    num_kept: int
    steps: int


class TextDrafter(Drafter):
    """The drafter around such a model. It drafts greedily, because sampling noise is per token id and the vocabularies
    differ."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, ctx: DraftContext, decoder: Decoder, context: int, target: Any, draft: Any) -> None:
        """`context`: number of positions that the decoder was built for; `target`, `draft`: tokenizers."""
        self._target = target
        self._draft = draft
        self._decoder = decoder
        self._unknown = _special_alone(target, draft)
        self._foreign = _special_alone(draft, target)
        self._builder = ctx.builder
        self._config = ctx.config
        self._context = context
        self._requests: dict[int, _Request] = {}
        self._runtime: DraftRuntime | None = None
        self._pages = PageAllocator(2, 1, sharing=False, lookahead=0)

    def bind(self, runtime: DraftRuntime) -> None:
        """Allocate the cache for `max_num_seqs` requests, or for as many as fit into `MOST_BYTES`."""
        if self._runtime is not None:
            return
        size = self._config.block_size
        num_slots = self._config.max_num_seqs
        device = self._builder.device
        dtype = self._builder.dtype
        each = math.ceil(self._context / size)
        block_bytes = size * sum(shape.bytes_per_token(dtype) for shape in self._decoder.kv)
        num_blocks = max(each, min(num_slots * each, MOST_BYTES // block_bytes))
        table_SB = torch.zeros((num_slots, each), dtype=torch.int32, device=device)
        cache = allocate(
            list(self._decoder.kv), table_SB, num_blocks + 1, size, dtype, device, runtime.backend.layout
        )
        self._pages = PageAllocator(num_blocks + 1, size, sharing=False, lookahead=0)
        self._runtime = DraftRuntime(
            ops=runtime.ops, backend=runtime.backend, cache=cache, graphs=runtime.graphs
        )

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self.release(slot)
        self._requests[slot] = _Request(TargetText(self._target, self._unknown), DraftIds(self._draft))

    def release(self, slot: int) -> None:
        request = self._requests.pop(slot, None)
        if request is not None:
            self._pages.release(request.blocks)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        wanted = verified.k_R.tolist()
        slots = verified.slots_R.tolist()
        tokens_RK = np.zeros((len(wanted), num_drafts), dtype=np.int64)
        count_R = np.zeros(len(wanted), dtype=np.int64)
        jobs = [
            job
            for r, (slot, k) in enumerate(zip(slots, wanted, strict=True))
            if k > 0 and (job := self._job(r, slot, verified, k)) is not None
        ]
        for job, drafted in zip(jobs, self._write(jobs), strict=True):
            own = next((n for n, i in enumerate(drafted) if i in self._foreign), len(drafted))
            text = job.request.draft.continuation(drafted[:own])
            found = job.request.text.continued(text, wanted[job.index]) if text else []
            tokens_RK[job.index, : len(found)] = found
            count_R[job.index] = len(found)
        device = verified.k_R.device
        return Proposal(torch.from_numpy(tokens_RK).to(device), torch.from_numpy(count_R).to(device))

    def cost(self, size: RoundSize) -> Cost:
        """Cost of a round, assuming that its tokens are as long as the target's."""
        found, common = (
            Cost(),
            {"requests": size.requests, "context": size.context, "itemsize": size.itemsize},
        )
        for step in range(size.num_drafts):
            fed = 1 if step else size.rows
            found += pass_cost(self._decoder, PassSize(fused=0, fed=fed, read=1, **common))
        return found

    def _job(self, index: int, slot: int, verified: Verified, k: int) -> _Job | None:
        """A request's part of the round; None if nothing can be drafted: incomplete character, or no free blocks."""
        if slot not in self._requests:
            self.admit(slot, [], 0)
        request = self._requests[slot]
        request.text.add(verified.history(index)[request.text.num_ids :].tolist())
        request.draft.update(request.text.text)
        ids = request.draft.ids
        num_target = request.text.num_ids
        if not request.text.ends_whole or not ids:
            return None
        steps = min(MOST_STEPS * k, max(k, math.ceil(k * len(ids) / num_target)), self._context // 4)
        ids = _end_of(ids, request.draft.prefix, self._context)
        num_blocks = math.ceil((len(ids) + steps) / self._pages.block_size)
        if not self._grow(slot, request, num_blocks):
            return None
        same = next(
            (i for i, pair in enumerate(zip(ids, request.cached, strict=False)) if pair[0] != pair[1]), None
        )
        num_same = min(len(ids), len(request.cached)) if same is None else same
        return _Job(index, slot, request, ids, min(num_same, len(ids) - 1), steps)

    def _grow(self, slot: int, request: _Request, num_blocks: int) -> bool:
        missing = num_blocks - len(request.blocks)
        if missing <= 0:
            return True
        fresh = self._pages.allocate(missing)
        if fresh is None:
            return False
        assert self._runtime is not None
        start = len(request.blocks)
        request.blocks = request.blocks + fresh
        table_SB = self._runtime.cache.block_table_SB
        table_SB[slot, start:num_blocks] = torch.tensor(fresh, dtype=torch.int32).to(table_SB.device)
        return True

    def _write(self, jobs: list[_Job]) -> list[list[int]]:
        """Generate the draft tokens of each job, and record which ids are cached now."""
        if not jobs:
            return []
        for job in jobs:  # overwritten entries must not count as cached if a pass fails
            del job.request.cached[job.num_kept :]
        newest_R = self._decoder.logits(self._read(jobs)).argmax(-1)
        drawn = [newest_R]
        slots_R = self._upload([job.slot for job in jobs])
        for step in range(1, max(job.steps for job in jobs)):
            positions = [len(job.ids) + step - 1 if step < job.steps else -1 for job in jobs]
            hidden_RH = self._pass(newest_R, self._upload(positions), slots_R, max_query_len=1)
            newest_R = self._decoder.logits(hidden_RH).argmax(-1)
            drawn.append(newest_R)
        written = torch.stack(drawn, 1).tolist()
        drafted = [row[: job.steps] for row, job in zip(written, jobs, strict=True)]
        for job, ids in zip(jobs, drafted, strict=True):
            job.request.cached = job.ids + ids[:-1]
        return drafted

    def _read(self, jobs: list[_Job]) -> Tensor:
        """Compute what is not cached; returns the state of each job's last token, [R, H]."""
        rows = [(i, job.slot, p) for i, job in enumerate(jobs) for p in range(job.num_kept, len(job.ids))]
        most = self._config.max_num_batched_tokens
        hidden = list[Tensor]()
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            tokens_N = self._upload([jobs[i].ids[p] for i, _, p in part])
            slots_N, positions_N = (self._upload([row[column] for row in part]) for column in (1, 2))
            last = [n for n, (i, _, p) in enumerate(part) if p + 1 == len(jobs[i].ids)]
            hidden.append(self._pass(tokens_N, positions_N, slots_N)[self._upload(last)])
        return torch.cat(hidden)

    def _pass(self, tokens_N: Tensor, positions_N: Tensor, slots_N: Tensor, max_query_len: int = 0) -> Tensor:
        m = self._runtime
        assert m is not None, "bind comes before propose"
        rows = Rows(positions_N, slots_N, positions_N + 1, max_query_len=max_query_len)
        return self._decoder(tokens_N, PagedAttention(m.ops, m.backend, m.cache, rows)).hidden_TH

    def _upload(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._builder.device)


def context_of(ctx: DraftContext, most_positions: int) -> int:
    """Maximum number of draft tokens cached per request."""
    return min(most_positions, MOST_CONTEXT, MOST_STEPS * ctx.max_positions)


def _end_of(ids: list[int], prefix: list[int], context: int) -> list[int]:
    """The part of `ids` that is read: all while there is room for drafts, else the end from a multiple of half the
    context on, so that the start rarely moves and the cache stays valid."""
    room = context - context // 4
    if len(ids) <= room:
        return ids
    first = math.ceil((len(ids) + len(prefix) - room) / (context // 2)) * (context // 2)
    return prefix + ids[first:]


def _special_alone(tokenizer: Any, other: Any) -> frozenset[int]:
    """Special tokens of `tokenizer` that `other` does not have."""
    known = set(token_texts(other).values())
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special and token.content.encode() not in known)
