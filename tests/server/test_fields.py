"""Fields and settings that change what the engine computes act as in `LLM`, and those that say who may use the
server."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftproof import LLM, SamplingParams
from tests.conformance.cases import prompts
from tests.server.running import ENGINE, LONG, Running, drafting, running
from tests.server.scripted import model

TEXT = prompts()[0]
TLS = Path(__file__).resolve().parent.parent / "data" / "tls"
ORIGIN = "http://page.example"
TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }} {{ mood or 'plain' }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MESSAGES = [{"role": "user", "content": "What is 12 * 7?"}, {"role": "assistant", "content": "It is"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model(tmp_path_factory.mktemp("model"), TEMPLATE))


@pytest.fixture(scope="module")
def plain(folder: str) -> Iterator[LLM]:
    with LLM(folder, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Running]:
    llm = drafting(model=folder)
    with running(llm, cors_origin=(ORIGIN,), metrics_prefix="vllm:") as started:
        yield started


@pytest.mark.parametrize(
    "case",
    [
        {"stop_token_ids": [0]},
        {"bad_words": ["the", " a", "="]},
        {"allowed_token_ids": list(range(40, 90))},
        {"repetition_penalty": 1.3},
        {"stop_token_ids": [0], "include_stop_str_in_output": True, "skip_special_tokens": False},
    ],
)
def test_fields_beyond_openais_are_llms(server: Running, plain: LLM, case: dict[str, Any]) -> None:
    usual = {"temperature": 0, "max_tokens": 24}
    before = plain.generate(TEXT, SamplingParams(**usual), use_tqdm=False)[0].outputs[0]
    if case.get("stop_token_ids"):
        case = {**case, "stop_token_ids": [before.token_ids[6]]}
    expected = plain.generate(TEXT, SamplingParams(**usual, **case), use_tqdm=False)[0].outputs[0]
    assert expected.text != before.text, "the field changes something"
    with server.http() as client:
        choice = client.post("/v1/completions", json={"prompt": TEXT, **usual, **case}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert choice["stop_reason"] == expected.stop_reason


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        (MESSAGES[:1], {"mood": "odd"}),
        (MESSAGES, {"continue_final_message": True}),
        (MESSAGES[:1], {"add_generation_prompt": False}),
    ],
)
def test_what_a_chat_template_is_told(
    server: Running, plain: LLM, messages: list[dict[str, str]], template: dict[str, Any]
) -> None:
    ids = plain.tokenizer.chat(messages, **template)
    assert ids != plain.tokenizer.chat(messages)
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = plain.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0].text
    told = {"chat_template_kwargs": template} if "mood" in template else template
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, "return_token_ids": True, **told}
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == ids and answer["choices"][0]["message"]["content"] == expected
    with server.http() as client:
        for name in ("chat_template", "tokenize", "moood"):
            refused = client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {name: "x"}})
            assert refused.status_code == 400 and name in refused.json()["error"]["message"]


def test_choices_share_their_prompts_pages(server: Running) -> None:
    """Three prompts of 200 tokens each would not fit at once without sharing."""
    ids = list(range(100, 300))
    body = {"prompt": ids, "n": 3, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    with server.http() as client:
        answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    assert len(answer["choices"]) == 3
    server.check_nothing_left()


def test_pages_of_other_origins_may_ask_where_they_were_named(server: Running) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with server.http() as client:
        told = client.options("/v1/completions", headers={"Origin": ORIGIN, **asks})
        assert told.status_code == 200 and told.headers["Access-Control-Allow-Origin"] == ORIGIN
        other = client.options("/v1/completions", headers={"Origin": "http://other.example", **asks})
        assert other.status_code == 400 and "Access-Control-Allow-Origin" not in other.headers
        assert (
            client.get("/version", headers={"Origin": ORIGIN}).headers["Access-Control-Allow-Origin"]
            == ORIGIN
        )


def test_metrics_under_vllms_prefix(server: Running) -> None:
    with server.http() as client:
        text = client.get("/metrics").text
    assert "vllm:spec_decode_num_accepted_tokens_total{" in text and "draftproof:" not in text


def test_https() -> None:
    files = {"ssl_certfile": str(TLS / "certificate.pem"), "ssl_keyfile": str(TLS / "key.pem")}
    with running(drafting(), **files) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=files["ssl_certfile"])
        with httpx.Client(base_url=server.url, verify=context, timeout=LONG) as client:
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        unsafe = http.client.HTTPConnection(server.url.removeprefix("https://"), timeout=LONG)
        unsafe.request("GET", "/health")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            unsafe.getresponse()
