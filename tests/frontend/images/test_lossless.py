"""Answers about images depend on neither the batch nor the drafter: each family, each drafter, chunks, preemption."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from tests.frontend.images.cases import (
    FAMILIES,
    PARAMS,
    PROMPTS,
    SETTINGS,
    A,
    drafters_for,
    prompt,
    text,
)
from tests.slow import some

HEADS = ["eagle3", "eagle3, tokens", "eagle3, one axis", "eagle1", "mtp", "dflash"]
NAMES = [None, "ngram", "suffix", "text model", *HEADS, "small", "small, tokens", "chain"]


def check(folder: Path, plain: list[RequestOutput], config: Mapping[str, Any] | None, settings: str) -> None:
    """Under some settings output is what it was without a drafter in a batch of one."""
    drafting = {} if config is None else {"speculative_config": {**config, "num_speculative_tokens": 3}}
    with LLM(str(folder), dtype="float32", **drafting, **SETTINGS[settings]) as llm:
        for _ in range(2):  # the second time, what was cached is found
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert not compare(plain, outputs)
        assert llm.stats.num_cached_tokens > 0 or settings == "preempted"
        assert (llm.stats.num_preemptions > 0) == (settings == "preempted")
        assert llm.stats.num_drafter_faults == 0
        if config is not None and settings != "chunks of 1":
            assert llm.stats.speculation.num_draft_tokens > 0
        assert llm.requests.inputs._store.num_encoded == 3, "each picture is encoded once"
        own = llm.engine.runner.items._own.values()
        assert all(store.num_encoded == 3 for store in own), "by a drafter that has an encoder, too"


SHORT = [settings for settings in SETTINGS if settings != "preempted, long"]


# Every drafter where chunks end within images; preempted, those that keep something of a request; every setting for a
# few of different kinds.
CELLS = [
    *itertools.product(["chunks of 7"], NAMES),
    *itertools.product(
        ["preempted"], [None, "suffix", "eagle3", "eagle1", "mtp", "dflash", "small", "chain"]
    ),
    *itertools.product(["one batch", "chunks of 1", "chunks of 64"], [None, "eagle3", "small"]),
    ("small blocks", None),
]


@pytest.mark.parametrize(("settings", "name"), some(itertools.product(SHORT, NAMES), CELLS))
def test_output_depends_on_neither_batch_nor_drafter(
    made: tuple[Any, Path],
    plain: list[RequestOutput],
    drafters: dict[str, dict[str, Any]],
    settings: str,
    name: str | None,
) -> None:
    check(made[1], plain, None if name is None else drafters[name], settings)


@pytest.fixture(scope="module")
def deep(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[RequestOutput], dict[str, dict[str, Any]]]:
    """(the folder of the family with deepstack, its plain output, drafters for it)."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    drafters = drafters_for("qwen3_vl", folder)
    with LLM(str(folder / "target"), dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        return folder / "target", llm.generate(PROMPTS, PARAMS, use_tqdm=False), drafters


# What is added after layers goes through chunks, through what was cached, and to drafters that read such states.
READERS = ["eagle3", "eagle3, tokens", "eagle1", "mtp", "dflash", "small", "chain"]
DEEP_CELLS = [
    *itertools.product(["small blocks"], [None, *READERS]),
    *itertools.product(["chunks of 1", "chunks of 7", "preempted"], ["eagle3", "small"]),
]


@pytest.mark.parametrize(("settings", "name"), some(itertools.product(SHORT, NAMES), DEEP_CELLS))
def test_output_with_deepstack_depends_on_neither_batch_nor_drafter(
    deep: tuple[Path, list[RequestOutput], dict[str, dict[str, Any]]], settings: str, name: str | None
) -> None:
    folder, plain, drafters = deep
    check(folder, plain, None if name is None else drafters[name], settings)


def test_more_than_64_requests_draft_over_images_at_once(
    deep: tuple[Path, list[RequestOutput], dict[str, dict[str, Any]]],
) -> None:
    """Where others' EAGLE-3 over Qwen3-VL crashed."""
    folder, _, drafters = deep
    prompts = [prompt([A], text(1 + i % 5, i), text(2, 100 + i)) for i in range(70)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    with LLM(str(folder), dtype="float32", max_num_seqs=8, enable_prefix_caching=False) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    config = {**drafters["eagle3"], "num_speculative_tokens": 3, "policy": "fixed"}
    rows = {"max_num_seqs": 72, "max_num_batched_tokens": 4096}
    with LLM(str(folder), dtype="float32", speculative_config=config, **rows) as llm:
        run, numbers = llm.engine.runner.run, list[int]()
        llm.engine.runner.run = lambda step: (numbers.append(len(step.scheduled)), run(step))[1]  # type: ignore[method-assign]
        assert not compare(plain, llm.generate(prompts, params, use_tqdm=False))
        assert max(numbers) == 70 and llm.stats.speculation.num_draft_tokens > 70
        assert llm.stats.num_drafter_faults == 0


def test_choices_share_an_image(made: tuple[Any, Path]) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=2, max_tokens=8, logprobs=1)
    found = []
    apart: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 1}
    for settings in (apart, {"max_num_batched_tokens": 16}):
        with LLM(str(made[1]), dtype="float32", block_size=4, **settings) as llm:
            found.append(llm.generate(PROMPTS[:2], params, use_tqdm=False))
            assert llm.requests.inputs._store.num_encoded == 2
    assert not compare(*found) and len({tuple(c.token_ids) for c in found[0][0].outputs}) == 3


