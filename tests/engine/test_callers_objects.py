"""Objects that callers pass in are copied: changing them later changes no output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, SpeculativeConfig
from draftproof.config import EngineConfig
from tests.conformance.cases import REPEATS
from tests.slow import few

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "block_size": 4}
OTHER = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
BIASED = 279


@pytest.fixture(scope="module")
def tight() -> LLM:
    """An engine with so few pages that the second of two requests is preempted, and readmitted from its parameters."""
    return LLM(**SETTINGS, num_kv_blocks=33, enable_prefix_caching=False)


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "logit_bias": ({"logit_bias": {BIASED: -1.0}}, lambda p: p.logit_bias.update({BIASED: 100.0})),
    "stop_token_ids": ({"stop_token_ids": [3]}, lambda p: p.stop_token_ids.extend(range(4000))),
    "allowed_token_ids": (
        {"allowed_token_ids": list(range(500))},
        lambda p: p.allowed_token_ids.__setitem__(slice(None), [7]),
    ),
    "stop": ({"stop": ["zzzz"]}, lambda p: p.stop.append(" ")),
    "bad_words": ({"bad_words": ["zzzz"]}, lambda p: p.bad_words.extend(["1", "2", "3", " "])),
}


@pytest.mark.parametrize("field", CHANGES)
@pytest.mark.parametrize("when", few(["before the first delta", "after it"], "after it"))
def test_parameters_that_change_while_a_stream_runs(tight: LLM, field: str, when: str) -> None:
    values, change = CHANGES[field]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, **values)
    ids = tight.tokenizer.encode(REPEATS)
    expected = tight.generate([ids, ids], [OTHER, params], use_tqdm=False)
    assert expected[1].metrics.num_preemptions
    wanted = expected[1].outputs[0].token_ids
    prompts, listed = [list(ids), list(ids)], [OTHER, params]
    stream, tokens = tight.stream(prompts, listed), dict[str, list[int]]()
    first = None if when.startswith("before") else next(stream)
    change(params)
    listed.clear()
    prompts[1][:] = [1, 2, 3]
    for delta in [first, *stream] if first else stream:
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert list(tokens.values()) == [expected[0].outputs[0].token_ids, wanted]


def test_a_callers_lists_are_not_those_of_the_parameters() -> None:
    given = {"stop": ["a"], "bad_words": ["b"], "stop_token_ids": [1], "allowed_token_ids": [2]}
    params = SamplingParams(**given, logit_bias=(bias := {3: 1.0}))
    for value in given.values():
        value.append(None)
    bias[4] = 2.0
    assert (params.stop, params.bad_words) == (["a"], ["b"])
    assert (params.stop_token_ids, params.allowed_token_ids) == ([1], [2])
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_speculative_config_is_copied_at_every_depth(as_dict: bool) -> None:
    raw: dict[str, Any] = {
        "method": "chain",
        "drafters": [{"method": "x", "rates": [1, 2]}],
        "more": {"a": [3]},
    }
    given = (
        raw if as_dict else SpeculativeConfig(drafters=tuple(raw["drafters"]), options={"more": raw["more"]})
    )
    config = EngineConfig.from_kwargs(speculative_config=given).speculative_config
    assert config is not None
    raw["drafters"][0]["rates"].append(9)
    raw["more"]["a"].clear()
    assert config.drafters[0]["rates"] == [1, 2] and config.options["more"] == {"a": [3]}


def test_overrides_are_copied_at_every_depth() -> None:
    given: dict[str, Any] = {"rope_parameters": {"rope_theta": 5e5}, "layer_types": ["full_attention"]}
    configs = [EngineConfig(hf_overrides=given), SpeculativeConfig(hf_overrides=given)]
    given["rope_parameters"]["rope_theta"] = 7
    given["layer_types"].clear()
    for config in configs:
        assert config.hf_overrides == {
            "rope_parameters": {"rope_theta": 5e5},
            "layer_types": ["full_attention"],
        }


def test_what_is_handed_out_is_not_what_is_kept(tight: LLM) -> None:
    stream, tokens = tight.stream(REPEATS, OTHER), list[int]()
    for delta in stream:
        tokens += delta.token_ids
        delta.token_ids.clear()
    assert tokens == tight.generate(REPEATS, OTHER, use_tqdm=False)[0].outputs[0].token_ids
