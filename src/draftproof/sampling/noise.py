"""Noise seeds: a row's seed, and those of independent streams for the lossy verification modes.

The hash and the Gumbel transform are in kernels/sample/noise.py, because the compiled operators share them.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

from draftproof.kernels.sample.noise import derive, exponential, gumbel, token_bits, uniform

__all__ = ["Domain", "derive", "exponential", "gumbel", "row_seed", "token_bits", "uniform"]


class Domain(IntEnum):
    """Noise streams that must share no numbers with each other, nor with the shared noise of `sample`."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def row_seed(request_seed: int | None, engine_seed: int, arrival: int, choice: int = 0) -> int:
    """The int64 seed of one choice of one request.

    If `request_seed` is given, the arrival number is ignored, so the request gives the same tokens at any time. Choice
    1 of seed s is not choice 0 of seed s + 1: all parts are hashed together.
    """
    if request_seed is None:
        source = f"engine {engine_seed} arrival {arrival} choice {choice}"
    else:
        source = f"request {request_seed} choice {choice}"
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
