"""Prompts with images on a GPU: whatever is drafted and however prompts are batched, in graphs and out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from tests.frontend.test_images import FAMILIES, PARAMS, PROMPTS
from tests.made import vision
from tests.made.vision import MROPE

DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "eagle3": {"rope": MROPE},
    "text model": {},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_depends_on_neither_batch_nor_drafter(
    cuda: torch.device, tmp_path: Path, family: str, dtype: str
) -> None:
    FAMILIES[family](tmp_path / "model")
    base: dict[str, Any] = {"dtype": dtype, "device": "cuda", "num_kv_blocks": 400, "max_model_len": 512}
    with LLM(str(tmp_path / "model"), max_num_seqs=1, enable_prefix_caching=False, **base) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not any(o.error for o in expected)
    head = vision.eagle3(tmp_path / "eagle3", MROPE)
    models = {"eagle3": {"model": head}, "text model": {"model": vision.text_draft(tmp_path / "text")}}
    for name, given in DRAFTERS.items():
        drafting = models.get(name, given)
        config = {} if drafting is None else {"speculative_config": {**drafting, "num_speculative_tokens": 3}}
        for settings in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}, {"enforce_eager": True}):
            with LLM(str(tmp_path / "model"), **base, **config, **settings) as llm:
                for _ in range(2):
                    assert not compare(expected, llm.generate(PROMPTS, PARAMS, use_tqdm=False)), (
                        name,
                        settings,
                    )
                for _ in range(2):  # few pages are kept where a window is all that some layers see
                    assert not compare(expected[4:], llm.generate(PROMPTS[4:], PARAMS[4:], use_tqdm=False))
                assert llm.stats.num_cached_tokens > 0 and llm.stats.num_drafter_faults == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_in_fp32_is_that_of_a_cpu(cuda: torch.device, tmp_path: Path, family: str) -> None:
    """Random models choose between tokens that are far apart."""
    FAMILIES[family](tmp_path / "model")
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(tmp_path / "model"), dtype="float32", device=device, max_model_len=512) as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert found[0] == found[1]
