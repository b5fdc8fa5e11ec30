"""Routing, grouping rows by expert and combining outputs, in Triton, without synchronising with the host.

Shapes: T rows, E experts, K experts per row, P = T * K pairs of row and expert sorted by expert, H width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels.experts.spec import TINY, Routing
from draftproof.runtime.triton.launch import dense, on, pdl, power_of_two
from draftproof.runtime.triton.pdl import begin

PAIRS = 1024  # pairs per step of grouping
BLOCK = 1024  # columns per program of `combine`


@triton.jit
def _first_best(x, left, number, NONE: tl.constexpr):
    """(the largest x among `left`, the lowest `number` that has it)."""
    best = tl.max(tl.where(left, x, -float("inf")), axis=0)
    return best, tl.min(tl.where(left & (x >= best), number, NONE), axis=0)


@triton.jit
def _keep_groups(choice, e, inside, E: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr):
    """Mask of the experts in the TOP groups with the largest sums of their two best experts."""
    group_E = e // (E // GROUPS)
    sums_E = tl.full(choice.shape, -float("inf"), tl.float32)
    for g in range(GROUPS):
        own = inside & (group_E == g)
        best, at = _first_best(choice, own, e, E)
        second = tl.max(tl.where(own & (e != at), choice, -float("inf")), axis=0)
        sums_E = tl.where(group_E == g, best + second, sums_E)
    left = inside
    kept = e < 0
    for _ in range(TOP):
        _best, g = _first_best(sums_E, left, group_E, GROUPS)
        kept = kept | (left & (group_E == g))
        left = left & (group_E != g)
    return kept


@triton.jit
def _route_kernel(
    logits, bias, experts, weights, E: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, TINY: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts and weights of one row. EXPERTS: E rounded up to a power of two."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    inside = e < E
    x = tl.load(logits + row * E + e, mask=inside, other=-float("inf"))
    if SIGMOID:
        score = tl.math.div_rn(tl.full((EXPERTS,), 1.0, tl.float32), 1.0 + tl.exp(-x))
    else:
        exps = tl.exp(x - tl.max(x, axis=0))
        score = tl.math.div_rn(exps, tl.full((EXPERTS,), 0.0, tl.float32) + tl.sum(exps, axis=0))
    choice = score
    if BIAS:
        choice = score + tl.load(bias + e, mask=inside, other=0.0)
    choice = tl.where(choice == choice, choice, -float("inf"))
    left = inside
    if GROUPS > 1:
        left = _keep_groups(choice, e, inside, E, GROUPS, TOP_GROUPS)
    taken = tl.zeros((EXPERTS,), tl.int32)
    for _ in range(TOP_K):
        _best, at = _first_best(choice, left, e, E)
        taken += (e == at).to(tl.int32)
        left = left & (e != at)
    score = tl.where(taken > 0, score, 0.0)
    if NORMALIZE:
        score = tl.math.div_rn(score, tl.full((EXPERTS,), TINY, tl.float32) + tl.sum(score, axis=0))
    to = row * TOP_K + tl.cumsum(taken, axis=0) - 1
    tl.store(experts + to, e.to(tl.int64), mask=taken > 0)
    tl.store(weights + to, score * SCALE, mask=taken > 0)


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    experts, source, place, starts, pairs, E: tl.constexpr, TOP_K: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The rows of one expert: count the pairs of the experts before it, then number its own."""
    begin(PDL)
    expert = tl.program_id(0)
    before = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        before += (tl.load(experts + p, mask=p < pairs, other=E) < expert).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(starts + expert, at.to(tl.int64))
    if expert == 0:
        tl.store(starts + E, pairs.to(tl.int64))
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        mine = tl.load(experts + p, mask=p < pairs, other=E) == expert
        to = at + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(place + p, to.to(tl.int64), mask=mine)
        tl.store(source + to, (p // TOP_K).to(tl.int64), mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def _combine_kernel(
    y, place, weights, base, out, H: tl.constexpr, TOP_K: tl.constexpr, BASE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        at = tl.load(place + row * TOP_K + k)
        total += tl.load(weights + row * TOP_K + k) * tl.load(y + at * H + h, mask=inside, other=0.0)
    if BASE:
        total += tl.load(base + row * H + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + h, total.to(out.dtype.element_ty), mask=inside)


class TritonExperts:
    """`ExpertOps` in Triton."""

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See `ExpertOps`."""
        assert logits_TE.dtype == torch.float32
        logits_TE = dense(logits_TE)
        rows, num_experts = logits_TE.shape
        experts_TK = logits_TE.new_empty(rows, routing.top_k, dtype=torch.int64)
        weights_TK = logits_TE.new_empty(rows, routing.top_k)
        if rows:
            with on(logits_TE):
                _route_kernel[(rows,)](
                    logits_TE,
                    logits_TE if bias_E is None else dense(bias_E),
                    experts_TK,
                    weights_TK,
                    E=num_experts,
                    EXPERTS=power_of_two(num_experts),
                    TOP_K=routing.top_k,
                    SIGMOID=routing.sigmoid,
                    NORMALIZE=routing.normalize,
                    SCALE=routing.scale,
                    TINY=TINY,
                    GROUPS=routing.groups,
                    TOP_GROUPS=routing.top_groups,
                    BIAS=bias_E is not None,
                    **pdl(logits_TE),
                    num_warps=1,
                )
        return experts_TK, weights_TK

    def group(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertOps`."""
        pairs = experts_TK.numel()
        experts_TK = dense(experts_TK)
        source_P = experts_TK.new_empty(pairs)
        place_TK = torch.empty_like(experts_TK)
        starts_E1 = experts_TK.new_empty(num_experts + 1)
        with on(experts_TK):
            _group_kernel[(num_experts,)](
                experts_TK,
                source_P,
                place_TK,
                starts_E1,
                pairs,
                E=num_experts,
                TOP_K=experts_TK.shape[1],
                PAIRS=PAIRS,
                **pdl(experts_TK),
                num_warps=4,
            )
        return source_P, place_TK, starts_E1

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `ExpertOps`."""
        rows, top_k = place_TK.shape
        width = y_PH.shape[1]
        y_PH = dense(y_PH)
        assert y_PH.dtype == torch.float32
        out_TH = y_PH.new_empty(rows, width, dtype=dtype)
        if rows:
            with on(y_PH):
                _combine_kernel[(rows, triton.cdiv(width, BLOCK))](
                    y_PH,
                    place_TK,
                    weights_TK,
                    y_PH if base_TH is None else dense(base_TH),
                    out_TH,
                    H=width,
                    TOP_K=top_k,
                    BASE=base_TH is not None,
                    BLOCK=BLOCK,
                    **pdl(y_PH),
                    num_warps=4,
                )
        return out_TH
