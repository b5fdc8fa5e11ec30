"""A step's bookkeeping in C++: forty small torch operators per step would cost more than a layer.

Shapes as in kernels/step/spec.py, where each call is described.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.step.spec import Committed, DraftRows, Layout, PassRows, SlotState
from draftproof.runtime.native import Library


class CompiledStep:
    """`StepOps` in C++."""

    def __init__(self, library: Library) -> None:
        self._fill, self._pack_fill = library.packed("dp_fill", "6P4q")
        self._accept, self._pack_accept = library.packed("dp_accept", "8P3q")
        self._commit, self._pack_commit = library.packed("dp_commit", "11P3q")
        self._draft_rows, self._pack_draft_rows = library.packed("dp_draft_rows", "8P10q")
        self._store, self._pack_store = library.packed("dp_store_drafts", "8P6q")

    def fill(self, state: SlotState, work_3R: Tensor, num_rows: int, num_sampled: int) -> PassRows:
        num_requests = work_3R.shape[1]
        T = num_rows
        M = num_sampled
        R = num_requests
        sizes = [T, T, T, T, M, M, M, R + 1, R, R, R]
        out = torch.empty(sum(sizes), dtype=torch.int64)
        pointers = [
            t.data_ptr() for t in (state.tokens_SL, state.length_S, state.computed_S, state.draft_count_S)
        ]
        columns = state.tokens_SL.shape[1]
        self._fill(self._pack_fill(*pointers, work_3R.data_ptr(), out.data_ptr(), columns, T, M, R))
        return PassRows(*out.split(sizes))

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
        R = len(slots_R)
        out = torch.empty(R * (width + 1), dtype=torch.int64)
        tensors = (tokens_SL, slots_R, num_R, first_R, lengths_R, draft_count_R, sampled_M, out)
        self._accept(self._pack_accept(*(t.data_ptr() for t in tensors), tokens_SL.shape[1], R, width))
        tokens, emitted_R = out.split([R * width, R])
        return tokens.view(R, width), emitted_R

    def commit(
        self,
        state: SlotState,
        work_3R: Tensor,
        rows: PassRows,
        tokens_RW: Tensor,
        emitted_R: Tensor,
        wanted_R: Tensor,
    ) -> Committed:
        R, width = tokens_RW.shape
        out = torch.empty(4 * R, dtype=torch.int64)
        tokens_RW = tokens_RW.contiguous()
        emitted_R = emitted_R.contiguous()
        tensors = (*state, work_3R, rows.lengths_R, tokens_RW, emitted_R, wanted_R, out)
        columns = state.tokens_SL.shape[1]
        self._commit(self._pack_commit(*(t.data_ptr() for t in tensors), columns, R, width))
        return Committed(*out.split(R))

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
        R = len(slots_R)
        T = len(tokens_T)
        J = layout.num_read
        context = T if layout.context == 2 else R * layout.context
        N = context + R * (layout.anchor + layout.masks)
        K = num_drafts
        sizes = [N, N, N, N, N, R * J, K * R, K * R, K * R]
        out = torch.empty(sum(sizes), dtype=torch.int64)
        tensors = (query_start_loc_R1, tokens_T, positions_T, slots_R, live_R, next_R, k_R, out)
        args = self._pack_draft_rows(
            *(t.data_ptr() for t in tensors),
            R,
            T,
            N,
            layout.context,
            layout.shift,
            layout.anchor,
            layout.masks,
            J,
            layout.mask_token,
            K,
        )
        self._draft_rows(args)
        views = list(out.split(sizes))
        views[5] = views[5].view(R, J)
        views[6:] = [view.view(K, R) for view in views[6:]]
        return DraftRows(*views)

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
        R, K = tokens_RK.shape
        out = torch.empty(2 * R, dtype=torch.int64)
        tokens_RK = tokens_RK.contiguous()
        count_R = count_R.contiguous()
        tensors = (
            state.tokens_SL,
            state.length_S,
            state.draft_count_S,
            slots_R,
            tokens_RK,
            count_R,
            k_R,
            out,
        )
        columns = state.tokens_SL.shape[1]
        numbers = (columns, R, K, vocab_size, never, never_either)
        self._store(self._pack_store(*(t.data_ptr() for t in tensors), *numbers))
        count_R, cut_R = out.split(R)
        return count_R, cut_R
