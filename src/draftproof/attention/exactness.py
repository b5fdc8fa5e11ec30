"""Checks of attention for its certificate: rows over a paged cache, on data that exposes a wrong order of sums.

There are two sums, over the head size and over keys, hence two kinds of data.
Shapes: T rows, N kv heads, G query heads per kv head, S slots, B blocks per slot, D head size, L visible keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import AttentionBackend, AttentionSpec, FunctionBackend, QueryRows
from draftproof.cache.pool import LayerKV
from draftproof.kernels.exactness import Bits, Check
from draftproof.kernels.sums import pieces_sum

# Tokens of each slot: around chunk boundaries, and around lengths at which libraries change their order of sums.
CONTEXTS = (5, 64, 70, 192, 256, 330, 520, 1100)
LIKE_A_PROMPT = 40  # rows of one slot that share a call: more than any version puts in one product
VERIFIED = 6  # rows of each slot, the last of its context, as in a verify pass
SHORT = 16  # numbers: shorter sums may round alike in any order
SPREAD = 9  # cancelling numbers differ in magnitude by up to 2^18, so that bf16 sums round in fp32 too
SCORE_SCALE = 2.0**11  # scales the rounding error of a cancelling score to about 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one layer's attention. window 0: a row sees all earlier positions. shared: keys are also the values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class _Data:
    """Rows over full caches: what lies past a row's end belongs to later rows."""

    q_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table_SB: Tensor
    slots_T: Tensor
    context_lens_T: Tensor
    spec: AttentionSpec

    def run(self, version: AttentionBackend, rows_T: Tensor) -> Bits:
        """`version` called as by a layer, with the bound on consecutive rows of a slot."""
        slots_T = self.slots_T[rows_T]
        context_lens_T = self.context_lens_T[rows_T]
        attention = version.plan(QueryRows(slots_T, context_lens_T, _most_neighbours(slots_T)))
        kv = LayerKV(self.k_cache, self.v_cache, self.block_table_SB)
        return (attention.attend(self.q_THD[rows_T], self.spec, kv),)


def _most_neighbours(slots_T: Tensor) -> int:
    """The longest run of consecutive rows of one slot: 3 for slots 0 0 1 1 1 0."""
    return int(torch.unique_consecutive(slots_T, return_counts=True)[1].max())


def scores_check(shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device) -> Check:
    """Scores that cancel over the head size, with ordinary values."""
    return _check(_cancelling_scores(shape), shape, block_size, dtype, device)


def values_check(shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device) -> Check:
    """Weights of 1, with values that cancel over the keys."""
    return _check(_cancelling_values(shape), shape, block_size, dtype, device)


