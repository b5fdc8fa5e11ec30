"""A step's bookkeeping in Triton: one kernel per call, all of which CUDA graphs can capture.

Shapes as in kernels/step/spec.py, where each call is described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels.step import triton_kernels as step_kernels
from draftproof.kernels.step.spec import Committed, DraftRows, Layout, PassRows, SlotState
from draftproof.runtime.triton.launch import on, pdl, power_of_two


@dataclass(frozen=True, slots=True)
class TritonStep:
    """`StepOps` in Triton. block: number of rows of a request, and of requests before it, that a program handles at
    once.
    """

    block: int = 512

    def fill(self, state: SlotState, work_3R: Tensor, num_rows: int, num_sampled: int) -> PassRows:
        T = num_rows
        M = num_sampled
        R = work_3R.shape[1]
        sizes = [T, T, T, T, M, M, M, R + 1, R, R, R]
        out = _out(sum(sizes), work_3R)
        _launch(
            step_kernels.fill_kernel,
            (*state[:4], work_3R.contiguous(), out),
            (state.tokens_SL.shape[1], T, M, R),
            R,
            BLOCK=self.block,
            num_warps=4,
        )
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
        out = _out(R * (width + 1), slots_R)
        given = (slots_R, num_R, first_R, lengths_R, draft_count_R, sampled_M)
        _launch(
            step_kernels.accept_kernel,
            (tokens_SL, *(t.contiguous() for t in given), out),
            (tokens_SL.shape[1], R, len(sampled_M), width),
            R,
            WP=power_of_two(width),
        )
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
        out = _out(4 * R, work_3R)
        given = (work_3R, rows.lengths_R, tokens_RW, emitted_R, wanted_R)
        _launch(
            step_kernels.commit_kernel,
            (*state, *(t.contiguous() for t in given), out),
            (state.tokens_SL.shape[1], R, width),
            R,
            WP=power_of_two(width),
        )
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
        K = num_drafts
        context = T if layout.context == 2 else R * layout.context
        N = context + R * (layout.anchor + layout.masks)
        sizes = [N, N, N, N, N, R * J, K * R, K * R, K * R]
        out = _out(sum(sizes), slots_R)
        given = (query_start_loc_R1, tokens_T, positions_T, slots_R, live_R, next_R, k_R)
        _launch(
            step_kernels.draft_rows_kernel,
            (*(t.contiguous() for t in given), out),
            (R, T, N, layout.mask_token, K),
            R,
            CONTEXT=layout.context,
            SHIFT=layout.shift,
            ANCHOR=layout.anchor,
            MASKS=layout.masks,
            J=J,
            JP=power_of_two(J),
            KP=power_of_two(K),
            BLOCK=self.block,
            num_warps=4,
        )
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
        out = _out(2 * R, slots_R)
        given = (slots_R, tokens_RK, count_R, k_R)
        _launch(
            step_kernels.store_drafts_kernel,
            (state.tokens_SL, state.length_S, state.draft_count_S, *(t.contiguous() for t in given), out),
            (state.tokens_SL.shape[1], R, K, vocab_size, never, never_either),
            R,
            KP=power_of_two(K),
        )
        count_R, cut_R = out.split(R)
        return count_R, cut_R


def _out(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device=like.device)


def _launch(
    kernel: Any,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    programs: int,
    num_warps: int = 1,
    **constants: int,
) -> None:
    assert all(t.is_contiguous() for t in tensors)  # slot tensors are written in place
    with on(tensors[0]):
        kernel[(programs,)](*tensors, *sizes, **constants, **pdl(tensors[0]), num_warps=num_warps)