# By the setting, a drafter that says something there; families above have every one of them.
WHOLE = ("gemma3", "gemma4")  # whose images' rows see each other


FAMILY_CELLS = [
    *itertools.product(WHOLE, ["one batch"], ["ngram", "itself"]),
    *itertools.product(WHOLE, ["chunks of 1"], ["eagle1"]),
    *itertools.product(WHOLE, ["chunks of 7"], ["eagle3, one axis", "itself"]),
    *itertools.product(WHOLE, ["chunks of 64"], ["dflash"]),
    *[("gemma3", "preempted", "itself"), ("gemma4", "preempted, long", "itself")],
    *itertools.product(["qwen3_vl_moe", "llava", "mistral3"], ["chunks of 7"], ["eagle3, one axis"]),
    *itertools.product(["pixtral", "gemma4, causal"], ["chunks of 7"], ["dflash"]),
]


FAMILY_SETTINGS = SETTINGS.keys() - {"preempted", "preempted, long"}


FAMILY_DRAFTERS = ["ngram", "suffix", "text model", "eagle3, one axis", "eagle1", "dflash", "itself"]


@pytest.fixture(scope="module")
def expected(each: tuple[Any, Path]) -> list[RequestOutput]:
    """Plain decoding of one prompt after the other, of each family."""
    with LLM(str(each[1]), dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not any(o.error for o in outputs)
        return outputs


@pytest.mark.parametrize(
    ("each", "settings", "name"),
    some(
        sorted({*itertools.product(FAMILIES, FAMILY_SETTINGS, FAMILY_DRAFTERS), *FAMILY_CELLS}),
        sorted(FAMILY_CELLS),
    ),
    indirect=["each"],
)
def test_output_of_each_family_depends_on_neither_batch_nor_drafter(
    each: tuple[Any, Path],
    expected: list[RequestOutput],
    drafters: dict[str, dict[str, Any]],
    settings: str,
    name: str,
) -> None:
    drafter = {"model": str(each[1])} if name == "itself" else drafters[name]
    config = {**drafter, "num_speculative_tokens": 3}
    with LLM(str(each[1]), dtype="float32", speculative_config=config, **SETTINGS[settings]) as llm:
        for _ in range(2):
            assert not compare(expected, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        for _ in range(2):  # few pages are kept where a window is all that some layers see
            assert not compare(expected[4:], llm.generate(PROMPTS[4:], PARAMS[4:], use_tqdm=False))
        is_preempted = settings.startswith("preempted")
        assert llm.stats.num_cached_tokens > 0 or is_preempted
        assert not is_preempted or llm.stats.num_preemptions > 0
        assert llm.stats.speculation.num_draft_tokens > 0 or settings == "chunks of 1"
        assert llm.stats.num_drafter_faults == 0 and llm.requests.inputs._store.num_encoded == 3
