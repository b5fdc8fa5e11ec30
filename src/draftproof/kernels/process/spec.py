"""The format of a slot's list of constraints (int32), and the values that replace a token where none is possible.

The list: offsets of biases, words and mask (0: no mask), number of stop ids, the stop ids; number of biases, for each
an id and the bits of an fp32; number of bad words, for each its length and ids; the mask, one bit per id. With a
grammar, the host also sets a mask for each row, outside the list, which is read if the slot is `MASKED`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

NO_NUMBER = -1  # replaces a token: the target's logits hold NaN or inf
NONE_LEFT = -2  # replaces a token: the request's constraints rule every token out
HEADER = 4


def pack_list(
    stop_ids: Sequence[int],
    bias: Mapping[int, float],
    words: Sequence[Sequence[int]],
    allowed: Collection[int] | None,
    vocab_size: int,
) -> list[int]:
    """A slot's constraints as a list."""
    out = [0, 0, 0, len(stop_ids), *stop_ids]
    out[0] = len(out)
    out.append(len(bias))
    for token, value in bias.items():
        out += (token, *struct.unpack("<i", struct.pack("<f", value)))
    out[1] = len(out)
    out.append(len(words))
    for word in words:
        out += (len(word), *word)
    if allowed is not None:
        out[2] = len(out)
        mask = [0] * -(-vocab_size // 32)
        for token in allowed:
            mask[token // 32] |= 1 << token % 32
        out += (bits - (1 << 32) if bits >> 31 else bits for bits in mask)
    return out
