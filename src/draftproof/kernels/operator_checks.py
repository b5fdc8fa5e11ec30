"""Checks of the operators in `Ops` that round: test data, and wrong twins whose result depends on the batch.

Operators that only move bits (gather, concat, swap) or compute integers (step, lookup) have nothing to round.
Shapes: T rows, H width, I intermediate, V vocabulary, D head size, E experts, K experts per row, S partial sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels.activation.reference import gelu_mul_torch, silu_mul_torch, soft_cap_torch
from draftproof.kernels.exactness import Bits, Check, num_test_rows
from draftproof.kernels.experts.reference import TorchExperts
from draftproof.kernels.experts.spec import Routing
from draftproof.kernels.norm.reference import add_rms_norm_torch
from draftproof.kernels.process.reference import process_torch
from draftproof.kernels.process.spec import pack_list
from draftproof.kernels.rope.reference import rope_store_torch
from draftproof.kernels.row_params import CONSTRAINED, MASKED, PENALISED, RowParams, pack_row
from draftproof.kernels.sample.reference import sample_torch
from draftproof.kernels.sums import pieces_sum

SAMPLED_ROWS = 10  # two per kind of parameters
LOGIT_ROWS = 32  # minimum rows of logits: in few rows of many columns two orders may round alike
SHORT_SUM = 8  # numbers: shorter sums may round alike in any order
SHORT_NORM = 16
# Elements of a norm's row: the squares of the small ones are about one rounding error of the large ones'.
LARGE = 2.0**7
SMALL = 2.0**-4


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def norm_rows(num_rows: int, width: int) -> tuple[Tensor, float]:
    """(fp32 [T, H], eps) such that the mean square nearly cancels with the negative eps, which leaves rounding errors.

    Each row has two entries LARGE, at random places: all rows contain the same two squares. Rows narrower than
    SHORT_NORM are ordinary random rows.
    """
    generator = _generator(3)
    x_TH = SMALL * torch.randn(num_rows, width, generator=generator)
    if width < SHORT_NORM:
        return x_TH, 1e-6
    for row_H in x_TH:
        row_H[torch.randperm(width, generator=generator)[:2]] = LARGE
    return x_TH, -2 * LARGE**2 / width + 0.1 * SMALL**2


def rms_norm_check(width: int, dtype: torch.dtype, device: torch.device, weight_dtype: torch.dtype) -> Check:
    x_TH, eps = norm_rows(num_test_rows(width), width)
    x_TH = x_TH.to(device, dtype)
    weight_H = torch.randn(width, generator=_generator(4)).to(device, weight_dtype)

    def run(version: Any, rows_T: Tensor) -> Bits:
        return (version(x_TH[rows_T], weight_H, eps),)

    return Check(
        num_rows=len(x_TH),
        width=width,
        run=run,
        wrong=_wrong_rms_norm,
        device=device,
        too_short=width < SHORT_NORM,
    )


def _wrong_rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """For calls with several rows, the sum of squares is made in two pieces."""
    squares_TH = x_TH.float() * x_TH.float()
    mean_T1 = pieces_sum(squares_TH, -1, 1 if len(x_TH) == 1 else 2).unsqueeze(-1) / x_TH.shape[-1]
    return (x_TH.float() / torch.sqrt(mean_T1 + eps) * weight_H.float()).to(x_TH.dtype)


def _wrong_add_rms_norm(
    x: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`_wrong_rms_norm` after an addition. Partial sums are added starting with the last."""
    if x.dim() == 3:
        order_S = torch.arange(len(x), device=x.device).roll(int(len(residual_TH) > 1))
        return add_rms_norm_torch(x[order_S], residual_TH, weight_H, eps)
    sum_TH = (x.float() + residual_TH.float()).to(x.dtype)
    return _wrong_rms_norm(sum_TH, weight_H, eps), sum_TH


