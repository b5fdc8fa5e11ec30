"""Processing of logits before the filters, in Triton: see kernels/process/reference.py.

Counts are integers, so the order of counting has no effect; everything else is elementwise, and no multiplication is
fused with an addition. Shapes: M rows, V columns, L positions, N entries of a list.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.process.spec import HEADER as LIST_HEADER
from draftproof.kernels.process.spec import NO_NUMBER, NONE_LEFT
from draftproof.kernels.row_params import CONSTRAINED, MASKED, NUM_COLUMNS, PENALISED, RowParams
from draftproof.runtime.triton.launch import dense, on, pdl
from draftproof.runtime.triton.pdl import begin

BLOCK, LISTED = 1024, 128
HEADER = tl.constexpr(LIST_HEADER)
COLUMNS = tl.constexpr(NUM_COLUMNS)
HAS_PENALTY, HAS_LIST = tl.constexpr(PENALISED), tl.constexpr(CONSTRAINED)
HAS_MASK = tl.constexpr(MASKED)
STANDS = tl.constexpr(1 << 30)  # flag: the token occurs in the context; the bits below count it in the output


@triton.jit(do_not_specialize=["N", "width"], do_not_specialize_on_alignment=["logits", "lists", "masks"])
def _copy_kernel(
    logits, flags, slots, lists, masks, out, seen, width, N, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copy BLOCK columns of a row, with -inf where the slot's mask or the row's own rules an id out; zero `seen`."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < width
    flag = tl.load(flags + m * COLUMNS)
    x = tl.load(logits + m * width + v, mask=inside, other=0.0)
    if (flag & HAS_LIST) != 0:
        numbers = lists + tl.load(slots + m) * N
        at_mask = tl.load(numbers + 2)
        if at_mask > 0:
            word = tl.load(numbers + at_mask + v // 32, mask=inside, other=0)
            x = tl.where(((word >> (v % 32)) & 1) == 1, x, -float("inf"))
    if (flag & HAS_MASK) != 0:
        word = tl.load(masks + m * ((width + 31) // 32) + v // 32, mask=inside, other=0)
        x = tl.where(((word >> (v % 32)) & 1) == 1, x, -float("inf"))
    tl.store(out + m * width + v, x, mask=inside)
    if (flag & HAS_PENALTY) != 0:
        tl.store(seen + m * width + v, tl.zeros((BLOCK,), tl.int32), mask=inside)


@triton.jit(do_not_specialize=["N", "L", "width"], do_not_specialize_on_alignment=["tokens", "lists"])
def _list_kernel(
    flags, prompt_lens, held_untils, slots, positions, tokens, lists, out, width, L, N,
    LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply a row's biases, then rule out bad words, and stop ids while `min_tokens` suppresses them."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    if (tl.load(flags + m * COLUMNS) & HAS_LIST) != 0:
        slot = tl.load(slots + m)
        position = tl.load(positions + m)
        numbers = lists + slot * N
        row = out + m * width
        i = tl.arange(0, LISTED)
        at_bias = tl.load(numbers)
        num_biases = tl.load(numbers + at_bias)
        for start in range(0, num_biases, LISTED):
            here = start + i < num_biases
            at = numbers + at_bias + 1 + 2 * (start + i)
            token = tl.load(at, mask=here, other=0)
            bias = tl.load(at + 1, mask=here, other=0).to(tl.float32, bitcast=True)
            x = tl.load(row + token, mask=here, other=0.0)
            tl.store(row + token, x + bias, mask=here)
        tl.debug_barrier()
        word = numbers + tl.load(numbers + 1)
        num_words = tl.load(word)
        word += 1
        for _ in range(0, num_words):
            length = tl.load(word)
            first = position - (length - 1)
            same = first >= tl.load(prompt_lens + m * COLUMNS)
            if same:
                differ = 0
                for start in range(0, length - 1, LISTED):
                    here = start + i < length - 1
                    wanted = tl.load(word + 1 + start + i, mask=here, other=0)
                    token = tl.load(tokens + slot * L + first + start + i, mask=here, other=0)
                    differ += tl.sum((wanted != token).to(tl.int32), axis=0)
                if differ == 0:
                    tl.store(row + tl.load(word + length), -float("inf"))
            word += 1 + length
        if position < tl.load(held_untils + m * COLUMNS):
            num_stops = tl.load(numbers + 3)
            for start in range(0, num_stops, LISTED):
                here = start + i < num_stops
                token = tl.load(numbers + HEADER + start + i, mask=here, other=0)
                tl.store(row + token, tl.full((LISTED,), -float("inf"), tl.float32), mask=here)


@triton.jit(do_not_specialize=["L", "width"], do_not_specialize_on_alignment=["tokens"])
def _see_kernel(
    flags, prompt_lens, slots, positions, tokens, seen, width, L, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Mark and count BLOCK tokens of a row's context."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    position = tl.load(positions + m)
    if ((tl.load(flags + m * COLUMNS) & HAS_PENALTY) != 0) & (first < position):
        p = first + tl.arange(0, BLOCK)
        token = tl.load(tokens + tl.load(slots + m) * L + p, mask=p < position, other=0)
        at = seen + m * width + token
        tl.atomic_or(at, tl.full((BLOCK,), STANDS, tl.int32), mask=p < position)
        written = (p < position) & (p >= tl.load(prompt_lens + m * COLUMNS))
        tl.atomic_add(at, tl.full((BLOCK,), 1, tl.int32), mask=written)


@triton.jit(do_not_specialize=["width"])
def _penalise_kernel(
    flags, repetitions, presences, frequencies, seen, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Apply penalties to BLOCK columns of a row."""
    begin(PDL)
    m = tl.program_id(0).to(tl.int64)
    if (tl.load(flags + m * COLUMNS) & HAS_PENALTY) != 0:
        v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = v < width
        found = tl.load(seen + m * width + v, mask=inside, other=0)
        repetition = tl.load(repetitions + m * 2 * COLUMNS)
        presence = tl.load(presences + m * 2 * COLUMNS)
        frequency = tl.load(frequencies + m * 2 * COLUMNS)
        x = tl.load(out + m * width + v, mask=inside, other=0.0)
        x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
        count = found & (STANDS - 1)
        x = x - frequency * count.to(tl.float32)
        x = x - presence * (count > 0).to(tl.float32)
        tl.store(out + m * width + v, x, mask=inside & (found > 0))


