"""Sums with an explicit order: elementwise additions, or rows so short that torch's order is fixed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by halving: pairs (0, n/2), (1, n/2 + 1), ..., zero-padded to a power of two; drops `dim`.

    Three numbers: (x0 + x2) + (x1 + 0). More zero padding changes nothing: 5 to 8 numbers use the tree of 8.
    """
    size = x.shape[dim]
    width = 1 << max(size - 1, 0).bit_length()
    if width > size:
        shape = list(x.shape)
        shape[dim] = width - size
        x = torch.cat((x, x.new_zeros(shape)), dim)
    while width > 1:
        width //= 2
        x = x.narrow(dim, 0, width) + x.narrow(dim, width, width)
    return x.squeeze(dim)


def pieces_sum(x: Tensor, dim: int, num_pieces: int) -> Tensor:
    """Sum over `dim` as the sum of `num_pieces` trees: each number of pieces gives a different order.

    Four numbers: in 1 piece (x0 + x2) + (x1 + x3), in 2 pieces (x0 + x1) + (x2 + x3).
    """
    first, *others = (tree_sum(piece, dim) for piece in x.tensor_split(num_pieces, dim) if piece.shape[dim])
    for other in others:
        first = first + other
    return first


# Elements of a piece. torch sums such short rows in an order independent of the number of rows and threads, which it
# does not guarantee for long rows.
PIECE = 64


def row_sum(x_TH: Tensor) -> Tensor:
    """Sum over the last dimension in two stages of a fixed order: [..., H] fp32 -> [..., 1] fp32."""
    width = x_TH.shape[-1]
    if width > PIECE:
        if width % PIECE:
            x_TH = F.pad(x_TH, (0, -width % PIECE))
        x_TH = x_TH.contiguous().unflatten(-1, (-1, PIECE)).sum(-1)
        return row_sum(x_TH)
    return x_TH.contiguous().sum(-1, keepdim=True)