def add_rms_norm_check(
    width: int, dtype: torch.dtype, device: torch.device, weight_dtype: torch.dtype, num_parts: int = 0
) -> Check:
    """`num_parts`: number of fp32 partial sums in the first argument; 0: it is a plain matrix."""
    rows_TH, eps = norm_rows(num_test_rows(width), width)
    residual_TH = (rows_TH / 2).to(device, dtype)
    x = residual_TH
    if num_parts:
        parts_STH = torch.randn(num_parts, *rows_TH.shape, generator=_generator(5)).to(device)
        parts_STH[1::2] = -parts_STH[0:-1:2] * (1 + 2.0**-12)
        x = parts_STH
        eps = 1e-6
        residual_TH = residual_TH * 0
    weight_H = torch.randn(width, generator=_generator(4)).to(device, weight_dtype)

    def run(version: Any, rows_T: Tensor) -> Bits:
        part = x[:, rows_T].contiguous() if num_parts else x[rows_T]
        normed_TH, sum_TH = version(part, residual_TH[rows_T], weight_H, eps)
        return normed_TH, sum_TH

    return Check(
        num_rows=len(residual_TH),
        width=width,
        run=run,
        wrong=_wrong_add_rms_norm,
        device=device,
        too_short=width < SHORT_NORM and not num_parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Sizes of one layer's `rope_store`. num_kv_heads 0: queries only; shared: keys are also the values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    q_norm: bool
    k_norm: bool
    v_norm: bool = False
    shared: bool = False


@dataclass(slots=True)
class _RopeData:
    """Row t is at position t of slot 0; each call starts with an empty cache."""

    shape: RopeShape
    block_size: int
    qkv_TX: Tensor
    cos_sin_PD: Tensor
    norm_D: Tensor
    eps: float

    def run(self, version: Any, rows_T: Tensor) -> Bits:
        shape = self.shape
        device = self.qkv_TX.device
        num_blocks = -(-len(self.qkv_TX) // self.block_size)
        table_SB = torch.arange(1, num_blocks + 1, device=device, dtype=torch.int32).view(1, -1)
        size = (num_blocks + 1, shape.num_kv_heads, self.block_size, shape.head_dim)
        k_cache = self.qkv_TX.new_zeros(size)
        v_cache = None if shape.shared else torch.zeros_like(k_cache)
        q_THD = version(
            self.qkv_TX[rows_T],
            rows_T,
            torch.zeros_like(rows_T),
            self.cos_sin_PD,
            self.norm_D if shape.q_norm else None,
            self.norm_D if shape.k_norm else None,
            self.eps,
            k_cache,
            v_cache,
            table_SB,
            self.norm_D if shape.v_norm else None,
        )
        blocks_T = rows_T // self.block_size + 1
        offsets_T = rows_T % self.block_size
        stored = [cache[blocks_T, :, offsets_T] for cache in (k_cache, v_cache) if cache is not None]
        return (q_THD, *stored)


def _wrong_rope(qkv_TX: Tensor, *arguments: Any) -> Tensor:
    """For calls with several rows, a norm's sum is off by one rounding or, without norms, angles are rounded."""
    positions_T, slots_T, cos_sin_PD, q_norm_D, k_norm_D, eps, *rest = arguments
    if len(qkv_TX) > 1 and q_norm_D is None and k_norm_D is None:
        cos_sin_PD = cos_sin_PD.bfloat16().float()
    elif len(qkv_TX) > 1:
        eps = eps * (1 - 2.0**-23)
    return rope_store_torch(qkv_TX, positions_T, slots_T, cos_sin_PD, q_norm_D, k_norm_D, eps, *rest)


def rope_store_check(
    shape: RopeShape, block_size: int, dtype: torch.dtype, device: torch.device, weight_dtype: torch.dtype
) -> Check:
    num_heads = shape.num_heads + shape.num_kv_heads * (1 if shape.shared else 2)
    width = num_heads * shape.head_dim
    num_rows = num_test_rows(width)
    vectors, eps = norm_rows(num_rows * num_heads, shape.head_dim)
    normed = shape.q_norm or shape.k_norm or shape.v_norm
    if not normed:
        vectors = torch.randn(vectors.shape, generator=_generator(6))
        eps = 1e-6
    angles = torch.rand(num_rows, shape.rotary_dim // 2, generator=_generator(7)) * 6
    data = _RopeData(
        shape,
        block_size,
        vectors.view(num_rows, width).to(device, dtype),
        torch.cat((angles.cos(), angles.sin()), 1).to(device),
        torch.randn(shape.head_dim, generator=_generator(8)).to(device, weight_dtype),
        eps,
    )
    return Check(
        num_rows=num_rows,
        width=width,
        run=data.run,
        wrong=_wrong_rope,
        device=device,
        too_short=normed and shape.head_dim < SHORT_NORM,
    )


def gate_mul_check(width: int, dtype: torch.dtype, device: torch.device, *, gelu: bool = False) -> Check:
    """width: I, the outputs of a row."""
    right = gelu_mul_torch if gelu else silu_mul_torch
    num_rows = num_test_rows(2 * width)
    x_TI2 = (3 * torch.randn(num_rows, 2 * width, generator=_generator(9))).to(device, dtype)

    def run(version: Any, rows_T: Tensor) -> Bits:
        return (version(x_TI2[rows_T]),)

    def wrong(gate_up_TI2: Tensor) -> Tensor:
        """The activation, rounded before the multiplication."""
        if len(gate_up_TI2) == 1:
            return right(gate_up_TI2)
        gate_TI, up_TI = gate_up_TI2.float().chunk(2, -1)
        activated_TI = right(torch.cat((gate_TI, torch.ones_like(up_TI)), -1)).bfloat16().float()
        return (activated_TI * up_TI).to(gate_up_TI2.dtype)

    return Check(
        num_rows=num_rows,
        width=2 * width,
        run=run,
        wrong=wrong,
        device=device,
    )


def soft_cap_check(vocab_size: int, cap: float, device: torch.device) -> Check:
    num_rows = num_test_rows(vocab_size)
    logits_MV = (20 * torch.randn(num_rows, vocab_size, generator=_generator(10))).to(device)

    def run(version: Any, rows_T: Tensor) -> Bits:
        return (version(logits_MV[rows_T], cap),)

    def wrong(logits_MV: Tensor, cap: float) -> Tensor:
        return soft_cap_torch(logits_MV if len(logits_MV) == 1 else logits_MV.bfloat16().float(), cap)

    return Check(
        num_rows=num_rows,
        width=vocab_size,
        run=run,
        wrong=wrong,
        device=device,
    )


def log_normalizer_check(vocab_size: int, device: torch.device) -> Check:
    """One logit is 0 and its exponential is about twice the sum of the others', so the logarithm is near 0 and hides no
    bit.
    """
    num_rows = max(LOGIT_ROWS, num_test_rows(vocab_size))
    others_MV = torch.randn(num_rows, vocab_size, generator=_generator(11)) - math.log(vocab_size) - 1.2
    others_MV[:, 0] = 0
    logits_MV = others_MV.to(device)

    def run(version: Any, rows_T: Tensor) -> Bits:
        return (version(logits_MV[rows_T]),)

    def wrong(logits_MV: Tensor) -> Tensor:
        """For calls with several rows, exponentials are summed in two pieces."""
        return torch.log(pieces_sum(torch.exp(logits_MV), -1, 1 if len(logits_MV) == 1 else 2))

    return Check(
        num_rows=num_rows,
        width=vocab_size,
        run=run,
        wrong=wrong,
        device=device,
        too_short=vocab_size < SHORT_SUM,
    )


def sample_check(vocab_size: int, device: torch.device) -> Check:
    """Greedy rows, sampled ones, and rows with each filter."""
    num_rows = SAMPLED_ROWS
    logits_MV = (2 * torch.randn(num_rows, vocab_size, generator=_generator(12))).to(device)
    kind_M = torch.arange(num_rows, device=device) % 5
    temperature_M = torch.where(kind_M == 0, 0.0, 0.9)
    top_k_M = torch.where(kind_M == 2, 40, 0)
    top_p_M = torch.where(kind_M == 3, 0.9, 1.0)
    min_p_M = torch.where(kind_M == 4, 0.05, 0.0)
    seeds_M = torch.arange(num_rows, device=device) * 7919 + 1
    positions_M = torch.arange(num_rows, device=device) + 5
    params = RowParams.of(temperature_M, top_k_M, top_p_M, min_p_M, seeds_M)

    def run(version: Any, rows_T: Tensor) -> Bits:
        return (version(logits_MV[rows_T], params[rows_T], positions_M[rows_T], None),)

    def wrong(logits_MV: Tensor, params: RowParams, positions_M: Tensor, ids_V: Tensor | None) -> Tensor:
        """The noise also depends on the row's place in the batch."""
        place_M = torch.arange(len(logits_MV), device=device)
        return sample_torch(logits_MV, params, positions_M + place_M, ids_V)

    return Check(
        num_rows=num_rows,
        width=16 * vocab_size,  # sorting costs more than adding
        run=run,
        wrong=wrong,
        device=device,
    )


def process_check(vocab_size: int, device: torch.device) -> Check:
    """Rows alternate between two slots: one with penalties, one with every kind of list; each row has a mask."""
    num_rows, length, half = SAMPLED_ROWS, 40, vocab_size // 2
    generator = _generator(13)
    logits_MV = (2 * torch.randn(num_rows, vocab_size, generator=generator)).to(device)
    tokens_SL = torch.randint(0, vocab_size, (2, length), generator=generator, dtype=torch.int32)
    tokens_SL[:, 1::3] = tokens_SL[:, :1]
    word = [*tokens_SL[1, 18:20].tolist(), half]
    numbers = pack_list([0, half], {1: 2.5, half: -3.0}, [[half], word], range(half + 1), vocab_size)
    lists_SN = torch.tensor([[0] * len(numbers), numbers], dtype=torch.int32)
    rows = [
        pack_row(prompt_len=9, flags=PENALISED, repetition=1.3, presence=0.4, frequency=0.1),
        pack_row(prompt_len=9, flags=CONSTRAINED | MASKED, held_until=15),
    ]
    slots_M = (torch.arange(num_rows) % 2).to(device)
    positions_M = (torch.arange(num_rows) // 2 % (length - 10) + 10).to(device)
    params = RowParams(torch.tensor(rows).to(device)[slots_M])
    tokens_SL, lists_SN = tokens_SL.to(device), lists_SN.to(device)
    masks_MW = torch.randint(-(1 << 31), 1 << 31, (num_rows, -(-vocab_size // 32)), generator=generator)
    masks_MW = masks_MW.to(device, torch.int32)

    def run(version: Any, rows_T: Tensor) -> Bits:
        given = (params[rows_T], slots_M[rows_T], positions_M[rows_T])
        found: Bits = version(logits_MV[rows_T], *given, tokens_SL, lists_SN, masks_MW[rows_T])
        return found

    def wrong(logits_MV: Tensor, params: RowParams, slots_M: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """All rows use the text of the first row's slot."""
        return process_torch(logits_MV, params, slots_M[:1].expand_as(slots_M), *given)

    return Check(num_rows=num_rows, width=2 * vocab_size, run=run, wrong=wrong, device=device)


class _WrongExperts(TorchExperts):
    """For calls with several rows, the sum of the softmax is made in two pieces, and chosen weights and experts are
    added starting with the last.
    """

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        experts_TK, weights_TK = super().route(logits_TE, bias_E, replace(routing, normalize=False))
        if routing.normalize:
            total_T1 = torch.zeros_like(weights_TK[:, :1])
            columns = weights_TK.split(1, dim=1)
            for column_T1 in columns if len(logits_TE) == 1 else columns[::-1]:
                total_T1 = total_T1 + column_T1
            weights_TK = weights_TK / total_T1
        return experts_TK, weights_TK

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        if len(place_TK) > 1:
            place_TK = place_TK.flip(1)
            weights_TK = weights_TK.flip(1)
        return super().combine(y_PH, place_TK, weights_TK, base_TH, dtype)

    def _softmax(self, logits_TE: Tensor) -> Tensor:
        exps_TE = torch.exp(logits_TE - logits_TE.amax(dim=-1, keepdim=True))
        return exps_TE / pieces_sum(exps_TE, -1, 1 if len(logits_TE) == 1 else 2).unsqueeze(-1)


def route_check(num_experts: int, routing: Routing, device: torch.device, *, biased: bool) -> Check:
    num_rows = num_test_rows(num_experts)
    logits_TE = (2 * torch.randn(num_rows, num_experts, generator=_generator(14))).to(device)
    bias_E = (0.2 * torch.randn(num_experts, generator=_generator(15))).to(device) if biased else None

    def run(version: Any, rows_T: Tensor) -> Bits:
        experts_TK, weights_TK = version.route(logits_TE[rows_T], bias_E, routing)
        return experts_TK, weights_TK

    return Check(
        num_rows=num_rows,
        width=num_experts,
        run=run,
        wrong=_WrongExperts(),
        device=device,
        too_short=_adds_little(num_experts, routing),
    )


def _adds_little(num_experts: int, routing: Routing) -> bool:
    """Whether a row's weights come from sums too short to expose their order.

    True for a softmax over few experts, for two chosen sigmoids, and for a single normalized weight, which is always 1.
    """
    if routing.normalize and routing.top_k == 1:
        return True
    if routing.sigmoid:
        return not routing.normalize or routing.top_k < 3
    return num_experts < SHORT_SUM


def combine_check(width: int, top_k: int, dtype: torch.dtype, device: torch.device, *, shared: bool) -> Check:
    """shared: a shared expert's output is added."""
    num_rows = num_test_rows(width * top_k)
    y_TKH = 2.0**12 * torch.randn(num_rows, top_k, width, generator=_generator(16))
    if top_k > 1:
        y_TKH[:, -1] = -y_TKH[:, :-1].double().sum(1)  # only rounding errors remain
    y_TKH = y_TKH.to(device)
    weights_TK = torch.full((num_rows, top_k), 0.5, device=device)
    base_TH = (2.0**-12 * torch.randn(num_rows, width, generator=_generator(17))).to(device, dtype)

    def run(version: Any, rows_T: Tensor) -> Bits:
        y_PH = y_TKH[rows_T].flatten(0, 1)
        place_TK = torch.arange(len(y_PH), device=device).view(-1, top_k)
        base = base_TH[rows_T] if shared else None
        return (version.combine(y_PH, place_TK, weights_TK[rows_T], base, dtype),)

    return Check(
        num_rows=num_rows,
        width=width * top_k,
        run=run,
        wrong=_WrongExperts(),
        device=device,
        too_short=top_k < 3,  # two numbers have one sum
    )
