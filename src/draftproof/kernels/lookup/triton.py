"""N-gram lookup in Triton: one program per request, which reads only that request's known tokens."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.runtime.triton.launch import on, pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

BLOCK = 1024  # positions compared at once
SIZES = ["columns", "requests", "num_drafts", "shortest", "longest", "most_matched"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["tokens", "length", "slots", "k", "out"])
def _lookup_kernel(
    tokens, length, slots, k, out, columns, requests, num_drafts, shortest, longest, most_matched,
    KP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write tokens_RK, count_R and matched_R, one after the other."""
    begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + r)
    end = tl.load(length + slot) - 1
    text = tokens + slot * columns
    i = tl.arange(0, BLOCK)
    longest = tl.minimum(longest, tl.maximum(end, 0))
    best_B = tl.zeros((BLOCK,), tl.int64)  # match length * columns + the position of its last token
    for start in range(0, end, BLOCK):
        place = start + i
        alive = place < end
        matched = tl.zeros((BLOCK,), tl.int64)
        for back in range(0, longest):
            newest = tl.load(text + end - back, mask=back <= end, other=-1)
            before = tl.load(text + place - back, mask=alive & (back <= place), other=-2)
            alive = alive & (before == newest)
            matched += alive.to(tl.int64)
        best_B = tl.maximum(best_B, tl.where(matched > 0, matched * columns + place, 0))
    best = tl.max(best_B, axis=0)
    follows = best % columns + 1
    wanted = tl.maximum(tl.minimum(tl.load(k + r), num_drafts), 0)
    count = tl.where(best // columns >= shortest, tl.minimum(wanted, end + 1 - follows), 0)
    draft = tl.arange(0, KP)
    token = tl.load(text + follows + draft, mask=draft < count, other=0)
    tl.store(out + r * num_drafts + draft, token.to(tl.int64), mask=draft < num_drafts)
    tl.store(out + requests * num_drafts + r, count)
    matched = best // columns
    alive = (matched > 0) & (matched >= longest)
    for back in range(longest, most_matched):  # the match may be longer than what was looked for
        newest = tl.load(text + end - back, mask=back <= end, other=-1)
        before = tl.load(text + follows - 1 - back, mask=back < follows, other=-2)
        alive = alive & (before == newest)
        matched += alive.to(tl.int64)
    tl.store(out + requests * (num_drafts + 1) + r, matched)


def lookup(
    tokens_SL: Tensor,
    length_S: Tensor,
    slots_R: Tensor,
    k_R: Tensor,
    num_drafts: int,
    shortest: int,
    longest: int,
    most_matched: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Lookup`."""
    R = len(slots_R)
    out = torch.empty(R * (num_drafts + 2), dtype=torch.int64, device=slots_R.device)
    assert tokens_SL.is_contiguous()
    with on(tokens_SL):
        _lookup_kernel[(R,)](
            tokens_SL,
            length_S,
            slots_R.contiguous(),
            k_R.contiguous(),
            out,
            tokens_SL.shape[1],
            R,
            num_drafts,
            shortest,
            longest,
            most_matched,
            KP=power_of_two(num_drafts),
            BLOCK=BLOCK,
            **pdl(tokens_SL),
        )
    tokens, count_R, matched_R = out.split([R * num_drafts, R, R])
    return tokens.view(R, num_drafts), count_R, matched_R
