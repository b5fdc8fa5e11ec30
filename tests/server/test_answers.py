"""Clients get `LLM`'s answers, streamed or whole, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from draftproof import LLM, Delta, RequestOutput, SamplingParams, assets
from draftproof.server import streaming
from draftproof.server.protocol import CompletionBody
from draftproof.types import Logprob
from tests.conformance.cases import REPEATS, prompts
from tests.server.running import ENGINE, LONG, Running, drafting, running

TEXT = prompts()[0]
MESSAGES: Any = [{"role": "user", "content": "What is 12 * 7?"}]
CASES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0.9, "seed": 11, "max_tokens": 30, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.7, "seed": 3, "max_tokens": 20, "n": 3},
    {"temperature": 0, "max_tokens": 60, "stop": ["\n", "ab"]},
    {"temperature": 0, "max_tokens": 20, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"temperature": 0, "max_tokens": 12, "logit_bias": {"42": 3.5}, "min_tokens": 12, "ignore_eos": True},
]
OPENAIS = ("temperature", "max_tokens", "seed", "top_p", "n", "stop", "frequency_penalty", "presence_penalty")


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(drafting(), served_model_name=("tiny", "other")) as started:
        yield started


def split(case: dict[str, Any]) -> dict[str, Any]:
    """A case as the client's arguments: fields that are not OpenAI's go into `extra_body`."""
    extra = {name: value for name, value in case.items() if name not in (*OPENAIS, "logit_bias", "logprobs")}
    return {name: value for name, value in case.items() if name not in extra} | {"extra_body": extra}


def asked(llm: LLM, prompt: Any, **case: Any) -> RequestOutput:
    return llm.generate(prompt, SamplingParams(**case), use_tqdm=False)[0]


@pytest.mark.parametrize("case", CASES)
def test_completions_are_llms(server: Running, plain: LLM, case: dict[str, Any]) -> None:
    expected = asked(plain, TEXT, **case)
    client = server.client()
    whole = client.completions.create(model="tiny", prompt=TEXT, **split(case))
    assert [c.text for c in whole.choices] == [c.text for c in expected.outputs]
    assert [c.finish_reason for c in whole.choices] == [c.finish_reason for c in expected.outputs]
    texts, reasons = [""] * len(whole.choices), [None] * len(whole.choices)
    for chunk in client.completions.create(model="tiny", prompt=TEXT, stream=True, **split(case)):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.text for c in expected.outputs]
    assert reasons == [c.finish_reason for c in expected.outputs]


@pytest.mark.parametrize("case", CASES)
def test_chats_are_llms(server: Running, plain: LLM, case: dict[str, Any]) -> None:
    expected = plain.chat(MESSAGES, SamplingParams(**case), use_tqdm=False)[0]
    client = server.client()
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **split(case))
    assert [c.message.content for c in whole.choices] == [c.text for c in expected.outputs]
    texts = [""] * len(whole.choices)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **split(case),
        )
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.text for c in expected.outputs]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[-1].choices
    counted = chunks[-1].usage
    assert counted is not None and whole.usage is not None
    assert counted.prompt_tokens == whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert counted.completion_tokens == sum(len(c.token_ids) for c in expected.outputs)


def test_max_completion_tokens_and_none_at_all(server: Running, plain: LLM) -> None:
    client = server.client()
    few = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=3, max_tokens=9
    )
    assert few.usage is not None and few.usage.completion_tokens == 3
    expected = plain.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)[0]
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == expected.outputs[0].text
    short = client.completions.create(model="tiny", prompt="x = ", extra_body={"ignore_eos": True})
    assert short.usage is not None and short.usage.completion_tokens == 16


def test_a_seed_that_was_drawn_gives_the_answer_again(server: Running, plain: LLM) -> None:
    client = server.client()
    first = client.completions.create(model="tiny", prompt="x = ", temperature=1.5, max_tokens=20)
    drawn = first.model_extra["seed"]
    again = client.completions.create(model="tiny", prompt="x = ", temperature=1.5, max_tokens=20, seed=drawn)
    offline = asked(plain, "x = ", temperature=1.5, max_tokens=20, seed=drawn)
    assert first.choices[0].text == again.choices[0].text == offline.outputs[0].text
    assert first.system_fingerprint == plain.fingerprint


def test_usage_and_metrics_say_what_was_accepted(server: Running) -> None:
    client = server.client()
    answer = client.completions.create(model="tiny", prompt=REPEATS, temperature=0, max_tokens=40)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    told = answer.model_extra["metrics"]["speculative_decoding"]
    histogram = told["acceptance_histogram"]
    assert len(histogram) == told["num_spec_tokens"] + 1 == 5
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(i * number for i, number in enumerate(histogram)) == told["num_accepted_draft_tokens"] > 0
    assert details.accepted_prediction_tokens == told["num_accepted_draft_tokens"]
    accepted_and_rejected = (details.accepted_prediction_tokens or 0) + (
        details.rejected_prediction_tokens or 0
    )
    assert accepted_and_rejected == told["num_draft_tokens"]
    again = client.completions.create(model="tiny", prompt=REPEATS, temperature=0, max_tokens=4)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_speculation_is_a_requests_own_and_changes_no_text(server: Running) -> None:
    client = server.client()
    told = []
    texts = set()
    for wanted in (0, 2, "auto"):
        body = {"speculation": {"num_speculative_tokens": wanted}}
        answer = client.completions.create(
            model="tiny", prompt=REPEATS, temperature=0, max_tokens=40, extra_body=body
        )
        texts.add(answer.choices[0].text)
        told.append(answer.model_extra["metrics"]["speculative_decoding"])
    assert len(texts) == 1
    assert told[0]["num_draft_tokens"] == 0
    assert sum(told[1]["acceptance_histogram"][3:]) == 0 < told[1]["num_accepted_draft_tokens"]
    assert sum(told[2]["acceptance_histogram"][3:]) > 0


def test_logprobs_of_chats(server: Running, plain: LLM) -> None:
    expected = plain.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8, logprobs=2), use_tqdm=False)
    rows = expected[0].outputs[0].logprobs or []
    wanted: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    client = server.client()
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **wanted)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    ids = expected[0].outputs[0].token_ids
    assert [one.logprob for one in content] == [row[i].logprob for i, row in zip(ids, rows, strict=True)]
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert content[0].top_logprobs[0].logprob == content[0].logprob  # greedy
    streamed = []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **wanted):
        for choice in chunk.choices:
            streamed += (choice.logprobs and choice.logprobs.content) or []
    assert streamed == content


def test_echo_with_logprobs_scores_the_prompt(server: Running, plain: LLM) -> None:
    expected = asked(plain, TEXT, temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1)
    wanted: dict[str, Any] = {"prompt": TEXT, "temperature": 0, "max_tokens": 4, "logprobs": 1, "echo": True}
    client = server.client()
    choice = client.completions.create(model="tiny", **wanted).choices[0]
    assert choice.text == TEXT + expected.outputs[0].text
    assert choice.logprobs is not None
    found = choice.logprobs.token_logprobs or []
    ids = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    rows = [*(expected.prompt_logprobs or []), *(expected.outputs[0].logprobs or [])]
    assert found == [row and row[i].logprob for i, row in zip(ids, rows, strict=True)]
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[0] == 0
    tokens: list[str] = []
    streamed: list[Any] = []
    offsets: list[int] = []
    for chunk in client.completions.create(model="tiny", stream=True, **wanted):
        for part in chunk.choices:
            if part.logprobs is not None:
                tokens += part.logprobs.tokens or []
                streamed += part.logprobs.token_logprobs or []
                offsets += part.logprobs.text_offset or []
    assert (tokens, streamed) == (choice.logprobs.tokens, found)
    assert offsets == choice.logprobs.text_offset


def test_scores_of_a_prompt_by_token_id(server: Running, plain: LLM) -> None:
    ids = plain.tokenizer.chat(MESSAGES)
    (first, *rows) = asked(plain, ids, max_tokens=1, prompt_logprobs=2).prompt_logprobs or []
    assert first is None and len(rows) == len(ids) - 1
    told = [{str(token): vars_of(one) for token, one in (row or {}).items()} for row in rows]
    wanted = {"max_tokens": 1, "prompt_logprobs": 2}
    with server.http() as http:
        text = http.post("/v1/completions", json={"prompt": ids, **wanted}).json()
        chat = http.post("/v1/chat/completions", json={"messages": MESSAGES, **wanted}).json()
    assert text["choices"][0]["prompt_logprobs"] == chat["prompt_logprobs"] == [None, *told]


def vars_of(one: Logprob) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("logprob", "rank", "decoded_token")}


def test_choices_wait_for_the_scores_of_their_prompt() -> None:
    """The first choice brings the scores; with several replicas another choice's tokens may come earlier."""
    ids, scores = [5, 6, 7], {"tokens": ["a", "b", "c"], "text_offset": [0, 1, 2]}
    looked: list[int] = []
    stream = SimpleNamespace(prompt_token_ids=ids, number=3)
    service = SimpleNamespace(
        head=lambda job, kind: {},
        parser=lambda job: None,
        echoed=lambda job, ids: "abc",
        prompt_logprobs=lambda stream: looked.append(stream.number) or scores,
    )
    body = CompletionBody(prompt=ids, echo=True, logprobs=0, stream=True)
    job = SimpleNamespace(is_chat=False, body=body, params=SamplingParams(n=3), streams=[stream])
    writer = streaming.Chunks(service, job)  # type: ignore[arg-type]
    assert writer.is_long(0)
    for index, reason in ((1, None), (2, None), (1, "stop")):
        assert writer.of(0, Delta("id", index, "x", [8], finish_reason=reason)) == []  # type: ignore[arg-type]
    chunks = writer.of(0, Delta("id", 0, "y", [9]))
    assert not writer.is_long(0) and looked == [3]
    chunks += writer.of(0, Delta("id", 2, "z", [9]))
    parts = [chunk["choices"][0] for chunk in chunks]
    for index, texts in enumerate((["abc", "y"], ["abc", "x", "x", ""], ["abc", "x", "z"])):
        own = [part for part in parts if part["index"] == index]
        assert [part["text"] for part in own] == texts
        assert own[0]["logprobs"] == scores


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_one_request(server: Running, plain: LLM, stream: bool) -> None:
    given: Any = [*prompts()[:3]]
    expected = plain.generate(
        given, SamplingParams(temperature=0.8, seed=4, n=2, max_tokens=12), use_tqdm=False
    )
    texts = [""] * 6
    client = server.client()
    wanted: dict[str, Any] = {"prompt": given, "temperature": 0.8, "seed": 4, "n": 2, "max_tokens": 12}
    if stream:
        for chunk in client.completions.create(model="tiny", stream=True, **wanted):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        for choice in client.completions.create(model="tiny", **wanted).choices:
            texts[choice.index] = choice.text
    assert texts == [choice.text for output in expected for choice in output.outputs]