def process(
    logits_MV: Tensor,
    params: RowParams,
    slots_M: Tensor,
    positions_M: Tensor,
    tokens_SL: Tensor,
    lists_SN: Tensor,
    masks_MW: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `Process`."""
    logits_MV = dense(logits_MV.float())
    rows, width = logits_MV.shape
    length, numbers = tokens_SL.shape[1], lists_SN.shape[1]
    # a maximum does not depend on the order of its computation
    has_numbers_M = torch.isfinite(logits_MV.amax(-1))
    failures_M = torch.where(has_numbers_M, NONE_LEFT, NO_NUMBER)
    out_MV, seen_MV = torch.empty_like(logits_MV), torch.empty_like(logits_MV, dtype=torch.int32)
    if rows == 0:
        return out_MV, failures_M
    p, soon = RowParams(dense(params.packed_MC)), pdl(logits_MV)
    slots_M, positions_M = slots_M.contiguous(), positions_M.contiguous()
    flags_M, prompt_len_M = p.flags_M, p.prompt_len_M
    grid = (rows, triton.cdiv(width, BLOCK))
    with on(logits_MV):
        _copy_kernel[grid](
            logits_MV, flags_M, slots_M, lists_SN, masks_MW, out_MV, seen_MV, width, numbers, BLOCK=BLOCK,
            **soon,
        )  # fmt: skip
        _list_kernel[(rows,)](
            flags_M, prompt_len_M, p.held_until_M, slots_M, positions_M, tokens_SL, lists_SN, out_MV,
            width, length, numbers, LISTED=LISTED, **soon,
        )  # fmt: skip
        _see_kernel[(rows, triton.cdiv(length, BLOCK))](
            flags_M,
            prompt_len_M,
            slots_M,
            positions_M,
            tokens_SL,
            seen_MV,
            width,
            length,
            BLOCK=BLOCK,
            **soon,
        )
        _penalise_kernel[grid](
            flags_M, p.repetition_M, p.presence_M, p.frequency_M, seen_MV, out_MV, width, BLOCK=BLOCK,
            **soon, enable_fp_fusion=False,
        )  # fmt: skip
    return out_MV, failures_M