def _check(
    made: tuple[Tensor, Tensor, Tensor, float],
    shape: AttentionShape,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Check:
    q_THD, k_SLND, v_SLND, scale = made
    per_slot = -(-max(CONTEXTS) // block_size)
    order = torch.randperm(len(CONTEXTS) * per_slot, generator=torch.Generator().manual_seed(1))
    table_SB = (order + 1).view(len(CONTEXTS), per_slot).int()
    k_cache = _paged(k_SLND, table_SB, block_size).to(device, dtype)
    rows = [
        (slot, end)
        for slot, most in enumerate(CONTEXTS)
        for end in range(max(1, most - VERIFIED + 1), most + 1)
    ]
    data = _Data(
        q_THD=q_THD.to(device, dtype),
        k_cache=k_cache,
        v_cache=k_cache if shape.shared else _paged(v_SLND, table_SB, block_size).to(device, dtype),
        block_table_SB=table_SB.to(device),
        slots_T=torch.tensor([slot for slot, _ in rows], device=device),
        context_lens_T=torch.tensor([end for _, end in rows], device=device),
        spec=AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=scale,
            window=shape.window,
            cos_sin_PD=torch.empty(0),  # the cache holds rotated keys
        ),
    )
    return Check(
        num_rows=len(rows),
        width=max(CONTEXTS) * shape.num_heads * 16,
        groups=_prompts(rows),
        proof_rows=tuple(i for i, (slot, end) in enumerate(rows) if end == CONTEXTS[slot]),
        run=data.run,
        wrong=FunctionBackend(split_by_the_batch),
        too_short=min(shape.head_dim, shape.window or SHORT) < SHORT,
        device=device,
    )


def _prompts(rows: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The rows of each slot repeated, LIKE_A_PROMPT of them: as many rows of one padded length as in a prompt."""
    groups = []
    for slot in range(len(CONTEXTS)):
        own = [i for i, (of, _) in enumerate(rows) if of == slot]
        groups.append(tuple(own[i % len(own)] for i in range(LIKE_A_PROMPT)))
    return tuple(groups)


def _paged(x_SLND: Tensor, table_SB: Tensor, block_size: int) -> Tensor:
    """[S, L, N, D] stored in the blocks of a table: [1 + S * B, N, block_size, D]."""
    num_slots, length, num_heads, head_dim = x_SLND.shape
    padded = torch.zeros(num_slots, table_SB.shape[1] * block_size, num_heads, head_dim)
    padded[:, :length] = x_SLND
    blocks = padded.unflatten(1, (-1, block_size)).transpose(2, 3)  # [S, B, N, block_size, D]
    cache = torch.zeros(1 + table_SB.numel(), *blocks.shape[2:])
    cache[table_SB.flatten().long()] = blocks.flatten(0, 1)
    return cache


def _num_rows() -> int:
    return sum(min(VERIFIED, most) for most in CONTEXTS)


def _cancelling_scores(shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor, float]:
    """q = (a, a) and k = (b, -b), in the same random order over D, of very different magnitudes: q . k is rounding
    error.
    """
    generator = torch.Generator().manual_seed(2)
    dim = shape.head_dim
    half = shape.head_dim // 2
    size = (len(CONTEXTS), max(CONTEXTS), shape.num_kv_heads)
    scale_D = 2.0 ** torch.randint(-SPREAD, SPREAD + 1, (half,), generator=generator)
    order_D = torch.randperm(dim, generator=generator)
    first_D = order_D[:half]
    second_D = order_D[half : 2 * half]
    a_THD = torch.randn(_num_rows(), shape.num_heads, half, generator=generator) * scale_D
    b_SLND = torch.randn(*size, half, generator=generator)
    q_THD = torch.zeros(_num_rows(), shape.num_heads, dim)
    k_SLND = torch.zeros(*size, dim)
    q_THD[..., first_D] = a_THD
    q_THD[..., second_D] = a_THD
    k_SLND[..., first_D] = b_SLND
    k_SLND[..., second_D] = -b_SLND
    return q_THD, k_SLND, torch.randn(*size, dim, generator=generator), SCORE_SCALE


def _cancelling_values(shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor, float]:
    """Scores of 0, so weights of 1; values that cancel in pairs scattered over a slot's visible context."""
    generator = torch.Generator().manual_seed(3)
    size = (len(CONTEXTS), max(CONTEXTS), shape.num_kv_heads, shape.head_dim)
    v_SLND = torch.zeros(size)
    for v_LND, length in zip(v_SLND, CONTEXTS, strict=True):
        seen = min(length, shape.window) if shape.window else length
        half = seen // 2
        order_L = length - seen + torch.randperm(seen, generator=generator)
        scale_L = 2.0 ** torch.randint(-SPREAD, SPREAD + 1, (half, 1, 1), generator=generator)
        pairs_LND = torch.randn(half, *size[2:], generator=generator) * scale_L
        v_LND[order_L[:half]] = pairs_LND
        v_LND[order_L[half : 2 * half]] = -pairs_LND
    q_THD = torch.zeros(_num_rows(), shape.num_heads, shape.head_dim)
    k_SLND = v_SLND if shape.shared else torch.randn(size, generator=generator)
    return q_THD, k_SLND, v_SLND, 1.0


def split_by_the_batch(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_SB: Tensor,
    slots_T: Tensor,
    context_lens_T: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """The wrong twin: in calls with several rows, the sums over D and over keys are made in two halves."""
    outs = []
    for q_HD, slot, end in zip(q_THD.float(), slots_T.tolist(), context_lens_T.tolist(), strict=True):
        positions_L = torch.arange(max(0, end - window) if window else 0, end, device=q_THD.device)
        blocks_L = block_table_SB[slot, positions_L // k_cache.shape[2]].long()
        offsets_L = positions_L % k_cache.shape[2]
        group = q_HD.shape[0] // k_cache.shape[1]
        k_LHD, v_LHD = (
            cache[blocks_L, :, offsets_L].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        halves = 1 if len(q_THD) == 1 else 2
        scores_LH = pieces_sum(q_HD * k_LHD, -1, halves) * scale
        weights_LH = torch.exp(scores_LH - scores_LH.amax(0))
        summed_HD = pieces_sum(weights_LH[..., None] * v_LHD, 0, halves)
        outs.append((summed_HD / pieces_sum(weights_LH, 0, halves)[:, None]).to(q_THD.dtype).flatten())
    return torch.stack(outs)
