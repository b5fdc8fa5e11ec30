"""Engines with mostly sliding-window layers hold fewer blocks and give the same bits, whatever requests go through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from draftproof.engine.loading import build

RAW: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 40,
    "sliding_window_pattern": 3, "query_pre_attn_scalar": 16, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
BLOCK = 16
TEXT = [(i * 37 + i * i // 7 + 5) % 199 for i in range(1500)]
PROMPTS: Any = [TEXT[:700], TEXT[300:420], TEXT[:600] + TEXT[900:1000], [7, 8, 9]]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return tmp_path


def engine(folder: Path, **changes: Any) -> LLM:
    settings: dict[str, Any] = {
        "load_format": "dummy", "dtype": "float32", "max_model_len": 768, "block_size": BLOCK,
        "max_num_batched_tokens": 128, "max_num_seqs": 4,
    }  # fmt: skip
    return LLM(str(folder), **{**settings, **changes})


def without_windows(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> LLM:
    """An engine that never releases blocks of windowed layers."""
    with monkeypatch.context() as patch:
        patch.setattr(build.memory, "window_groups", lambda *given: ())
        return engine(folder, **changes)


def params(num_prompts: int = len(PROMPTS)) -> list[SamplingParams]:
    sampled = (0.0, 0.9, 0.0, 0.6)
    return [
        SamplingParams(temperature=sampled[i % 4], seed=i, max_tokens=40, logprobs=2)
        for i in range(num_prompts)
    ]


def most_held(llm: LLM, prompts: Any, given: list[SamplingParams]) -> tuple[Any, int, int]:
    """(outputs, peak number of blocks held by full-attention layers, by windowed layers)."""
    scheduler, most = llm.engine.scheduler, [0, 0]
    schedule = scheduler.schedule

    def watched() -> Any:
        output = schedule()
        for i, group in enumerate((scheduler.pages, *scheduler.windows)):
            most[i] = max(most[i], group.num_blocks - 1 - group.num_free)
        return output

    scheduler.schedule = watched  # type: ignore[method-assign]
    return llm.generate(prompts, given, use_tqdm=False), *most


def test_a_long_prompt_holds_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(folder, max_model_len=1024)
    found, full, windowed = most_held(llm, [TEXT[:900]], params(1))
    assert full == -(-(900 + 40) // BLOCK)
    assert windowed <= (40 + 2 * 128) // BLOCK + 3, "the window, a chunk of the prompt, and the edges"
    plain = without_windows(monkeypatch, folder, max_model_len=1024)
    assert not plain.engine.scheduler.windows
    assert not compare(plain.generate([TEXT[:900]], params(1), use_tqdm=False), found)
    assert llm.memory.kv < plain.memory.kv


@pytest.mark.parametrize("config", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_blocks": 56}, {"max_num_batched_tokens": 33}, {"enable_prefix_caching": False}],
    ids=["plenty", "preempting", "small chunks", "no sharing"],
)
def test_outputs_have_the_same_bits(
    changes: dict[str, Any], config: dict[str, Any] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = without_windows(monkeypatch, folder).generate(PROMPTS, params(), use_tqdm=False)
    llm = engine(folder, speculative_config=config, **changes)
    scheduler = llm.engine.scheduler
    assert [window.window for window in scheduler.windows] == [40]
    for time in range(2):
        found = llm.generate(PROMPTS, params(), use_tqdm=False)
        assert not compare(plain, found)
        if time == 1 and changes.get("enable_prefix_caching", True):
            assert sum(output.metrics.num_cached_tokens for output in found) > 500
    if "num_kv_blocks" in changes:
        assert llm.stats.num_preemptions > 0
    llm.reset_prefix_cache()
    found = llm.generate(PROMPTS[:1], params(1), use_tqdm=False)
    assert not compare(plain[:1], found) and found[0].metrics.num_cached_tokens == 0
    for group in (scheduler.pages, *scheduler.windows):
        group.check_integrity()
        assert group.num_free == group.num_blocks - 1


def test_a_prefix_whose_window_is_gone_is_computed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full-attention layers still hold the first 600 tokens; other texts took the windowed layers' blocks at 300."""
    plain = without_windows(monkeypatch, folder)
    llm = engine(folder)
    pages, (window,) = llm.engine.scheduler.pages, llm.engine.scheduler.windows
    one = SamplingParams(temperature=0, max_tokens=8, logprobs=1)

    def check(prompt: list[int]) -> int:
        (expected,), (found,) = (x.generate([prompt], one, use_tqdm=False) for x in (plain, llm))
        assert not compare([expected], [found])
        return found.metrics.num_cached_tokens

    branch = TEXT[:304] + TEXT[1000:1020]
    assert check(TEXT[:600]) == 0
    assert check(TEXT[:304] + TEXT[1100:1120]) == 304, "the window at 304 is still there"
    for first in (1, 2):
        check([first, *TEXT[first : first + 600]])
    known = pages.match(branch)
    assert len(known.blocks) == 19 and window.usable(known.nodes) == 0
    pages.release(known.blocks)
    assert check(branch) == 0
    assert check(branch) == 320, "it was computed, and is found again"
