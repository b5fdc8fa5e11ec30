"""The device's state of every slot: its tokens, block tables, and how many tokens are known, computed and drafted.

Shapes: S slots and one scratch slot, L longest sequence, B blocks per slot, G tables, R requests of a pass, T rows,
M sampled rows, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from draftproof.attention.given import GivenRows
from draftproof.drafters.base import Draw, Proposal, Verified
from draftproof.engine.interface import ScheduledRequest, TableEntry
from draftproof.engine.shapes import BatchShape
from draftproof.kernels.step.spec import PassRows, SlotState, StepOps
from draftproof.runtime.transfer import Numbers, upload
from draftproof.sampling.verifier import VerifyResult, VerifyRows

Drawer = Callable[[Tensor, Tensor], Draw]  # (slots_R, lengths_R) -> the round's sampling noise


class State:
    """Slot tensors. After its known tokens a slot's row of `tokens_SL` holds the drafts to be verified next.

    The last slot is scratch: padding rows name it. It is always at its limit, so it never grows.
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
        placeholders: tuple[int, int] = (-1, -1),
        num_tables: int = 1,
    ) -> None:
        """placeholders: ids that stand for no token and are never drafted; -1: none.
        num_tables: one for full-attention layers, and one for each window."""

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.device = device
        self.max_len = max_len
        self.placeholders = placeholders
        self.scratch_slot = num_slots
        self.slots = SlotState(
            tokens_SL=zeros(num_slots + 1, max_len + num_drafts + 1, dtype=torch.int32),
            length_S=zeros(num_slots + 1),
            computed_S=zeros(num_slots + 1),
            draft_count_S=zeros(num_slots + 1),
            limit_S=zeros(num_slots + 1),
        )
        self.nothing_S = zeros(num_slots + 1)
        self.block_tables_GSB = zeros(num_tables, num_slots + 1, max_blocks, dtype=torch.int32)
        self.block_table_SB = self.block_tables_GSB[0]
        self._ops = ops
        # On a CPU steps are written to fixed buffers, one for each number of requests, so that they can be replayed.
        self._tables = Numbers(self.block_tables_GSB) if device.type == "cpu" else None
        self._tokens = Numbers(self.slots.tokens_SL) if device.type == "cpu" else None
        self._draft_counts = Numbers(self.slots.draft_count_S) if device.type == "cpu" else None
        self._steps: dict[int, Numbers] = {}

    def admit(self, slot: int, tokens: Seq[int], num_computed: int, limit: int) -> None:
        """Put a request into a slot: `tokens` are known, the first `num_computed` of them in the cache."""
        self.release(slot)
        s = self.slots
        s.tokens_SL[slot, : len(tokens)] = upload(tokens, self.device)
        s.length_S[slot] = len(tokens)
        s.computed_S[slot] = num_computed
        s.draft_count_S[slot] = 0
        s.limit_S[slot] = limit

    def release(self, slot: int) -> None:
        """Point the slot's block tables at the scrap page, so that stray writes do no harm."""
        self.block_tables_GSB[:, slot] = 0

    def tokens(self, slot: int, first: int, number: int) -> list[int]:
        """`number` of a slot's tokens and drafts, from position `first` on."""
        if self._tokens is not None:
            at = slot * self.slots.tokens_SL.shape[1] + first
            return list(self._tokens.items[at : at + number])
        return [int(t) for t in self.slots.tokens_SL[slot, first : first + number].tolist()]

    def keep_drafts(self, slot: int, number: int) -> None:
        """Drop the slot's drafts beyond the first `number`; it has at least as many."""
        if self._draft_counts is not None:
            self._draft_counts.items[slot] = number
        else:
            self.slots.draft_count_S[slot] = number

    def force(self, slot: int, position: int, drafts: Seq[int]) -> None:
        """Replace the slot's drafts by `drafts`, the first of which is for `position`."""
        self.slots.tokens_SL[slot, position : position + len(drafts)] = upload(drafts, self.device)
        self.slots.draft_count_S[slot] = len(drafts)

    def load(
        self, scheduled: Seq[ScheduledRequest], shape: BatchShape, entries: Seq[TableEntry] = ()
    ) -> Tensor:
        """Copy a step to the device: int64 [4, R] with slot, rows, sampled rows and wanted drafts of each request,
        padded to `shape` with equal requests of the scratch slot, which may have no rows. The same copy updates the
        block tables. On a CPU the result is a fixed tensor for each number of requests."""
        num_requests = shape.num_requests
        columns = [(s.slot, s.num_rows, s.num_sampled, s.num_drafts) for s in scheduled]
        if missing := num_requests - len(columns):
            num_rows = shape.num_rows - sum(s.num_rows for s in scheduled)
            num_sampled = shape.num_sampled - sum(s.num_sampled for s in scheduled)
            columns += [(self.scratch_slot, num_rows // missing, num_sampled // missing, 0)] * missing
        flat = [x for row in zip(*columns, strict=True) for x in row]
        _, num_slots, width = self.block_tables_GSB.shape
        num_entries = len(entries)
        places = [((table * num_slots) + slot) * width + page for table, slot, page, _ in entries]
        if self._tables is not None:
            for place, (*_, block) in zip(places, entries, strict=True):
                self._tables.items[place] = block
            return self._write(flat, num_requests)
        if not entries:
            return upload(flat, self.device).view(4, num_requests)
        flat += places
        flat += [block for *_, block in entries]
        sizes = (4 * num_requests, num_entries, num_entries)
        scheduled_4R, index_E, block_E = upload(flat, self.device).split(sizes)
        self.block_tables_GSB.view(-1).index_copy_(0, index_E, block_E.int())
        return scheduled_4R.view(4, num_requests)

    def _write(self, flat: list[int], num_requests: int) -> Tensor:
        step = self._steps.get(num_requests)
        if step is None:
            step = self._steps[num_requests] = Numbers(torch.zeros((4, num_requests), dtype=torch.int64))
        step.items[:] = flat
        return step.tensor

    def idle(self, shape: BatchShape) -> Tensor:
        """`load`'s tensor for a dummy pass: equal requests, all of the scratch slot."""
        R = shape.num_requests
        rows = [self.scratch_slot, shape.num_rows // R, shape.num_sampled // R, shape.num_drafts]
        return upload([x for x in rows for _ in range(R)], self.device).view(4, R)

    def fill(self, shape: BatchShape, scheduled_4R: Tensor) -> tuple[PassRows, VerifyRows]:
        """The rows of a pass, and what the verifier needs to know about them."""
        slots_R, _, num_R, _ = scheduled_4R.unbind()
        rows = self._ops.fill(self.slots, scheduled_4R[:3], shape.num_rows, shape.num_sampled)
        return rows, VerifyRows(
            first_R=rows.first_R,
            num_R=num_R,
            slots_R=slots_R,
            lengths_R=rows.lengths_R,
            draft_count_R=rows.draft_count_R,
            width=shape.most_sampled,
        )

    def commit(
        self,
        shape: BatchShape,
        rows: PassRows,
        scheduled_4R: Tensor,
        result: VerifyResult,
        taps: tuple[Tensor, ...],
        drawer: Drawer,
        given: GivenRows | None = None,
    ) -> Verified:
        """Append the verified tokens to the slots. Returns what the drafter may build on."""
        slots_R, _, _, wanted_R = scheduled_4R.unbind()
        done = self._ops.commit(
            self.slots, scheduled_4R[:3], rows, result.tokens_RW, result.num_emitted_R, wanted_R
        )
        return Verified(
            tokens_T=rows.tokens_T,
            positions_T=rows.positions_T,
            query_start_loc_R1=rows.query_start_loc_R1,
            slots_R=slots_R,
            live_R=done.live_R,
            next_R=done.next_R,
            k_R=done.k_R,
            taps=taps,
            draw=drawer(slots_R, done.length_R),
            history=lambda r: self.history(int(slots_R[r])),
            repeats=shape.repeats,
            given=given,
        )

    def history(self, slot: int) -> Tensor:
        """The slot's known tokens, int32, on the host. Free on a CPU; on a GPU it waits for the device."""
        return self.slots.tokens_SL[slot, : int(self.slots.length_S[slot])].cpu()

    def no_drafts(self, num_requests: int) -> Proposal:
        """A proposal without drafts, in memory with fixed addresses."""
        assert num_requests <= len(self.nothing_S), "more requests than slots"
        nothing_R = self.nothing_S[:num_requests]
        return Proposal(nothing_R[:, None][:, :0], nothing_R)

    def store_drafts(self, verified: Verified, proposal: Proposal, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Write drafts after the known tokens: (number stored_R, whether a bad id cut them short_R)."""
        return self._ops.store_drafts(
            self.slots,
            verified.slots_R,
            proposal.tokens_RK,
            proposal.count_R,
            verified.k_R,
            vocab_size,
            *self.placeholders,
        )
