"""What a slot asks of its logits as a list of int32, and what stands in place of a token.

Where bias, words and mask begin (0: no mask), number of stop ids, the stop ids; number of biases, an id and the bits of
a fp32 each; number of bad words, length and ids each; the mask, a bit an id. Where a grammar decides what may come next
the host gives each row a mask of its own beside the list, read where the slot is `MASKED`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence

NO_NUMBER = -1  # in place of a token: the target's logits held NaN or inf
NONE_LEFT = -2  # or they were fine, and what the request asks for ruled every token out
HEADER = 4


def pack_list(
    stop_ids: Sequence[int],
    bias: Mapping[int, float],
    words: Sequence[Sequence[int]],
    allowed: Collection[int] | None,
    vocab_size: int,
) -> list[int]:
    """What a slot's list says."""
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
