"""The bookkeeping of a step in torch. Shapes as in kernels/step/spec.py, where each call is described."""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.step.spec import Committed, DraftRows, Layout, PassRows, SlotState


class TorchStep:
    """`StepOps` in torch: the reference."""

    def fill(self, state: SlotState, work_3R: Tensor, num_rows: int, num_sampled: int) -> PassRows:
        slots_R, rows_R, num_R = work_3R
        query_start_loc_R1 = torch.nn.functional.pad(rows_R.cumsum(0), (1, 0))
        owner_T = _owners(rows_R, num_rows)
        offset_T = torch.arange(num_rows, device=slots_R.device) - query_start_loc_R1[owner_T]
        slots_T = slots_R[owner_T]
        positions_T = state.computed_S[slots_T] + offset_T
        first_R = num_R.cumsum(0) - num_R
        owner_M = _owners(num_R, num_sampled)
        sampled_M = (
            query_start_loc_R1[1:][owner_M]
            - num_R[owner_M]
            + torch.arange(num_sampled, device=slots_R.device)
        )
        sampled_M = sampled_M - first_R[owner_M]
        return PassRows(
            tokens_T=state.tokens_SL[slots_T, positions_T].long(),
            positions_T=positions_T,
            context_lens_T=positions_T + 1,
            slots_T=slots_T,
            sampled_M=sampled_M,
            slots_M=slots_T[sampled_M],
            positions_M=positions_T[sampled_M] + 1,
            query_start_loc_R1=query_start_loc_R1,
            first_R=first_R,
            lengths_R=state.length_S[slots_R],
            draft_count_R=torch.minimum(state.draft_count_S[slots_R], (num_R - 1).clamp(min=0)),
        )

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
        if len(sampled_M) == 0:  # every request is in the middle of its prompt
            return num_R.new_full((len(num_R), width), -1), torch.zeros_like(num_R)
        at_W = torch.arange(width, device=sampled_M.device)
        sampled_RW = sampled_M[(first_R[:, None] + at_W).clamp(max=len(sampled_M) - 1)]
        at_RK = (lengths_R[:, None] + at_W[:-1]).clamp(max=tokens_SL.shape[1] - 1)
        drafts_RK = tokens_SL[slots_R[:, None], at_RK]
        same_RK = (drafts_RK == sampled_RW[:, :-1]) & (at_W[:-1] < draft_count_R[:, None])
        accepted_R = same_RK.long().cumprod(1).sum(1)
        emitted_R = (accepted_R + 1) * (num_R > 0)
        return torch.where(at_W < emitted_R[:, None], sampled_RW, -1), emitted_R

    def commit(
        self,
        state: SlotState,
        work_3R: Tensor,
        rows: PassRows,
        tokens_RW: Tensor,
        emitted_R: Tensor,
        wanted_R: Tensor,
    ) -> Committed:
        slots_R, rows_R, num_R = work_3R
        at_RW = rows.lengths_R[:, None] + torch.arange(tokens_RW.shape[1], device=slots_R.device)
        state.tokens_SL[slots_R[:, None], at_RW] = tokens_RW.clamp(min=0).int()
        is_open_R = rows.lengths_R < state.limit_S[slots_R]
        length_R = rows.lengths_R + emitted_R * is_open_R
        live_R = torch.where(num_R > 0, rows_R - num_R + emitted_R, rows_R) * is_open_R
        computed_R = state.computed_S[slots_R] + live_R
        state.length_S[slots_R] = length_R
        state.computed_S[slots_R] = computed_R
        state.draft_count_S[slots_R] = 0
        # one token always follows the drafts, so the last useful draft is the one before the limit
        room_R = (state.limit_S[slots_R] - length_R - 1).clamp(min=0)
        next_R = state.tokens_SL[slots_R, computed_R].long()
        return Committed(live_R, next_R, torch.minimum(wanted_R, room_R), length_R)

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
        device = tokens_T.device
        num_extra = layout.anchor + layout.masks
        R = len(slots_R)
        share_R = (
            query_start_loc_R1.diff() if layout.context == 2 else torch.full_like(slots_R, layout.context)
        )
        share_R = share_R + num_extra
        num_rows = (len(tokens_T) if layout.context == 2 else R * layout.context) + R * num_extra
        start_R = share_R.cumsum(0) - share_R
        owner_N = _owners(share_R, num_rows)
        offset_N = torch.arange(num_rows, device=device) - start_R[owner_N]

        last_R = query_start_loc_R1[:-1] + (live_R - 1).clamp(min=0)
        count_R = live_R if layout.context == 2 else live_R.clamp(max=layout.context)
        # positions of rows after the context continue from the last live target row
        past_N = offset_N - count_R[owner_N]
        is_context_N = past_N < 0
        source_N = torch.where(is_context_N, (last_R + 1 - count_R)[owner_N] + offset_N, last_R[owner_N])
        position_R = positions_T[last_R]
        positions_N = torch.where(is_context_N, positions_T[source_N], position_R[owner_N] + 1 + past_N)
        positions_N = positions_N.masked_fill((past_N >= num_extra) | (live_R[owner_N] == 0), -1)

        token_at_N = source_N + layout.shift
        is_next_N = (is_context_N & (token_at_N > last_R[owner_N])) | ((past_N == 0) & (layout.anchor == 1))
        known_N = tokens_T[token_at_N.clamp(max=len(tokens_T) - 1)]
        tokens_N = torch.where(is_next_N, next_R[owner_N], known_N)
        is_mask_N = (past_N >= layout.anchor) if layout.masks else torch.zeros_like(is_next_N)
        tokens_N = tokens_N.masked_fill(is_mask_N, layout.mask_token)
        source_N = source_N.masked_fill(is_mask_N, len(tokens_T))

        first_read_R = (start_R + count_R + num_extra - layout.num_read).clamp(min=0)
        read_RJ = first_read_R[:, None] + torch.arange(layout.num_read, device=device)
        at_K1 = torch.arange(num_drafts, device=device)[:, None]
        positions_KR = torch.where(at_K1 < k_R, positions_N[read_RJ[:, 0]] + at_K1, -1)
        return DraftRows(
            tokens_N=tokens_N,
            positions_N=positions_N,
            slots_N=slots_R[owner_N],
            source_N=source_N,
            context_lens_N=positions_N + 1,
            read_RJ=read_RJ,
            drawn_KR=(position_R + 2 + at_K1).masked_fill(at_K1 >= k_R, -1),
            positions_KR=positions_KR,
            context_lens_KR=positions_KR + 1,
        )

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
        at_K = torch.arange(tokens_RK.shape[1], device=slots_R.device)
        claimed_R = torch.minimum(count_R, k_R).clamp(0, tokens_RK.shape[1])
        own_RK = (tokens_RK >= 0) & (tokens_RK < vocab_size) & (at_K < claimed_R[:, None])
        is_token_RK = (tokens_RK != never) & (tokens_RK != never_either)
        count_R = (own_RK & is_token_RK).long().cumprod(1).sum(1)
        is_cut_R = (own_RK.long().cumprod(1).sum(1) == count_R) & (count_R < claimed_R)
        at_RK = state.length_S[slots_R][:, None] + at_K
        state.tokens_SL[slots_R[:, None], at_RK] = tokens_RK.clamp(0, vocab_size - 1).int()
        state.draft_count_S[slots_R] = count_R
        return count_R, is_cut_R.long()


def _owners(count_R: Tensor, total: int) -> Tensor:
    """Index of the request that each of `total` rows belongs to: counts 3 0 2 give 0 0 0 2 2."""
    index_R = torch.arange(len(count_R), device=count_R.device)
    return index_R.repeat_interleave(count_R, output_size=total)


TORCH_STEP = TorchStep()
