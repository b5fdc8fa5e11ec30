"""Logits of P-EAGLE heads against the reference implementation's own."""

from __future__ import annotations

import torch

from tests.drafters.heads import Pair, close


def test_taps_equal_the_reference() -> None:
    pair = Pair("peagle", "target_llama")
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)


def test_every_row_gives_the_reference_logits() -> None:
    """Element (anchor a, depth d) is row a + d of the pass whose last true row is a, each anchor in a slot."""
    pair = Pair("peagle", "target_llama")
    x, io, mask = pair.tokens, pair.io, pair.head.spec.mask_token
    assert mask == 255
    features = pair.head.features(pair.taps())
    assert features is not None and len(features) == len(x) + 1  # the last is the mask rows'
    anchors, depths = io["anchor_pos"].tolist(), io["depth"].tolist()
    assert max(depths) > 1
    slots = sorted(set(anchors))
    deepest = max(depths)
    rows = [(a, i) for a in slots for i in range(a + 1 + deepest)]
    hidden, _ = pair.run(
        pair.memory(len(slots)),
        [x[i + 1] if i <= a else mask for a, i in rows],
        features[[i if i <= a else len(x) for a, i in rows]],
        [i for _, i in rows],
        [slots.index(a) for a, _ in rows],
    )
    read = [rows.index((a, a + d)) for a, d in zip(anchors, depths, strict=True)]
    close(pair.head.logits(hidden[read]), io["logits"][0])
