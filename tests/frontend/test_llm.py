"""`LLM`: the user's interface, and its errors for bad input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, Delta, EngineConfig, SamplingParams, assets
from draftproof.config import VLLM_SETTINGS
from draftproof.models.config import read_config
from tests.conformance.cases import REPEATS
from tests.engine.poison import poison

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=256)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    config = {"model": str(assets.path("tiny-eagle3")), "policy": "fixed"}
    return LLM(dtype="float32", max_model_len=256, speculative_config=config)


def generate(llm: LLM, prompts: Any, params: Any = GREEDY) -> Any:
    return llm.generate(prompts, params, use_tqdm=False)


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    dicts = [{"prompt": PROMPT}, {"prompt_token_ids": ids}, {"prompt_token_ids": torch.tensor(ids)}]
    arrays = [torch.tensor(ids), [torch.tensor(ids)], torch.tensor([ids]), list(torch.tensor(ids))]
    outputs = [generate(llm, p)[0] for p in (PROMPT, ids, [ids], [PROMPT], *dicts, *arrays)]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert all(o.prompt_token_ids == ids and o.finished for o in outputs)
    assert llm.get_tokenizer() is llm.tokenizer
    assert outputs[0].prompt == PROMPT and outputs[1].prompt is None


def test_outputs_come_in_the_order_of_the_prompts_with_one_parameter_each(llm: LLM) -> None:
    lengths = [5, 1, 9, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = generate(llm, [PROMPT] * 4, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_defaults_are_vllms(llm: LLM) -> None:
    p = llm.default_sampling_params()
    assert (p.temperature, p.max_tokens, p.top_p, p.top_k, p.n) == (1.0, 16, 1.0, 0, 1)
    assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_choices_of_one_request_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=12)
    first, second = generate(llm, PROMPT, params)[0], generate(llm, PROMPT, params)[0]
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]


def test_unseeded_requests_differ_and_the_engines_seed_repeats_them() -> None:
    params = SamplingParams(temperature=1, max_tokens=12)
    runs = []
    for seed in (0, 0, 1):
        outputs = generate(LLM(dtype="float32", seed=seed), [PROMPT] * 2, params)
        runs.append([o.outputs[0].token_ids for o in outputs])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = generate(llm, PROMPT, params)[0]
    choice = output.outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 3
        assert sum(math.exp(e.logprob) for e in entry.values()) <= 1 + 1e-5
        assert entry[token].decoded_token == llm.tokenizer.decode([token])
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token, scores in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert scores is not None and token in scores and 2 <= len(scores) <= 3


def test_prompt_logprobs_are_right_after_a_prefix_hit(llm: LLM) -> None:
    prompt = PROMPT * 4
    plain = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    first = generate(llm, prompt, plain)[0]
    assert generate(llm, prompt)[0].metrics.num_cached_tokens > 0
    assert generate(llm, prompt, plain)[0].prompt_logprobs == first.prompt_logprobs


def test_a_prompt_that_was_only_scored_is_found_again(llm: LLM) -> None:
    """The request ends with the pass that computed the prompt."""
    prompt, params = "Once. " + PROMPT * 5, SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    first, again = (generate(llm, prompt, params)[0] for _ in range(2))
    assert again.metrics.num_cached_tokens > first.metrics.num_cached_tokens
    assert again.outputs == first.outputs


def test_a_stream_gives_the_pieces_of_what_generate_gives(drafting: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    whole = generate(drafting, PROMPT, params)[0].outputs[0]
    deltas = list(drafting.stream(PROMPT, params))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas][-1] == whole.finish_reason
    assert all(len(d.accepted) == len(d.token_ids) for d in deltas)
    assert any(any(d.accepted) for d in deltas) and not any(deltas[0].accepted)


def test_a_forgotten_prefix_is_computed_again_to_the_same_bits(llm: LLM) -> None:
    prompt, params = PROMPT * 8, SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    first = generate(llm, prompt, params)[0]
    assert generate(llm, prompt, params)[0].metrics.num_cached_tokens > 0
    stream = llm.stream(PROMPT, params)
    tokens = list(next(stream).token_ids)
    assert llm.reset_prefix_cache()
    tokens += [t for delta in stream for t in delta.token_ids]
    assert tokens == generate(llm, PROMPT, params)[0].outputs[0].token_ids
    again = generate(llm, prompt, params)[0]
    assert not again.metrics.num_cached_tokens and again.outputs == first.outputs
    llm.engine.scheduler.pages.check_integrity()


def test_a_stream_gives_the_logprobs_that_generate_gives(drafting: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    whole = generate(drafting, PROMPT, params)[0].outputs[0]
    deltas = list(drafting.stream(PROMPT, params))
    assert all(d.logprobs is not None and len(d.logprobs) == len(d.token_ids) for d in deltas)
    assert whole.logprobs and [entry for d in deltas for entry in d.logprobs or ()] == whole.logprobs
    assert any(len(d.token_ids) > 1 for d in deltas), "drafts give several at once"
    assert all(d.logprobs is None for d in drafting.stream(PROMPT, GREEDY))


def test_a_stream_says_why_a_request_failed_in_its_last_delta(
    drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, num_prompt = drafting.engine.runner.run, len(drafting.tokenizer.encode(PROMPT))
    refuse = poison(num_prompt, at=num_prompt + 6)
    monkeypatch.setattr(drafting.engine.runner, "run", lambda step: (refuse(step), run(step))[1])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    seen: dict[str, list[Delta]] = {}
    for delta in drafting.stream([PROMPT, "import os"], params):
        seen.setdefault(delta.request_id, []).append(delta)
    (*before, last), others = seen.values()
    assert last.finish_reason == "error" and "ZeroDivisionError: poisonous" in (last.error or "")
    assert before and all(d.error is None and d.finish_reason is None for d in before)
    assert all(d.error is None for d in others) and others[-1].finish_reason == "length"


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)):
        break
    scheduler = llm.engine.scheduler
    assert not scheduler.running and not llm.requests.running
    scheduler.pages.check_integrity()


def test_an_aborted_request_ends_and_the_others_go_on(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    seen: dict[str, list[Any]] = {}
    for delta in llm.stream([PROMPT, "import os"], params):
        seen.setdefault(delta.request_id, []).append(delta)
        first = next(iter(seen))
        if len(seen[first]) == 3 and delta.request_id == first:
            llm.abort(first)
    reasons = [deltas[-1].finish_reason for deltas in seen.values()]
    assert reasons == ["abort", "length"]
    llm.abort("no such request")


def test_two_streams_and_generate_may_be_mixed(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = generate(llm, [PROMPT, "import os"], params)
    first, second = llm.stream(PROMPT, params), llm.stream("import os", params)
    texts = [next(first).text, next(second).text]
    assert generate(llm, PROMPT, params)[0].outputs[0].text == expected[0].outputs[0].text
    texts[0] += "".join(d.text for d in first)
    texts[1] += "".join(d.text for d in second)
    assert texts == [o.outputs[0].text for o in expected]


def test_chat_applies_the_template(llm: LLM) -> None:
    message = {"role": "user", "content": "What is 2 + 2?"}
    outputs = llm.chat([message], GREEDY, use_tqdm=False)
    assert llm.tokenizer.decode(outputs[0].prompt_token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(llm.chat([[message], [message]], GREEDY, use_tqdm=False)) == 2
    with pytest.raises(ValueError, match=r"messages\[0\]='h': must be a mapping"):
        llm.chat("hi", GREEDY, use_tqdm=False)  # type: ignore[arg-type]


def test_draft_says_what_would_be_proposed(drafting: LLM) -> None:
    ids = drafting.tokenizer.encode(PROMPT)
    output = generate(drafting, ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    first = output.outputs[0].token_ids[0]
    drafts = drafting.draft(ids, 5)
    assert drafts == drafting.draft(ids, 5, next_token=first)
    assert drafts[:2] == drafting.draft(ids, 2)
    assert len(drafts) == 5
    others = {tuple(drafting.draft(ids, 5, next_token=t)) for t in (203, 330, 5000)}
    assert len(others | {tuple(drafts)}) == 4


def test_a_speculator_alone_finds_its_target() -> None:
    llm = LLM(str(assets.path("tiny-eagle3")), dtype="float32", speculative_config={"policy": "fixed"})
    assert llm.num_speculative_tokens == 5
    output = generate(llm, PROMPT, SamplingParams(temperature=0, max_tokens=24))[0]
    assert output.metrics.speculation.num_accepted_tokens > 0


def test_statistics_add_up(drafting: LLM) -> None:
    output = generate(drafting, PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    s = output.metrics.speculation
    assert 1 + s.num_rounds + s.num_accepted_tokens >= 30 > s.num_rounds + s.num_accepted_tokens - 5
    assert s.acceptance_length == 1 + s.num_accepted_tokens / s.num_rounds
    assert sum(s.accepted_per_position) == s.num_accepted_tokens
    assert sum(s.drafted_per_position) == s.num_draft_tokens


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt: is empty"),
    ([[]], "prompt: is empty"),
    ([1, 2, 8192], r"token id 8192 at position 2: ids go from 0 to 8191"),
    ([1, -1], "token id -1 at position 1"),
    ([5] * 256, "256 tokens leave no room for an answer in max_model_len=256"),
    ({"prompt": 5}, "a dict must hold 'prompt', a text, or 'prompt_token_ids', a list of ids"),
    ({"prompt": "x", "strange": {}}, "a dict must hold 'prompt', a text, or .* and nothing else"),
    ({"prompt": "x", "multi_modal_data": {}}, "this model reads no images"),
    ({"prompt_token_ids": 5}, "must hold .*'prompt_token_ids', a list"),
    ({"prompt_token_ids": "abc"}, "must hold .*'prompt_token_ids', a list"),
    ([3.5], "must be text, a list of token ids"),
    (None, "prompts=None: must be text"),
    (b"abc", "prompts=b'abc': must be text"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_the_reason(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(llm, prompt)


def test_a_bad_prompt_among_others_does_not_stop_them(llm: LLM) -> None:
    outputs = generate(llm, [PROMPT, [1, 9999], "import os", [1, 9998]])
    assert [o.error is None for o in outputs] == [True, False, True, False]
    assert len({o.request_id for o in outputs}) == 4
    assert "9999" in str(outputs[1].error) and outputs[1].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].token_ids and outputs[2].outputs[0].token_ids


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature=-1: must be a number from 0"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"top_p": 0}, "top_p=0: must be a number greater than 0"),
    ({"top_k": -2}, "top_k=-2"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"n": 0}, "n=0"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 2.5}, "max_tokens=2.5"),
    ({"min_tokens": 20}, "min_tokens=20: must not exceed max_tokens=16"),
    ({"stop": ""}, "stop"),
    ({"logprobs": -3}, "logprobs=-3"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"seed": "x"}, "seed='x'"),
    ({"temperature": "0.5"}, "temperature='0.5'"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": 1e300}, "temperature=1e[+]300"),
    ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
    ({"top_k": 2**63}, "top_k=9223372036854775808"),
    ({"min_tokens": 2**63, "max_tokens": None}, "min_tokens=9223372036854775808"),
    ({"stop": ["a", 5]}, "stop=.*must be a list of strings"),
    ({"stop": 5}, "stop=5: must be a list of strings"),
    ({"bad_words": "abc"}, "bad_words='abc': must be a list of strings"),
    ({"stop_token_ids": 5}, "stop_token_ids=5: must be a list of token ids"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids=.*must be a list of token ids"),
    ({"allowed_token_ids": ["7"]}, "allowed_token_ids=.*must be a list of token ids"),
    ({"logit_bias": [5]}, "logit_bias=.*must be a dict"),
    ({"logit_bias": {5: "1"}}, "logit_bias=.*must be a dict"),
    ({"logit_bias": {5: math.nan}}, "logit_bias=.*numbers, which are cut to -100..100"),
    ({"temperature": "hot"}, "temperature='hot': must be a number from 0"),
    ({"temperature": None}, "temperature=None: must be a number"),
    ({"temperature": True}, "temperature=True: must be a number"),
    ({"top_p": "x"}, "top_p='x': must be a number"),
    ({"logprobs": "2"}, "logprobs='2': must be an integer"),
    ({"logprobs": 2.0}, "logprobs=2.0: must be an integer"),
    ({"max_tokens": True}, "max_tokens=True: must be an integer"),
    ({"skip_special_tokens": "x"}, "skip_special_tokens='x': must be true or false"),
    ({"detokenize": None}, "detokenize=None: must be true or false"),
    ({"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
    ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output='no': must be true or false"),
    ({"temprature": 0}, "SamplingParams: unknown key 'temprature': did you mean 'temperature'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS)
def test_bad_sampling_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_numbers_of_numpy_and_ids_as_json_has_them_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    given = SamplingParams(
        temperature=numpy.float32(0.5),
        max_tokens=numpy.int64(3),
        seed=numpy.int64(7),
        logit_bias={"5": 10**400},
    )
    assert given == SamplingParams(temperature=0.5, max_tokens=3, seed=7, logit_bias={5: 100.0})
    assert type(given.temperature) is float and type(given.max_tokens) is type(given.seed) is int
    copy = given.clone()
    assert copy == given and copy.logit_bias is not given.logit_bias


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [9000]}, {"logit_bias": {-1: 1.0}}])
def test_ids_outside_the_vocabulary_are_refused(llm: LLM, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not in the vocabulary"):
        generate(llm, PROMPT, SamplingParams(**fields))


TINY, HEAD = str(assets.path("tiny")), str(assets.path("tiny-eagle3"))
SHAPE = str(Path(__file__).parents[2] / "bench" / "shapes" / "llama-3.1-8b-eagle3")
BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"model": "no/such/dir/here"}, "no such directory"),
    ({"max_num_seq": 4}, "unknown key 'max_num_seq': did you mean 'max_num_seqs'"),
    ({"dtype": "float8"}, "dtype='float8'"),
    ({"device": "tpu"}, "device='tpu'"),
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"max_model_len": 100_000}, "max_model_len=100000.*max_position_embeddings=4096"),
    ({"num_kv_blocks": 2, "max_model_len": 64}, "num_kv_blocks=2.*raise num_kv_blocks to 5"),
    ({"num_kv_blocks": 10**9}, "num_kv_blocks=1000000000: needs .* GiB"),
    ({"num_kv_blocks": 10**12}, "num_kv_blocks=1000000000000: must be an integer from 1 to"),
    ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000: must be at most"),
    ({"block_size": 1_000_000}, "block_size=1000000: must be an integer from 1 to 1024"),
    ({"verification": "fast"}, "verification='fast'"),
    ({"attention_backend": "sdpaa"}, "did you mean 'sdpa'"),
    ({"speculative_config": "ngram"}, "must be a dict"),
    ({"speculative_config": {}}, "give 'method'"),
    ({"speculative_config": {"metod": "ngram"}}, "unknown key 'metod': did you mean 'method'"),
    ({"speculative_config": {"method": "ngrams"}}, "did you mean 'ngram'"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens=0"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1000}},
        "num_speculative_tokens=1000",
    ),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_mx": 3}}, "did you mean 'prompt_lookup_max'"),
    ({"speculative_config": {"method": "eagle3"}}, "without model"),
    ({"speculative_config": {"method": "draft_model", "model": HEAD}}, "is a checkpoint for 'eagle3'"),
    ({"speculative_config": {"model": HEAD, "numspeculative": 3}}, "unknown key 'numspeculative'"),
    ({"speculative_config": {"method": "chain"}}, "needs drafters"),
    ({"speculative_config": {"method": "no.such.Drafter"}}, "cannot be imported"),
    ({"speculative_config": {"method": "collections.OrderedDict"}}, "OrderedDict"),
    ({"speculative_config": {"model": "nowhere"}}, "speculative_config: model='nowhere': no such directory"),
    ({"tokenizer": "no/such/dir/here"}, "tokenizer='no/such/dir/here': no such directory"),
    ({"speculative_config": {"model": SHAPE}}, "safetensors files: none; .*load_format='dummy'"),
    ({"speculative_config": {"model": 5}}, "model=5"),
    ({"speculative_config": {"method": 5}}, "method=5"),
    ({"speculative_config": {"method": "ngram", "max_faults": 0}}, "max_faults=0"),
    ({"speculative_config": {"method": "ngram", "time_limit": "1"}}, "time_limit='1'"),
    ({"speculative_config": {"method": "ngram", "time_limit": math.nan}}, "time_limit=nan: must be a number"),
    (
        {"speculative_config": {"method": "ngram", "time_limit": -1}},
        "time_limit=-1: must be a number greater",
    ),
    ({"speculative_config": {"method": "ngram", "time_limit": 0}}, "time_limit=0: must be a number greater"),
    ({"speculative_config": {"Method": "ngram"}}, "unknown key 'Method': did you mean 'method'"),
    ({"speculative_config": {"MODEL": HEAD}}, "unknown key 'MODEL': did you mean 'model'"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_max": "5"}}, "prompt_lookup_max='5'"),
    ({"speculative_config": {"method": "chain", "drafters": 5}}, "drafters=5: must be a list"),
    (
        {"speculative_config": {"method": "chain", "drafters": [{"method": "ngram"}, "ngram"]}},
        r"drafters\[1\]='ngram': must be a dict",
    ),
    (
        {"speculative_config": {"method": "chain", "drafters": [{"method": "ngram"}, {"method": "ngam"}]}},
        r"speculative_config: drafters\[1\]: method='ngam': did you mean 'ngram'",
    ),
    (
        {"speculative_config": {"method": "chain", "drafters": [{"method": "ngram"}], "polcy": "fixed"}},
        "did you mean 'policy'",
    ),
    ({"exact": "no"}, "exact='no'"),
    ({"tensor_parallel_size": 2}, "LLM: tensor_parallel_size=2: not supported: there is one device"),
    ({"trust_remote_code": True}, "LLM: trust_remote_code=True: not supported: no code of a checkpoint"),
    ({"enable_chunked_prefill": False}, "LLM: enable_chunked_prefill=False: not supported"),
    ({"swap_space": 4}, "LLM: swap_space=4: not supported"),
    ({"dtype": "half", "device": "tpu"}, "device='tpu'"),
    ({"tokenizer": 5}, "tokenizer=5"),
    ({"device": 0}, "device=0"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**settings)


def test_settings_of_vllm_that_change_nothing_here_are_taken() -> None:
    plain = EngineConfig.from_kwargs()
    for name, (values, _) in VLLM_SETTINGS.items():
        for value in values:
            assert EngineConfig.from_kwargs(**{name: value}) == plain
    assert EngineConfig.from_kwargs(tensor_parallel_size=1, trust_remote_code=False, seed=None) == plain
    for given, ours in (("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16")):
        assert EngineConfig.from_kwargs(dtype=given).dtype == ours


def test_a_head_for_another_target_is_refused_with_both_sizes() -> None:
    oracle = "tests/data/oracle"
    with pytest.raises(ValueError, match="vocab_size=8192, but the target's is 256"):
        LLM(f"{oracle}/target_llama", speculative_config={"model": HEAD})
    with pytest.raises(ValueError, match="vocab_size=256, but the target's is 8192"):
        LLM(speculative_config={"model": f"{oracle}/eagle3"})


def test_parameters_that_are_none_are_refused(llm: LLM) -> None:
    for wrong in ({"temperature": 0}, ["greedy"], 5):
        with pytest.raises(ValueError, match=r"sampling_params=.*must be one SamplingParams"):
            generate(llm, [PROMPT], wrong)


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": 5},
        {"layer_types": 5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "attention_factor": []}},
    ],
)
def test_a_config_of_wrong_types_is_refused_by_name(tmp_path: Any, keys: dict[str, Any]) -> None:
    import json

    raw = json.loads((assets.path("tiny") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **keys}))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"speculators_config": 5},
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 1000}]}},
        {"eagle_aux_hidden_state_layer_ids": 5},
        {"transformer_layer_config": 5},
    ],
)
def test_a_head_of_wrong_types_is_refused_by_name(tmp_path: Any, keys: dict[str, Any]) -> None:
    import json
    import shutil

    shutil.copytree(HEAD, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(speculative_config={"model": str(tmp_path / "head")})


def test_draft_needs_a_drafter_and_a_sensible_k(llm: LLM, drafting: LLM) -> None:
    with pytest.raises(ValueError, match="no drafter"):
        llm.draft([1, 2, 3], 2)
    with pytest.raises(ValueError, match="k=6: must be an integer from 1 to num_speculative_tokens=5"):
        drafting.draft([1, 2, 3], 6)


def test_auto_dtype_is_the_files_where_it_can_be_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof.engine.loading import memory
    from draftproof.engine.loading.memory import pick_dtype
    from draftproof.runtime import native

    stored = read_config(assets.path("tiny")).dtype
    assert stored == torch.bfloat16
    cpu, library = torch.device("cpu"), native.load()
    assert library is not None
    assert pick_dtype("auto", torch.float32, cpu, library) == torch.float32
    monkeypatch.setattr(memory, "_has_bfloat16", lambda: False)
    for half in (torch.bfloat16, torch.float16):
        assert pick_dtype("auto", half, cpu, library) == half
        assert pick_dtype("auto", half, cpu, None) == torch.float32


def test_the_arithmetic_can_be_one_that_all_processors_have() -> None:
    with LLM(dtype="bfloat16", max_model_len=64, bf16_arithmetic="widened") as llm:
        assert llm.arithmetic == "bfloat16, widened"
    with pytest.raises(ValueError, match="bf16_arithmetic='widened': only the compiled operators"):
        LLM(native=False, max_model_len=64, bf16_arithmetic="widened")


def test_requests_and_engine_count_the_same_accepted_drafts() -> None:
    """Also if a stop token is among the accepted drafts: drafts after it are not part of the output."""
    config = {"model": str(assets.path("tiny-eagle3")), "num_speculative_tokens": 5, "policy": "fixed"}
    llm = LLM(dtype="float32", speculative_config=config, max_model_len=256)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    tokens = llm.generate(REPEATS, greedy, use_tqdm=False)[0].outputs[0].token_ids
    before = llm.stats.speculation.num_accepted_tokens
    stops = [SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[token]) for token in tokens[:10]]
    outputs = llm.generate([REPEATS] * 10, stops, use_tqdm=False)
    by_request = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
    assert by_request == llm.stats.speculation.num_accepted_tokens - before
    assert 0 < by_request < sum(len(o.outputs[0].token_ids) for o in outputs)
