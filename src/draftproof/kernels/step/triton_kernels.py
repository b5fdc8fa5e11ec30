"""The Triton kernels of a step's bookkeeping: one program per request. See `kernels/step/spec.py` for worked examples.

A kernel writes all its results to one int64 buffer `out`, consecutively in the order given in its docstring. Nothing is
recompiled for other numbers of requests or rows, nor for views with other offsets.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.runtime.triton.pdl import begin

SIZES = [
    "columns",
    "rows",
    "sampled",
    "requests",
    "width",
    "num_drafts",
    "vocab_size",
    "never",
    "never_either",
    "mask_token",
    "padded",
]
POINTERS = [
    "tokens",
    "length",
    "computed",
    "draft_count",
    "limit",
    "work",
    "out",
    "slots",
    "num",
    "first",
    "samples",
    "lengths",
    "emitted",
    "emitted_tokens",
    "wanted",
    "query_starts",
    "positions",
    "live",
    "next_tokens",
    "k",
    "drafts",
    "count",
]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def fill_kernel(
    tokens, length, computed, draft_count, work, out, columns, rows, sampled, requests,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `PassRows`, field by field."""
    begin(PDL)
    r = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    slot = tl.load(work + r)
    own_rows = tl.load(work + requests + r)
    own_sampled = tl.load(work + 2 * requests + r)
    row_sum = tl.zeros((BLOCK,), tl.int64)
    sampled_sum = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, r, BLOCK):
        before = start + i < r
        row_sum += tl.load(work + requests + start + i, mask=before, other=0)
        sampled_sum += tl.load(work + 2 * requests + start + i, mask=before, other=0)
    first_row = tl.sum(row_sum, axis=0)
    first = tl.sum(sampled_sum, axis=0)

    per_sample = out + 4 * rows
    per_request = per_sample + 3 * sampled
    if r == 0:
        tl.store(per_request, 0)
    tl.store(per_request + r + 1, first_row + own_rows)
    per_request += requests + 1
    tl.store(per_request + r, first)
    tl.store(per_request + requests + r, tl.load(length + slot))
    drafted = tl.minimum(tl.load(draft_count + slot), tl.maximum(own_sampled - 1, 0))
    tl.store(per_request + 2 * requests + r, drafted)

    first_position = tl.load(computed + slot)
    not_sampled = own_rows - own_sampled
    for start in range(0, own_rows, BLOCK):
        offset = start + i
        inside = offset < own_rows
        position = first_position + offset
        row = first_row + offset
        token = tl.load(tokens + slot * columns + position, mask=inside, other=0)
        tl.store(out + row, token.to(tl.int64), mask=inside)
        tl.store(out + rows + row, position, mask=inside)
        tl.store(out + 2 * rows + row, position + 1, mask=inside)
        tl.store(out + 3 * rows + row, slot, mask=inside)
        is_sampled = inside & (offset >= not_sampled)
        m = first + offset - not_sampled
        tl.store(per_sample + m, row, mask=is_sampled)
        tl.store(per_sample + sampled + m, slot, mask=is_sampled)
        tl.store(per_sample + 2 * sampled + m, position + 1, mask=is_sampled)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def accept_kernel(
    tokens, slots, num, first, lengths, draft_count, samples, out, columns, requests, sampled, width,
    WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write tokens_RW, emitted_R. Without sampled rows, `samples` is not read and nothing is emitted."""
    begin(PDL)
    r = tl.program_id(0)
    w = tl.arange(0, WP)
    slot = tl.load(slots + r)
    length = tl.load(lengths + r)
    m = tl.minimum(tl.load(first + r) + w, sampled - 1)
    sample_W = tl.load(samples + m, mask=sampled > 0, other=-1)
    is_draft = (w < width - 1) & (w < tl.load(draft_count + r)) & (sampled > 0)
    at = tl.minimum(length + w, columns - 1)
    draft_W = tl.load(tokens + slot * columns + at, mask=is_draft, other=-1)
    accepted = tl.min(tl.where(is_draft & (draft_W == sample_W), WP, w), axis=0).to(tl.int64)
    emitted = tl.where(tl.load(num + r) > 0, accepted + 1, 0)
    tl.store(out + r * width + w, tl.where(w < emitted, sample_W, -1), mask=w < width)
    tl.store(out + requests * width + r, emitted)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def commit_kernel(
    tokens, length, computed, draft_count, limit, work, lengths, emitted_tokens, emitted, wanted, out,
    columns, requests, width,
    WP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `Committed`, field by field, and the slots' tokens, lengths, computed tokens and draft counts."""
    begin(PDL)
    r = tl.program_id(0)
    w = tl.arange(0, WP)
    slot = tl.load(work + r)
    old_length = tl.load(lengths + r)
    own_rows = tl.load(work + requests + r)
    own_sampled = tl.load(work + 2 * requests + r)
    most = tl.load(limit + slot)
    num_emitted = tl.load(emitted + r)
    is_open = old_length < most
    new_length = tl.where(is_open, old_length + num_emitted, old_length)
    live = tl.where(own_sampled > 0, own_rows - own_sampled + num_emitted, own_rows)
    live = tl.where(is_open, live, 0)
    new_computed = tl.load(computed + slot) + live
    token_W = tl.load(emitted_tokens + r * width + w, mask=w < width, other=0)
    token_W = tl.maximum(token_W, 0).to(tl.int32)

    # if this program is about to write the next token, take it from registers rather than memory
    is_next = (w < width) & (old_length + w == new_computed)
    is_new = tl.max(is_next.to(tl.int32), axis=0) > 0
    known = tl.load(tokens + slot * columns + new_computed, mask=is_new == 0, other=0)
    next_token = tl.where(is_new, tl.sum(tl.where(is_next, token_W, 0), axis=0), known)

    tl.debug_barrier()  # all threads must have read what one of them overwrites
    tl.store(tokens + slot * columns + old_length + w, token_W, mask=w < width)
    tl.store(length + slot, new_length)
    tl.store(computed + slot, new_computed)
    tl.store(draft_count + slot, 0)
    tl.store(out + r, live)
    tl.store(out + requests + r, next_token.to(tl.int64))
    # one token always follows the drafts, so the last useful draft is the one before the limit
    room = tl.maximum(most - new_length - 1, 0)
    tl.store(out + 2 * requests + r, tl.minimum(tl.load(wanted + r), room))
    tl.store(out + 3 * requests + r, new_length)


@triton.jit
def _start(query_starts, r, EXTRA: tl.constexpr, CONTEXT: tl.constexpr):
    """The first draft row of request `r`. Its share is its context rows and EXTRA more."""
    return tl.load(query_starts + r) + r * EXTRA if CONTEXT == 2 else (r * (CONTEXT + EXTRA)).to(tl.int64)


@triton.jit
def _fed(query_starts, live, r, CONTEXT: tl.constexpr):
    """(number of live rows of request `r`, the last live row or else its first row, number of context rows)."""
    num_live = tl.load(live + r)
    last = tl.load(query_starts + r) + tl.maximum(num_live - 1, 0)
    return num_live, last, num_live if CONTEXT == 2 else tl.minimum(num_live, CONTEXT)


@triton.jit
def _positions(positions, offset, inside, num_live, last, count, EXTRA: tl.constexpr):
    """(target row, position) of the draft rows `offset` of a request, of which `count` are context.

    Positions of rows after the context continue from the last live target row; without live rows all are padding.
    """
    past = offset - count
    source = tl.where(past < 0, last + 1 + past, last)
    position = tl.load(positions + source, mask=inside, other=0) + tl.maximum(past + 1, 0)
    return source, tl.where((past >= EXTRA) | (num_live == 0), -1, position)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def draft_rows_kernel(
    query_starts, tokens, positions, slots, live, next_tokens, k, out, requests, rows, padded, mask_token, num_drafts,
    CONTEXT: tl.constexpr, SHIFT: tl.constexpr, ANCHOR: tl.constexpr, MASKS: tl.constexpr, J: tl.constexpr,
    JP: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `DraftRows`, field by field; `padded` is N."""
    begin(PDL)
    r = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    EXTRA: tl.constexpr = ANCHOR + MASKS
    slot = tl.load(slots + r)
    next_token = tl.load(next_tokens + r)
    wanted = tl.load(k + r)
    num_live, last, count = _fed(query_starts, live, r, CONTEXT)
    begin_row = _start(query_starts, r, EXTRA, CONTEXT)
    share = _start(query_starts, r + 1, EXTRA, CONTEXT) - begin_row
    for start in range(0, share, BLOCK):
        offset = start + i
        inside = offset < share
        n = begin_row + offset
        source, position = _positions(positions, offset, inside, num_live, last, count, EXTRA)
        past = offset - count
        token_at = source + SHIFT
        known = tl.load(tokens + tl.minimum(token_at, rows - 1), mask=inside, other=0)
        is_next = ((past < 0) & (token_at > last)) | ((past == 0) & (ANCHOR == 1))
        is_mask = (past >= ANCHOR) & (MASKS > 0)
        token = tl.where(is_mask, mask_token, tl.where(is_next, next_token, known))
        tl.store(out + n, token, mask=inside)
        tl.store(out + padded + n, position, mask=inside)
        tl.store(out + 2 * padded + n, slot, mask=inside)
        tl.store(out + 3 * padded + n, tl.where(is_mask, rows, source), mask=inside)
        tl.store(out + 4 * padded + n, position + 1, mask=inside)

    out += 5 * padded
    j = tl.arange(0, JP)
    at_K = tl.arange(0, KP)
    read = tl.maximum(begin_row + count + EXTRA - J, 0)
    tl.store(out + r * J + j, read + j, mask=j < J)
    out += requests * J
    # without live rows the read row may belong to the previous request; its position is recomputed
    reader = tl.where(read < begin_row, r - 1, r)
    reader_live, reader_last, reader_count = _fed(query_starts, live, reader, CONTEXT)
    read_offset = read - _start(query_starts, reader, EXTRA, CONTEXT)
    _, read_position = _positions(positions, read_offset, True, reader_live, reader_last, reader_count, EXTRA)
    is_wanted = at_K < wanted
    inside = at_K < num_drafts
    kr = at_K * requests + r
    drawn = tl.where(is_wanted, tl.load(positions + last) + 2 + at_K, -1)
    read_from = tl.where(is_wanted, read_position + at_K, -1)
    tl.store(out + kr, drawn, mask=inside)
    tl.store(out + num_drafts * requests + kr, read_from, mask=inside)
    tl.store(out + 2 * num_drafts * requests + kr, read_from + 1, mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def store_drafts_kernel(
    tokens, length, draft_count, slots, drafts, count, k, out, columns, requests, num_drafts, vocab_size, never,
    never_either, KP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write count_R, 1 where an id outside the vocabulary ended the drafts, and the slots' tokens and draft counts."""
    begin(PDL)
    r = tl.program_id(0)
    i = tl.arange(0, KP)
    slot = tl.load(slots + r)
    inside = i < num_drafts
    claimed = tl.minimum(tl.minimum(tl.load(count + r), tl.load(k + r)), num_drafts)
    draft_K = tl.load(drafts + r * num_drafts + i, mask=inside, other=-1).to(tl.int64)
    is_id = (draft_K >= 0) & (draft_K < vocab_size)
    is_token = is_id & (draft_K != never) & (draft_K != never_either)
    taken = tl.min(tl.where(is_token & (i < claimed), KP, i), axis=0).to(tl.int64)
    kept_K = tl.minimum(tl.maximum(draft_K, 0), vocab_size - 1).to(tl.int32)
    tl.store(tokens + slot * columns + tl.load(length + slot) + i, kept_K, mask=inside)
    tl.store(draft_count + slot, taken)
    tl.store(out + r, taken)
    num_ids = tl.sum(tl.where((i == taken) & is_id, 1, 0), axis=0)  # whether the first not taken is an id
    tl.store(out + requests + r, ((taken < claimed) & (num_ids == 0)).to(tl.int64))
