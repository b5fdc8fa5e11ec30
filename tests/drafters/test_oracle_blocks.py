"""Logits of the block methods' heads against the reference implementations' own.

Shapes: R anchors, B block size, N = R * B draft rows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.attention.base import BlockRows, Rows
from draftproof.drafters.parallel import Parallel
from tests.drafters.heads import Pair, close

SPECULATORS = {
    "dflash": "target_qwen3",
}


def blocks(pair: Pair, anchors: list[int]) -> Tensor:
    """Hidden states [N, H] of a block at each anchor, each in a slot that remembers what is before it."""
    unroll, x = pair.drafter.unroll, pair.tokens
    assert isinstance(unroll, Parallel) and unroll._block is not None
    size, mask = unroll.num_read, pair.head.spec.mask_token
    assert mask is not None
    features = pair.head.features(pair.taps())
    assert features is not None
    paged = pair.memory(len(anchors))
    rows = [(slot, i) for slot, a in enumerate(anchors) for i in range(a)]
    slots_T, positions_T = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    unroll._block.remember(features[positions_T], paged.attention(positions_T, slots_T))
    index_RB = torch.arange(len(anchors) * size).view(-1, size)
    positions_RB = torch.tensor(anchors)[:, None] + torch.arange(size)
    ends_N = (positions_RB[:, -1:] + 1).expand_as(positions_RB).reshape(-1)
    positions_N = positions_RB.reshape(-1)
    attn = paged.attention(positions_N, index_RB.reshape(-1) // size)
    attn.rows = Rows(positions_N, attn.rows.slots_T, positions_N + 1, BlockRows(ends_N, index_RB.t()))
    tokens = [t for a in anchors for t in (x[a], *[mask] * (size - 1))]
    return pair.head(torch.tensor(tokens), None, attn)[0]


@pytest.mark.parametrize(("folder", "target"), SPECULATORS.items())
def test_a_speculators_block_gives_the_reference_states_and_logits(folder: str, target: str) -> None:
    pair = Pair(folder, target, num_drafts=3)
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)
    anchors, valid = pair.io["anchors"].tolist(), pair.io["anchor_valid"].tolist()
    hidden_NH = blocks(pair, anchors)
    live = torch.tensor(valid).bool().repeat_interleave(len(hidden_NH) // len(anchors))
    assert live.sum() > 8
    close(hidden_NH[live], pair.io["hidden"][0, live])
    close(pair.head.logits(hidden_NH)[live], pair.io["backbone_logits"][0, live])


def test_an_original_block_gives_the_reference_logits() -> None:
    pair = Pair("zlab_dflash_a", "target_dflash_a", num_drafts=3)
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)
    hidden_NH = blocks(pair, pair.io["anchors"].tolist())
    close(hidden_NH, pair.io["hidden"].flatten(0, 1))
    close(pair.head.logits(hidden_NH), pair.io["logits"].flatten(0, 1))
