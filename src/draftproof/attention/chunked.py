"""Attention over chunks of constant size, in torch: two exact versions, which differ in how products are computed.

A row's keys are split into chunks of CHUNK. The maximum score is exact in any order. Each chunk gives a sum of weights
and a sum of weighted values, which a tree over the chunks adds; absent chunks count as zeros, so the tree of a longer
neighbour gives the same bits. `TREES` uses elementwise arithmetic only, so no library chooses an order; `PRODUCTS` uses
BLAS products of one constant shape.
Shapes: T rows, N kv heads, G query heads per kv head, C chunks, L keys of a chunk, S slots, B blocks per slot, D head
size. All arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftproof.attention.base import RowBackend
from draftproof.attention.gathered import CHUNK, attend_by_length
from draftproof.kernels.sums import tree_sum

QUERY_ROWS = 8  # query heads per product; fewer are padded with zeros
MAX_NUMBERS = 1 << 24  # maximum size of an intermediate result, which bounds the rows per call


def chunk_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over chunks, neighbours first: ((x0 + x1) + (x2 + x3)) + ...; drops `dim`.

    Absent chunks count as zeros, so the number of chunks of the longest row has no effect: three give (x0 + x1) + x2,
    four with a last one of zeros (x0 + x1) + (x2 + 0).
    """
    while x.shape[dim] > 1:
        if x.shape[dim] % 2:
            x = torch.cat((x, torch.zeros_like(x.narrow(dim, 0, 1))), dim)
        pairs = x.unflatten(dim, (-1, 2))
        x = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
    return x.squeeze(dim)


@dataclass(frozen=True, slots=True)
class Products:
    """The two products of attention, fp32.

    scores: (q [T, N, G, D], k [T, N, C, L, D]) -> [T, N, C, G, L]; values: (weights [T, N, C, G, L],
    v [T, N, C, L, D]) -> [T, N, C, G, D].
    """

    scores: Callable[[Tensor, Tensor], Tensor]
    values: Callable[[Tensor, Tensor], Tensor]


def _blas_scores(q_TNGD: Tensor, k_TNCLD: Tensor) -> Tensor:
    num_chunks = k_TNCLD.shape[2]
    q_TNCGD = q_TNGD.unsqueeze(2).expand(-1, -1, num_chunks, -1, -1)
    return _constant_products(q_TNCGD, k_TNCLD.transpose(-1, -2))


def _constant_products(left: Tensor, right: Tensor) -> Tensor:
    """[..., G, X] @ [..., X, Y] as products of QUERY_ROWS rows each."""
    group = left.shape[-2]
    parts = []
    for first in range(0, group, QUERY_ROWS):
        part = left[..., first : first + QUERY_ROWS, :]
        missing = QUERY_ROWS - part.shape[-2]
        if missing:
            part = torch.nn.functional.pad(part, (0, 0, 0, missing))
        parts.append((part.contiguous() @ right)[..., : QUERY_ROWS - missing, :])
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _tree_scores(q_TNGD: Tensor, k_TNCLD: Tensor) -> Tensor:
    rows = [
        tree_sum(q_TNGD[:, :, None, g, None, :] * k_TNCLD, -1) for g in range(q_TNGD.shape[2])
    ]  # one head at a time, because [T, N, C, L, D] is large already
    return torch.stack(rows, 3)


def _tree_values(weights_TNCGL: Tensor, v_TNCLD: Tensor) -> Tensor:
    rows = [tree_sum(weights_TNCGL[:, :, :, g, :, None] * v_TNCLD, 3) for g in range(weights_TNCGL.shape[3])]
    return torch.stack(rows, 3)


PRODUCTS = Products(scores=_blas_scores, values=_constant_products)
TREES = Products(scores=_tree_scores, values=_tree_values)


@dataclass(frozen=True)
class ChunkedAttention(RowBackend):
    """A backend over chunks, with one of the two ways to compute products."""

    products: Products

    def __call__(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table_SB: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
        window: int,
        scale: float,
    ) -> Tensor:
        numbers_of_a_key = k_cache.shape[1] * q_THD.shape[2]
        return attend_by_length(
            partial(self._attend, scale=scale),
            lambda length: max(1, MAX_NUMBERS // (length * numbers_of_a_key)),
            q_THD,
            k_cache,
            v_cache,
            block_table_SB,
            slots_T,
            context_lens_T,
            window,
        )

    def _attend(self, q_THD: Tensor, k_TNXD: Tensor, v_TNXD: Tensor, seen_TX: Tensor, scale: float) -> Tensor:
        """Attention of rows with equal numbers of chunks, X = C * L keys: [T, heads, D] in q's dtype."""
        q_TNGD = q_THD.float().unflatten(1, (k_TNXD.shape[1], -1))
        k_TNCLD, v_TNCLD = (x.float().unflatten(2, (-1, CHUNK)) for x in (k_TNXD, v_TNXD))
        hidden_TCL = ~seen_TX.unflatten(1, (-1, CHUNK))
        scores_TNCGL = self.products.scores(q_TNGD, k_TNCLD) * scale
        scores_TNCGL = scores_TNCGL.masked_fill(hidden_TCL[:, None, :, None, :], float("-inf"))
        top_TN1G1 = scores_TNCGL.amax((2, 4), keepdim=True)
        weights_TNCGL = torch.exp(scores_TNCGL - top_TN1G1)  # exactly 0 for hidden keys
        total_TNG = chunk_sum(tree_sum(weights_TNCGL, -1), 2)
        summed_TNGD = chunk_sum(self.products.values(weights_TNCGL, v_TNCLD), 2)
        return (summed_TNGD / total_TNG.unsqueeze(-1)).reshape(q_THD.shape).to(q_THD.dtype)
