"""What the device knows of every slot: its tokens, how many are known, computed and drafted.

Shapes: S slots, L longest sequence, B blocks per slot, R requests of a pass, T its rows, M its sampled rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.attention.base import Rows
from draftproof.drafters.base import Draw, Proposal, Verified
from draftproof.engine.scheduler import Plan
from draftproof.sampling.verifier import Verdict, VerifyRows

Drawer = Callable[[Tensor, Tensor], Draw]  # slots_R, lengths_R -> the round's draw


@dataclass(slots=True)
class Batch:
    """One pass on the device. `sampled_M` are the rows (indices into T) whose logits are sampled."""

    tokens_T: Tensor  # int64
    rows: Rows
    cu_R1: Tensor  # int64
    slots_R: Tensor  # int64
    num_rows_R: list[int]
    sampled_M: Tensor  # int64
    slots_M: Tensor  # int64
    positions_M: Tensor  # int64: position of the token that the row samples
    verify: VerifyRows
    slots_host: list[int]  # of slots_M


class State:
    """Slot tensors. Beyond its known tokens a slot's row of `tokens_SL` holds the drafts to be verified next."""

    def __init__(
        self, *, num_slots: int, max_len: int, max_blocks: int, num_drafts: int, device: torch.device
    ):
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.device = device
        self.tokens_SL = zeros(num_slots, max_len + num_drafts + 1, dtype=torch.int32)
        self.block_table_SB = zeros(num_slots, max_blocks, dtype=torch.int32)
        self.length_S = zeros(num_slots)
        self.computed_S = zeros(num_slots)
        self.draft_count_S = zeros(num_slots)
        self.limit_S = zeros(num_slots)
        self._num_blocks = [0] * num_slots  # host: how much of each table row is set

    def admit(self, slot: int, tokens: Seq[int], num_computed: int, limit: int) -> None:
        """A sequence takes a slot: `tokens` known, the first `num_computed` of them in the cache."""
        self.tokens_SL[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length_S[slot] = len(tokens)
        self.computed_S[slot] = num_computed
        self.draft_count_S[slot] = 0
        self.limit_S[slot] = limit

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
        """The plan's rows as tensors.

        Example: request 0 decodes with 2 drafts (3 rows, all sampled), request 1 computes 4 prompt rows (none
        sampled): num_rows 3 4, cu 0 3 7, owner 0 0 0 1 1 1 1, offset 0 1 2 0 1 2 3, sampled rows 0 1 2.
        """
        num_rows = np.array([w.num_rows for w in plan.work], dtype=np.int64)
        num_sampled = np.array([w.num_sampled for w in plan.work], dtype=np.int64)
        cu = np.concatenate([[0], np.cumsum(num_rows)])
        owner = np.repeat(np.arange(len(num_rows)), num_rows)
        offset = np.arange(cu[-1]) - cu[owner]
        sampled = np.flatnonzero(offset >= (num_rows - num_sampled)[owner])
        slots = np.array([w.sequence.slot for w in plan.work], dtype=np.int64)

        slots_R, slots_T = self._upload(slots), self._upload(slots[owner])
        positions_T = self.computed_S[slots_T] + self._upload(offset)
        sampled_M = self._upload(sampled)
        num_R = self._upload(num_sampled)
        verify = VerifyRows(
            first_R=self._upload(np.cumsum(num_sampled) - num_sampled),
            num_R=num_R,
            slots_R=slots_R,
            lengths_R=self.length_S[slots_R],
            draft_count_R=torch.minimum(self.draft_count_S[slots_R], (num_R - 1).clamp_(min=0)),
            width=int(num_sampled.max(initial=1)) or 1,
        )
        return Batch(
            tokens_T=self.tokens_SL[slots_T, positions_T].long(),
            rows=Rows.causal(positions_T, slots_T),
            cu_R1=self._upload(cu),
            slots_R=slots_R,
            num_rows_R=num_rows.tolist(),
            sampled_M=sampled_M,
            slots_M=slots_T[sampled_M],
            positions_M=positions_T[sampled_M] + 1,
            verify=verify,
            slots_host=slots[owner[sampled]].tolist(),
        )

    def commit(
        self, batch: Batch, verdict: Verdict, taps: tuple[Tensor, ...], drawer: Drawer, wanted: Seq[int]
    ) -> Verified:
        """Take over what was verified, and say what the drafter may build on. `wanted`: drafts per request."""
        slots_R, num_R = batch.slots_R, batch.verify.num_R
        rows_R = batch.cu_R1[1:] - batch.cu_R1[:-1]
        emitted_R = verdict.num_emitted_R
        at_RW = batch.verify.lengths_R[:, None] + torch.arange(verdict.tokens_RW.shape[1], device=self.device)
        # what lands past the new length is scratch, as drafts are
        self.tokens_SL[slots_R[:, None], at_RW] = verdict.tokens_RW.clamp(min=0).int()
        length_R = batch.verify.lengths_R + emitted_R
        live_R = torch.where(num_R > 0, rows_R - num_R + emitted_R, rows_R)
        computed_R = self.computed_S[slots_R] + live_R
        self.length_S[slots_R] = length_R
        self.computed_S[slots_R] = computed_R
        self.draft_count_S[slots_R] = 0
        # one token always follows the drafts, so the last useful draft is the one before the limit
        room_R = (self.limit_S[slots_R] - length_R - 1).clamp_(min=0)
        return Verified(
            tokens_T=batch.tokens_T,
            positions_T=batch.rows.positions_T,
            cu_R1=batch.cu_R1,
            slots_R=slots_R,
            live_R=live_R,
            next_R=self.tokens_SL[slots_R, computed_R].long(),
            k_R=torch.minimum(torch.tensor(wanted, device=self.device), room_R),
            taps=taps,
            draw=drawer(slots_R, length_R),
            num_rows_R=batch.num_rows_R,
            history=lambda r: self.history(int(slots_R[r])),
        )

    def history(self, slot: int) -> Tensor:
        """The slot's known tokens (int32, on the device; free to read on a CPU)."""
        return self.tokens_SL[slot, : int(self.length_S[slot])]

    def store_drafts(self, slots_R: Tensor, proposal: Proposal) -> None:
        """Drafts go behind the known tokens."""
        at_RK = self.length_S[slots_R][:, None] + torch.arange(
            proposal.tokens_RK.shape[1], device=self.device
        )
        self.tokens_SL[slots_R[:, None], at_RK] = proposal.tokens_RK.int()
        self.draft_count_S[slots_R] = proposal.count_R

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
