"""Prompts with images on a GPU: with all drafters and any batches, in graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from tests.frontend.images.cases import FAMILIES, PARAMS, PROMPTS, drafters_for
from tests.frontend.images.test_videos import MODELS
from tests.frontend.images.test_videos import PROMPTS as VIDEOS
from tests.made import vision

DRAFTERS = [None, "ngram", "eagle3", "text model"]
# drafters for families with several rotary axes
MORE = [*DRAFTERS, "eagle3, tokens", "eagle3, one axis", "eagle1", "mtp", "dflash", "small", "chain"]


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
    models = drafters_for(family, tmp_path / "drafters")
    for name in MORE if family in MODELS else DRAFTERS:
        config = {} if name is None else {"speculative_config": {**models[name], "num_speculative_tokens": 3}}
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
    """A random model's best tokens differ clearly, so rounding does not change the choice."""
    FAMILIES[family](tmp_path / "model")
    found = []
    for device in ("cpu", "cuda"):
        with LLM(
            str(tmp_path / "model"), dtype="float32", device=device, max_model_len=512, num_kv_blocks=400
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", MODELS)
def test_videos_depend_on_neither_batch_nor_drafter(
    cuda: torch.device, tmp_path: Path, family: str, dtype: str
) -> None:
    MODELS[family](tmp_path / "model")
    vision.tokenizer(tmp_path / "model")
    base: dict[str, Any] = {"dtype": dtype, "device": "cuda", "num_kv_blocks": 400, "max_model_len": 512}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    with LLM(str(tmp_path / "model"), max_num_seqs=1, enable_prefix_caching=False, **base) as llm:
        expected = llm.generate(VIDEOS, params, use_tqdm=False)
        assert not any(o.error for o in expected)
    for drafting in ({"method": "ngram", "prompt_lookup_min": 1}, {"model": str(tmp_path / "model")}):
        config = {**drafting, "num_speculative_tokens": 3}
        for settings in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}):
            with LLM(str(tmp_path / "model"), speculative_config=config, **base, **settings) as llm:
                for _ in range(2):
                    assert not compare(expected, llm.generate(VIDEOS, params, use_tqdm=False)), drafting
                assert llm.stats.num_drafter_faults == 0


@pytest.mark.parametrize("family", MODELS)
def test_a_target_that_drafts_for_itself_is_nearly_always_right(
    cuda: torch.device, tmp_path: Path, family: str
) -> None:
    """Nearly, since a drafter sums in another order."""
    MODELS[family](tmp_path / "model")
    config = {"model": str(tmp_path / "model"), "num_speculative_tokens": 3}
    with LLM(
        str(tmp_path / "model"), dtype="float32", device="cuda", max_model_len=256, speculative_config=config
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate(PROMPTS, params, use_tqdm=False)
        speculation = llm.stats.speculation
        assert speculation.num_accepted_tokens > 0.95 * speculation.num_draft_tokens > 30
