"""Counter-based noise: a hash of (row seed, position, token id), the same integer on every device.

Shapes: M rows, V columns. Words are unsigned 32-bit numbers in int64; a product of two may overflow int64, but its low
32 bits are correct.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
LANE_A = 0x9E3779B9  # initial words of the two independent 32-bit lanes that make a 64-bit key
LANE_B = 0x85EBCA77
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
UNIT = 2.0**-32
BELOW_ONE = 1.0 - 2.0**-24  # the largest fp32 under 1


def mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words: flipping one input bit flips half of the output bits on average."""
    word = word ^ (word >> 16)
    word = (word * MULTIPLIERS[0]) & MASK
    word = word ^ (word >> 15)
    word = (word * MULTIPLIERS[1]) & MASK
    return word ^ (word >> 16)


def absorb(start: int, *words: Tensor) -> Tensor:
    """Hash a sequence of int64 words (their low 32 bits) into one 32-bit word."""
    state = mix((words[0] & MASK) ^ start)
    for word in words[1:]:
        # The constant prevents a zero state from being a fixed point of mix.
        state = mix(((state + LANE_A) & MASK) ^ (word & MASK))
    return state


def token_bits(seeds_M: Tensor, positions_M: Tensor, ids_V: Tensor) -> Tensor:
    """The 32 random bits of each (row, token): int64 [M, V] in [0, 2**32).

    With a key of two lanes, two rows share their noise only with probability 2**-64.
    """
    words = (seeds_M, seeds_M >> 32, positions_M)
    a_M1 = absorb(LANE_A, *words).unsqueeze(-1)
    b_M1 = absorb(LANE_B, *words).unsqueeze(-1)
    return mix(mix((ids_V & MASK) ^ a_M1) ^ b_M1)


def uniform(bits: Tensor) -> Tensor:
    """32 bits -> fp32 in [2**-33, 1 - 2**-24]; near 0 the steps are 2**-32 wide."""
    return bits.to(torch.float32).add_(0.5).mul_(UNIT).clamp_(max=BELOW_ONE)


def gumbel(seeds_M: Tensor, positions_M: Tensor, ids_V: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 [M, V], between -2.82 and 22.9: the argmax of log p + noise is a draw from p.

    Large noise, which decides the winner, comes from u near 0, where the resolution is finest.
    """
    return uniform(token_bits(seeds_M, positions_M, ids_V)).neg_().log1p_().neg_().log_().neg_()


def exponential(seeds_M: Tensor, positions_M: Tensor, ids_V: Tensor) -> Tensor:
    """Standard exponential noise, fp32 [M, V], never 0: the argmin of noise / p is a draw from p."""
    return uniform(token_bits(seeds_M, positions_M, ids_V)).neg_().log1p_().neg_()


def derive(seeds_M: Tensor, domain: int, rounds_M: Tensor) -> Tensor:
    """Seeds of another, independent noise stream: int64 [M], one per (seed, domain, round)."""
    words = (seeds_M, seeds_M >> 32, torch.full_like(seeds_M, domain), rounds_M)
    return (absorb(LANE_B, *words) << 32) | absorb(LANE_A, *words)
