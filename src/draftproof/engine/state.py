"""What the device knows of every slot: its tokens, how many are known, computed and drafted.

Shapes: S slots and one for scratch, L longest sequence, B blocks per slot, R requests of a pass, T its rows, M its
sampled rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.drafters.base import Draw, Proposal, Verified
from draftproof.engine.scheduler import Work
from draftproof.kernels.step import PassRows, SlotState, StepOps
from draftproof.kernels.transfer import upload
from draftproof.sampling.verifier import Verdict, VerifyRows

Drawer = Callable[[Tensor, Tensor], Draw]  # slots_R, lengths_R -> the round's draw


@dataclass(frozen=True, slots=True)
class Size:
    """How much a pass computes: all that the host must know of it beforehand."""

    num_requests: int
    num_rows: int
    most_rows: int  # of one request
    num_sampled: int
    most_sampled: int  # of one request; at least 1
    num_drafts: int  # the most that any request wants after it
    repeats: bool  # passes of this size come again and again: worth running them as graphs

    @classmethod
    def of(cls, work: Seq[Work], wanted: Seq[int], *, repeats: bool) -> Size:
        sampled = [w.num_sampled for w in work]
        rows = [w.num_rows for w in work]
        return cls(len(work), sum(rows), max(rows), sum(sampled), max(1, *sampled), max(wanted), repeats)

    @classmethod
    def decoding(cls, num_requests: int, each: int, num_drafts: int) -> Size:
        """Every request samples `each` rows and has no others."""
        num_rows = num_requests * each
        return cls(num_requests, num_rows, each, num_rows, each, num_drafts, repeats=True)


class State:
    """Slot tensors. Beyond its known tokens a slot's row of tokens holds the drafts to be verified next.

    The last slot belongs to nobody and is always at its limit: rows that only fill a pass up name it.
    """

    def __init__(
        self,
        ops: StepOps,
        *,
        num_slots: int,
        max_len: int,
        max_blocks: int,
        num_drafts: int,
        device: torch.device,
    ) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.device = device
        self.max_len = max_len
        self.scratch_slot = num_slots
        self.slots = SlotState(
            tokens_SL=zeros(num_slots + 1, max_len + num_drafts + 1, dtype=torch.int32),
            length_S=zeros(num_slots + 1),
            computed_S=zeros(num_slots + 1),
            draft_count_S=zeros(num_slots + 1),
            limit_S=zeros(num_slots + 1),
        )
        self.block_table_SB = zeros(num_slots + 1, max_blocks, dtype=torch.int32)
        self._ops = ops
        self._num_blocks = [0] * num_slots  # host: how much of each table row is set
        self._entries: list[tuple[int, int]] = []  # of the block table, to be written: index, block

    def admit(self, slot: int, tokens: Seq[int], num_computed: int, limit: int) -> None:
        """A sequence takes a slot: `tokens` known, the first `num_computed` of them in the cache."""
        self.release(slot)
        s = self.slots
        s.tokens_SL[slot, : len(tokens)] = upload(tokens, self.device)
        s.length_S[slot] = len(tokens)
        s.computed_S[slot] = num_computed
        s.draft_count_S[slot] = 0
        s.limit_S[slot] = limit

    def release(self, slot: int) -> None:
        """The slot's stray writes go to the scrap page from now on."""
        self.block_table_SB[slot] = 0
        self._num_blocks[slot] = 0
        width = self.block_table_SB.shape[1]
        self._entries = [entry for entry in self._entries if entry[0] // width != slot]

    def set_blocks(self, slot: int, blocks: Seq[int]) -> None:
        """The slot's table row, in force from the next `load` on; only what is new is written."""
        start, row = self._num_blocks[slot], slot * self.block_table_SB.shape[1]
        self._entries += [(row + i, blocks[i]) for i in range(start, len(blocks))]
        self._num_blocks[slot] = max(start, len(blocks))

    def load(self, work: Seq[Work], wanted: Seq[int], num_requests: int) -> Tensor:
        """To the device in one copy: int64 [4, R], slot, rows, sampled rows and wanted drafts of each request, filled
        up to `num_requests` with rows of the scratch slot like the first request's; and the new table entries."""
        columns = [(w.sequence.slot, w.num_rows, w.num_sampled, k) for w, k in zip(work, wanted, strict=True)]
        columns += [(self.scratch_slot, *columns[0][1:])] * (num_requests - len(columns))
        entries, self._entries = self._entries, []
        flat = [x for row in zip(*columns, strict=True) for x in row]
        flat += [index for index, _ in entries] + [block for _, block in entries]
        work_4R, index_E, block_E = upload(flat, self.device).split(
            (4 * num_requests, len(entries), len(entries))
        )
        if entries:
            self.block_table_SB.view(-1).index_copy_(0, index_E, block_E.int())
        return work_4R.view(4, num_requests)

    def idle(self, size: Size) -> Tensor:
        """`load`'s tensor for a pass of requests alike in which nobody takes part."""
        R = size.num_requests
        rows = [self.scratch_slot, size.num_rows // R, size.num_sampled // R, size.num_drafts]
        return upload([x for x in rows for _ in range(R)], self.device).view(4, R)

    def fill(self, size: Size, work_4R: Tensor) -> tuple[PassRows, VerifyRows]:
        """The rows of a pass, and which of them verify whose drafts."""
        slots_R, _, num_R, _ = work_4R.unbind()
        rows = self._ops.fill(self.slots, work_4R[:3], size.num_rows, size.num_sampled)
        return rows, VerifyRows(
            first_R=rows.first_R,
            num_R=num_R,
            slots_R=slots_R,
            lengths_R=rows.lengths_R,
            draft_count_R=rows.draft_count_R,
            width=size.most_sampled,
        )

    def commit(
        self,
        size: Size,
        rows: PassRows,
        work_4R: Tensor,
        verdict: Verdict,
        taps: tuple[Tensor, ...],
        drawer: Drawer,
    ) -> Verified:
        """Take over what was verified, and say what the drafter may build on."""
        slots_R, _, _, wanted_R = work_4R.unbind()
        done = self._ops.commit(
            self.slots, work_4R[:3], rows, verdict.tokens_RW, verdict.num_emitted_R, wanted_R
        )
        return Verified(
            tokens_T=rows.tokens_T,
            positions_T=rows.positions_T,
            cu_R1=rows.cu_R1,
            slots_R=slots_R,
            live_R=done.live_R,
            next_R=done.next_R,
            k_R=done.k_R,
            taps=taps,
            draw=drawer(slots_R, done.length_R),
            history=lambda r: self.history(int(slots_R[r])),
            repeats=size.repeats,
        )

    def history(self, slot: int) -> Tensor:
        """The slot's known tokens, int32, on the host: free on a CPU, a wait for the device elsewhere."""
        return self.slots.tokens_SL[slot, : int(self.slots.length_S[slot])].cpu()

    def store_drafts(self, verified: Verified, proposal: Proposal, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Drafts go behind the known tokens: (how many were taken_R, whether a bad id cut them short_R)."""
        return self._ops.store_drafts(
            self.slots, verified.slots_R, proposal.tokens_RK, proposal.count_R, verified.k_R, vocab_size
        )
