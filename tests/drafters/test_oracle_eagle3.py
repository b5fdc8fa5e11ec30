"""Logits of EAGLE-3 heads in the speculators format against the reference's own."""

from __future__ import annotations

import pytest
import torch

from tests.drafters.heads import Pair, close

SPECULATORS = [
    ("eagle3", "target_llama"),
    ("eagle3_2layer", "target_llama"),
    ("eagle3_fcnorm_a", "target_spec_qwen3_a"),
]


@pytest.mark.parametrize(("folder", "target"), SPECULATORS)
def test_taps_equal_the_reference(folder: str, target: str) -> None:
    pair = Pair(folder, target)
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)


@pytest.mark.parametrize(("folder", "target"), SPECULATORS)
def test_speculators_head_gives_the_reference_logits_at_every_step(folder: str, target: str) -> None:
    """Slot i holds rows 0..i from target states, then rows from fed-back states with the true tokens."""
    pair = Pair(folder, target)
    x, expected = pair.tokens, pair.io["logits_ttt"]
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
    for step in range(len(expected)):
        live = list(range(num_rows - step))
        assert feedback is not None
        if step:
            tokens = [x[i + 1 + step] for i in live]
            hidden, feedback = pair.run(paged, tokens, feedback[live], [i + step for i in live], live)
        close(pair.head.logits(hidden), expected[step, live])
