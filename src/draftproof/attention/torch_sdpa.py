"""torch's attention over gathered keys, for `exact=False`, on any device that torch supports.

The cache is laid out position by position, so a row's keys are one gather from a flat list of positions. Nothing
synchronises with the host, so a GPU can capture it. torch chooses its kernels by the size of a call, so a row's bits
may depend on its neighbours.
Shapes: T rows, N kv heads, G query heads per kv head, L positions of a slot, B blocks per slot, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.attention.base import AttentionBackend, AttentionSpec, QueryRows, Rows
from draftproof.cache.pool import KVShape, LayerKV
from draftproof.kernels.norm.reference import normalize
from draftproof.kernels.ops import Ops
from draftproof.kernels.rope.reference import norm_rotate, turns

MAX_ROWS = 64  # maximum rows per call, which bounds the gathered copy of the cache


class TorchSdpa(AttentionBackend):
    """`F.scaled_dot_product_attention`. The layout of a layer's keys: [num_blocks, block_size, N, D]."""

    def layout(self, shape: KVShape, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return num_blocks, block_size, shape.heads, shape.head_dim

    def store(self, ops: Ops, qkv_TX: Tensor, rows: Rows, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        num_heads, head_dim = kv.k.shape[2:]
        shared = kv.v is kv.k
        qkv_THD = qkv_TX.unflatten(1, (-1, head_dim))
        num_queries = qkv_THD.shape[1] - (1 if shared else 2) * num_heads
        q_THD, k_TND, v_TND = qkv_THD.tensor_split((num_queries, num_queries + num_heads), dim=1)
        cos_sin_T1R = _angles(rows, spec)
        k_TND = norm_rotate(k_TND, spec.k_norm_D, spec.eps, cos_sin_T1R)
        places_T = _places(kv, rows)
        kv.k.flatten(0, 1).index_copy_(0, places_T, k_TND.to(kv.k.dtype))
        if not shared:
            if spec.v_norm_D is not None:
                v_TND = normalize(v_TND.float(), spec.v_norm_D, spec.eps)
            kv.v.flatten(0, 1).index_copy_(0, places_T, v_TND.to(kv.v.dtype))
        return _queries(q_THD, rows, spec, cos_sin_T1R)

    def query(self, ops: Ops, q_TX: Tensor, rows: Rows, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        cos_sin_T1R = _angles(rows, spec)
        return _queries(q_TX.unflatten(1, (-1, kv.k.shape[3])), rows, spec, cos_sin_T1R)

    def plan(self, rows: QueryRows) -> GatheredPass:
        return GatheredPass(rows)


class GatheredPass:
    """The places of each row's keys, found once for all layers of a pass that share a block table."""

    def __init__(self, rows: QueryRows) -> None:
        self._rows = rows
        self._places: dict[int, Tensor] = {}  # keyed by the table's address

    def attend(self, q_THD: Tensor, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        places_TL = self._places.get(kv.block_table_SB.data_ptr())
        if places_TL is None:
            places_TL = self._find(kv.block_table_SB, kv.k.shape[1])
            self._places[kv.block_table_SB.data_ptr()] = places_TL
        ends_T = self._rows.context_lens_T
        positions_L = torch.arange(places_TL.shape[1], device=ends_T.device)
        seen_TL = positions_L < ends_T[:, None]
        if spec.window:
            seen_TL &= positions_L >= ends_T[:, None] - spec.window
        given = (x.split(MAX_ROWS) for x in (q_THD, places_TL, seen_TL))
        return torch.cat([_attend(q, places, seen, spec, kv) for q, places, seen in zip(*given, strict=True)])

    def _find(self, block_table_SB: Tensor, block_size: int) -> Tensor:
        """The place of each position in the flat list, int64 [T, L]."""
        blocks_TB = block_table_SB[self._rows.slots_T].long()
        offsets = torch.arange(block_size, device=blocks_TB.device)
        return (blocks_TB[:, :, None] * block_size + offsets).flatten(1)


def _angles(rows: Rows, spec: AttentionSpec) -> Tensor:
    """Cosines and sines of each row, [T, 1, rotated size]."""
    cos_sin_PD, shift_S = rows.angles(spec)
    return cos_sin_PD[turns(rows.positions_T, rows.slots_T, shift_S)].unsqueeze(1)


def _places(kv: LayerKV, rows: Rows) -> Tensor:
    """Place of each row's key in the flat list of positions; in the scratch block for padding rows."""
    block_size = kv.k.shape[1]
    positions_T = rows.positions_T.clamp(min=0)
    blocks_T = kv.block_table_SB[rows.slots_T, positions_T // block_size].long()
    blocks_T = torch.where(rows.positions_T >= 0, blocks_T, 0)
    return blocks_T * block_size + positions_T % block_size


def _queries(q_THD: Tensor, rows: Rows, spec: AttentionSpec, cos_sin_T1R: Tensor) -> Tensor:
    rotated_THD = norm_rotate(q_THD, spec.q_norm_D, spec.eps, cos_sin_T1R)
    return rotated_THD.masked_fill(rows.positions_T[:, None, None] < 0, 0.0).to(q_THD.dtype)


def _attend(q_THD: Tensor, places_TL: Tensor, seen_TL: Tensor, spec: AttentionSpec, kv: LayerKV) -> Tensor:
    """Attention of rows over their places. Hidden positions are zeroed, not only masked: 0 * NaN is NaN."""

    def visible(cache: Tensor) -> Tensor:
        vectors_TLND = cache.flatten(0, 1)[places_TL].masked_fill(~seen_TL[:, :, None, None], 0.0)
        return vectors_TLND.transpose(1, 2).to(q_THD.dtype)

    k_TNLD = visible(kv.k)
    v_TNLD = k_TNLD if kv.v is kv.k else visible(kv.v)
    bias_T1L = torch.zeros_like(seen_TL, dtype=q_THD.dtype).masked_fill(~seen_TL, -torch.inf)[:, None]
    q_TNGD = q_THD.unflatten(1, (k_TNLD.shape[1], -1))
    out_TNGD = F.scaled_dot_product_attention(
        q_TNGD, k_TNLD, v_TNLD, attn_mask=bias_T1L[:, None], scale=spec.scale
    )
    return out_TNGD.flatten(1).masked_fill(~seen_TL.any(1)[:, None], 0.0)