def test_token_ids_go_in_and_come_out(server: Running, plain: LLM) -> None:
    ids = plain.tokenizer.encode(TEXT)
    expected = asked(plain, ids, temperature=0, max_tokens=10)
    with server.http() as http:
        body = {"prompt": ids, "temperature": 0, "max_tokens": 10, "return_token_ids": True}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["token_ids"] == expected.outputs[0].token_ids
        assert choice["prompt_token_ids"] == ids
        events = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        parts = [json.loads(e[6:])["choices"][0] for e in events if e and e != "data: [DONE]"]
        assert [i for part in parts for i in part.get("token_ids", [])] == choice["token_ids"]
        accepted = [flag for part in parts for flag in part.get("accepted", [])]
        assert len(accepted) == len(choice["token_ids"])


def test_tokenize_and_detokenize_are_the_tokenizers(server: Running, plain: LLM) -> None:
    with server.http() as http:
        told = http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
        assert told["tokens"] == plain.tokenizer.encode(TEXT) and told["count"] == len(told["tokens"])
        assert "".join(told["token_strs"]) == TEXT and told["max_model_len"] == 256
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": TEXT}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["tokens"] == plain.tokenizer.chat(MESSAGES)
        assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400


def test_models_version_load_and_metrics(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    client.completions.create(model="tiny", prompt=TEXT, max_tokens=3, extra_body={"ignore_eos": True})
    with server.http() as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert http.get("/version").json()["version"]
        assert http.get("/load").json() == {"server_load": 0, "prompt_tokens": 0}
        text = http.get("/metrics").text
    for name in ("spec_decode_num_accepted_tokens_total", "time_to_first_token_seconds_bucket"):
        assert f"draftproof:{name}{{" in text
    assert 'request_success_total{engine="0",finished_reason="length",model_name="tiny"}' in text


@pytest.mark.parametrize("model", [None, str(assets.path(assets.TARGET))])
def test_a_model_that_was_not_named_is_not_served_as_a_path(model: str | None) -> None:
    with running(LLM(model, **ENGINE)) as started:
        assert started.service.names == ["tiny"]


def test_sixteen_streams_of_which_some_leave(server: Running, plain: LLM) -> None:
    """The streams that stay get what they would get alone; those that leave hold no resources."""
    texts = [f"{TEXT} {i}" for i in range(16)]
    expected = [asked(plain, text, temperature=0, max_tokens=24).outputs[0].text for text in texts]

    async def ask(number: int) -> str:
        leaves = number % 3 == 0
        stream = await server.async_client().completions.create(
            model="tiny",
            prompt=texts[number],
            temperature=0,
            max_tokens=200 if leaves else 24,
            stream=True,
            extra_body={"ignore_eos": leaves},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves:
                await stream.close()
                break
        return text

    async def ask_all() -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*map(ask, range(16))), LONG)

    for number, text in enumerate(asyncio.run(ask_all())):
        assert text == expected[number] if number % 3 else expected[number].startswith(text[:5])
    server.check_nothing_left()
