"""Logits of EAGLE-3 heads in the speculators format against the reference's own."""

from __future__ import annotations

import pytest
import torch

from tests.drafters.forced import chain_logits
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
    pair = Pair(folder, target)
    expected = pair.io["logits_ttt"]
    found = chain_logits(pair, len(expected))
    for step, logits in enumerate(found):
        close(logits, expected[step, : len(logits)])
