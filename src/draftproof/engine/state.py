"""What the device knows of every slot: its tokens, how many are known, computed and drafted.

Shapes: S slots, L longest sequence, B blocks per slot, R requests of a pass, M its sampled rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.drafters.base import Draw, Proposal, Verified
from draftproof.engine.scheduler import Plan
from draftproof.kernels.step import PassRows, SlotState, StepOps
from draftproof.sampling.verifier import Verdict, VerifyRows

Drawer = Callable[[Tensor, Tensor], Draw]  # slots_R, lengths_R -> the round's draw


@dataclass(slots=True)
class Batch:
    """One pass on the device, and what the host knows of it."""

    rows: PassRows
    work_3R: Tensor  # slot, rows, sampled rows
    verify: VerifyRows
    num_rows_R: list[int]
    slots_host: list[int]  # of the sampled rows


class State:
    """Slot tensors. Beyond its known tokens a slot's row of tokens holds the drafts to be verified next."""

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
        self.slots = SlotState(
            tokens_SL=zeros(num_slots, max_len + num_drafts + 1, dtype=torch.int32),
            length_S=zeros(num_slots),
            computed_S=zeros(num_slots),
            draft_count_S=zeros(num_slots),
            limit_S=zeros(num_slots),
        )
        self.block_table_SB = zeros(num_slots, max_blocks, dtype=torch.int32)
        self._ops = ops
        self._num_blocks = [0] * num_slots  # host: how much of each table row is set

    def admit(self, slot: int, tokens: Seq[int], num_computed: int, limit: int) -> None:
        """A sequence takes a slot: `tokens` known, the first `num_computed` of them in the cache."""
        self.release(slot)
        s = self.slots
        s.tokens_SL[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        s.length_S[slot] = len(tokens)
        s.computed_S[slot] = num_computed
        s.draft_count_S[slot] = 0
        s.limit_S[slot] = limit

    def release(self, slot: int) -> None:
        """The slot's stray writes go to the scrap page from now on."""
        self.block_table_SB[slot] = 0
        self._num_blocks[slot] = 0

    def set_blocks(self, slot: int, blocks: Seq[int]) -> None:
        """The slot's table row; only what is new is written."""
        start = self._num_blocks[slot]
        if start < len(blocks):
            self.block_table_SB[slot, start : len(blocks)] = torch.tensor(blocks[start:], dtype=torch.int32)
            self._num_blocks[slot] = len(blocks)

    def fill(self, plan: Plan) -> Batch:
        """The plan's rows as tensors."""
        num_rows = [w.num_rows for w in plan.work]
        num_sampled = [w.num_sampled for w in plan.work]
        slots = [w.sequence.slot for w in plan.work]
        work_3R = torch.tensor([slots, num_rows, num_sampled]).to(self.device)
        rows = self._ops.fill(self.slots, work_3R, sum(num_rows), sum(num_sampled))
        slots_R, _, num_R = work_3R.unbind()
        verify = VerifyRows(
            first_R=rows.first_R,
            num_R=num_R,
            slots_R=slots_R,
            lengths_R=rows.lengths_R,
            draft_count_R=rows.draft_count_R,
            width=max(1, *num_sampled),
        )
        slots_host = [slot for slot, n in zip(slots, num_sampled, strict=True) for _ in range(n)]
        return Batch(rows, work_3R, verify, num_rows, slots_host)

    def commit(
        self, batch: Batch, verdict: Verdict, taps: tuple[Tensor, ...], drawer: Drawer, wanted: Seq[int]
    ) -> Verified:
        """Take over what was verified, and say what the drafter may build on. `wanted`: drafts per request."""
        rows, slots_R = batch.rows, batch.verify.slots_R
        wanted_R = torch.tensor(wanted).to(self.device)
        done = self._ops.commit(
            self.slots, batch.work_3R, rows, verdict.tokens_RW, verdict.num_emitted_R, wanted_R
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
            num_rows_R=batch.num_rows_R,
            history=lambda r: self.history(int(slots_R[r])),
        )

    def pack(self, batch: Batch, verdict: Verdict, proposed_R: Tensor, broken_R: Tensor) -> Tensor:
        """What the host wants to know of a pass, as `outbox.Flight` describes it, int64 [R, W + 4]."""
        columns = (verdict.num_emitted_R, batch.verify.draft_count_R, proposed_R, broken_R)
        return torch.cat((verdict.tokens_RW, torch.stack(columns, 1)), dim=1)

    def history(self, slot: int) -> Tensor:
        """The slot's known tokens, int32, on the host: free on a CPU, a wait for the device elsewhere."""
        return self.slots.tokens_SL[slot, : int(self.slots.length_S[slot])].cpu()

    def store_drafts(self, verified: Verified, proposal: Proposal, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Drafts go behind the known tokens: (how many were taken_R, whether a bad id cut them short_R)."""
        return self._ops.store_drafts(
            self.slots, verified.slots_R, proposal.tokens_RK, proposal.count_R, verified.k_R, vocab_size
        )
