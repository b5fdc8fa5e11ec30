"""Teacher-forced passes of a head over the text of its pair, as the reference implementations compute them.

Shapes: T rows of the text, N draft rows, B block size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.attention.base import BlockRows, Rows
from draftproof.drafters.parallel import Parallel
from tests.drafters.heads import Pair


def chain_logits(pair: Pair, num_steps: int) -> list[Tensor]:
    """Logits of each step of an EAGLE-3 head, at the rows whose drafted token is in the text.

    Slot i holds rows 0..i from target states, then rows from fed-back states.
    """
    x = pair.tokens
    num_rows = len(x) - 1
    features = pair.head.features(pair.taps())
    assert features is not None
    paged = pair.memory(num_rows)
    rows = [(i, j) for i in range(num_rows) for j in range(i + 1)]
    hidden, feedback = pair.run(
        paged,
        [x[j + 1] for _, j in rows],
        features[[j for _, j in rows]],
        [j for _, j in rows],
        [i for i, _ in rows],
    )
    last = [n for n, (i, j) in enumerate(rows) if i == j]
    hidden, feedback = hidden[last], feedback[last] if feedback is not None else None
    found = []
    for step in range(num_steps):
        live = list(range(num_rows - step))
        assert feedback is not None
        if step:
            tokens = [x[i + 1 + step] for i in live]
            hidden, feedback = pair.run(paged, tokens, feedback[live], [i + step for i in live], live)
        found.append(pair.head.logits(hidden))
    return found


def mask_logits(pair: Pair, anchors: Sequence[int], depths: Sequence[int]) -> Tensor:
    """Logits of a P-EAGLE head's elements: (anchor a, depth d) is row a + d of the pass whose last true row is a, each
    anchor in a slot."""
    x, mask = pair.tokens, pair.head.layout.mask_token
    assert mask is not None
    features = pair.head.features(pair.taps())
    assert features is not None and len(features) == len(x) + 1  # the last one is for mask rows
    slots = sorted(set(anchors))
    rows = [(a, i) for a in slots for i in range(a + 1 + max(depths))]
    hidden, _ = pair.run(
        pair.memory(len(slots)),
        [x[i + 1] if i <= a else mask for a, i in rows],
        features[[i if i <= a else len(x) for a, i in rows]],
        [i for _, i in rows],
        [slots.index(a) for a, _ in rows],
    )
    read = [rows.index((a, a + d)) for a, d in zip(anchors, depths, strict=True)]
    return pair.head.logits(hidden[read])


def module_steps(
    pair: Pair, state_TH: Tensor, num_steps: int, num_rows: int, shift: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """(hidden, feedback) of each step of an MTP head: a pass over all rows with the states of the step before.

    The reference trains like this; serving keeps the first step's keys and values instead.
    """
    rows, done = list(range(num_rows)), []
    for step in range(num_steps):
        tokens = [pair.tokens[i + step + shift] for i in rows]
        hidden, feedback = pair.run(pair.memory(), tokens, state_TH[:num_rows], rows, [0] * num_rows)
        assert feedback is not None
        done.append((hidden, feedback))
        state_TH = feedback
    return done


def block_states(pair: Pair, anchors: list[int]) -> Tensor:
    """Hidden states [N, H] of a block at each anchor, each in a slot whose cache holds the text before it."""
    unroll, x = pair.drafter.unroll, pair.tokens
    assert isinstance(unroll, Parallel) and unroll._block is not None
    size, mask = unroll.num_read, pair.head.layout.mask_token
    assert mask is not None
    features = pair.head.features(pair.taps())
    assert features is not None
    paged = pair.memory(len(anchors))
    rows = [(slot, i) for slot, a in enumerate(anchors) for i in range(a)]
    slots_T, positions_T = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    unroll._block.remember(features[positions_T], paged.attention(positions_T, slots_T))
    index_RB = torch.arange(len(anchors) * size).view(-1, size)
    positions_RB = torch.tensor(anchors)[:, None] + torch.arange(size)
    context_lens_N = (positions_RB[:, -1:] + 1).expand_as(positions_RB).reshape(-1)
    positions_N = positions_RB.reshape(-1)
    attn = paged.attention(positions_N, index_RB.reshape(-1) // size)
    attn.rows = Rows(positions_N, attn.rows.slots_T, positions_N + 1, BlockRows(context_lens_N, index_RB.t()))
    tokens = [t for a in anchors for t in (x[a], *[mask] * (size - 1))]
    return pair.head(torch.tensor(tokens), None, attn)[0]
