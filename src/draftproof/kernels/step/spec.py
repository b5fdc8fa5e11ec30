"""The bookkeeping of a step on the device: rows of a pass, accepted drafts, new state, rows of a draft pass.

Integers only, so all versions give the same numbers. All tensors are int64 except tokens_SL, which is int32.
Shapes: S slots, L positions, R requests of a pass, T its rows, M its sampled rows, W drafts + 1, N draft rows, J rows
read per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class SlotState(NamedTuple):
    """The state of every slot. After `length` known tokens a row of `tokens_SL` holds drafts."""

    tokens_SL: Tensor
    length_S: Tensor
    computed_S: Tensor
    draft_count_S: Tensor
    limit_S: Tensor


class PassRows(NamedTuple):
    """The rows of one pass, request after request; each request's last rows are sampled."""

    tokens_T: Tensor
    positions_T: Tensor
    context_lens_T: Tensor  # positions + 1: attention is causal
    slots_T: Tensor
    sampled_M: Tensor  # their indices into T
    slots_M: Tensor
    positions_M: Tensor  # position of the sampled token
    query_start_loc_R1: Tensor
    first_R: Tensor  # index into M
    lengths_R: Tensor  # known tokens before the pass
    draft_count_R: Tensor  # drafts among the rows

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs of a model."""
        return self.tokens_T, self.positions_T, self.slots_T, self.context_lens_T


class Committed(NamedTuple):
    """What a pass passes on to the drafter: rows that became permanent, the token after them, drafts wanted, known
    tokens.
    """

    live_R: Tensor
    next_R: Tensor
    k_R: Tensor
    length_R: Tensor


class DraftRows(NamedTuple):
    """One flat draft pass. Padding rows have position -1."""

    tokens_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    source_N: Tensor  # the target row whose features the row uses; T for a mask row
    context_lens_N: Tensor  # positions + 1
    read_RJ: Tensor  # rows whose outputs become drafts
    drawn_KR: Tensor  # position of each draft; -1 if not wanted
    positions_KR: (
        Tensor  # position of the row that draft k is read from (row 0 is among the N); -1 where not wanted
    )
    context_lens_KR: Tensor  # positions + 1


@dataclass(frozen=True, slots=True)
class Layout:
    """`drafters.head.HeadLayout` as integers for kernels. context: 0 none, 1 the last row, 2 all rows."""

    context: int
    shift: int
    anchor: int
    masks: int
    num_read: int
    mask_token: int


class StepOps(Protocol):
    """One implementation of the five operators of a step."""

    def fill(self, state: SlotState, work_3R: Tensor, num_rows: int, num_sampled: int) -> PassRows:
        """Rows of a pass. work_3R: slot, rows and sampled rows of each request; num_rows and num_sampled are their
        sums.

        Example: request 0 decodes with 2 drafts (3 rows, all sampled), request 1 computes 4 prompt rows (none sampled):
        query starts 0 3 7, sampled rows 0 1 2, first 0 3.
        """
        ...

    def accept(
        self,
        tokens_SL: Tensor,
        slots_R: Tensor,
        num_R: Tensor,
        first_R: Tensor,
        lengths_R: Tensor,
        draft_count_R: Tensor,
        sampled_M: Tensor,
        width: int,
    ) -> tuple[Tensor, Tensor]:
        """Law 1: accept drafts while they equal the samples. Returns (tokens_RW, -1 beyond the emitted ones;
        emitted_R).

        num_R: sampled rows of each request, starting at index first_R of M; its drafts are at tokens_SL[slot,
        length..].
        """
        ...

    def commit(
        self,
        state: SlotState,
        work_3R: Tensor,
        rows: PassRows,
        tokens_RW: Tensor,
        emitted_R: Tensor,
        wanted_R: Tensor,
    ) -> Committed:
        """Write the emitted tokens and advance the slots. Entries past the new length are scratch, as drafts are.

        A slot at its limit does not advance: it emits nothing and none of its rows are live. The host may remove a
        finished request a step late, and padding rows name a slot that is always at its limit.
        """
        ...

    def draft_rows(
        self,
        layout: Layout,
        query_start_loc_R1: Tensor,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_R: Tensor,
        live_R: Tensor,
        next_R: Tensor,
        k_R: Tensor,
        num_drafts: int,
    ) -> DraftRows:
        """The rows of a draft pass: context rows, then the anchor, then masks.

        The rest of a request's share is padding; if no row is live, all of it.

        Example: one request verified [s5 d6 d7 d8]@5..8 and kept s5 d6 (live 2), next r7. With context all:
          shift=1                 d6@5/h5  r7@6/h6  pad  pad                    read row of r7
          shift=1, masks=2        d6@5/h5  r7@6/h6  mask@7  mask@8  pad  pad    read r7, mask, mask
          anchor                  s5@5  d6@6  r7@7  pad  pad                    read row of r7
        """
        ...

    def store_drafts(
        self,
        state: SlotState,
        slots_R: Tensor,
        tokens_RK: Tensor,
        count_R: Tensor,
        k_R: Tensor,
        vocab_size: int,
        never: int = -1,
        never_either: int = -1,
    ) -> tuple[Tensor, Tensor]:
        """Store drafts after the known tokens. They end at k_R, at the first id outside the vocabulary, and at the
        first that equals `never` or `never_either`.

        `never` and `never_either` are ids that no token may have. Returns (count_R, 1 if an id outside the vocabulary
        ended them).
        """
        ...
