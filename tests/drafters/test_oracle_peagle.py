"""Logits of P-EAGLE heads against the reference implementation's own."""

from __future__ import annotations

import pytest
import torch

from draftproof import LLM
from tests.drafters.forced import mask_logits
from tests.drafters.heads import ORACLE, Pair, close


def test_taps_equal_the_reference() -> None:
    pair = Pair("peagle", "target_llama")
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)


def test_every_row_gives_the_reference_logits() -> None:
    pair = Pair("peagle", "target_llama")
    io = pair.io
    assert pair.head.layout.mask_token == 255
    anchors, depths = io["anchor_pos"].tolist(), io["depth"].tolist()
    assert max(depths) > 1
    close(mask_logits(pair, anchors, depths), io["logits"][0])


@pytest.mark.parametrize("budget", [2048, 3])
def test_the_engine_drafts_what_the_reference_drafts(budget: int) -> None:
    """A pass's drafts do not read each other, so the reference's rows of one anchor are one proposal."""
    pair = Pair("peagle", "target_llama")
    llm = LLM(
        str(ORACLE / "target_llama"),
        speculative_config={"model": str(ORACLE / "peagle"), "num_speculative_tokens": 5},
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=budget,
    )
    x, io, num_checked = pair.tokens, pair.io, 0
    best = io["logits"][0].argmax(-1)
    ids = (best + io["d2t"][best]).tolist()
    elements = list(zip(io["anchor_pos"].tolist(), io["depth"].tolist(), ids, strict=True))
    for anchor in {a for a, d, _ in elements if d == 1 and a + 1 < len(x)}:
        drafts = llm.draft(x[: anchor + 1], 5, next_token=x[anchor + 1])
        for a, depth, token in elements:
            if a == anchor and depth < 5:
                assert drafts[depth] == token
                num_checked += 1
    assert num_checked > 20
