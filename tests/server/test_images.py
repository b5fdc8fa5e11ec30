"""Images in chats, Responses and Messages: the same conversation in each API's format gives the same prompt."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM
from tests.made import vision
from tests.made.pictures import HOSTILE, encoded
from tests.made.vision import picture
from tests.server.running import LONG, Running, running

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: pip install anthropic")
WORDS = "w5 w6 w7"


def png(seed: int) -> str:
    out = io.BytesIO()
    picture(30, 50, seed).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


A, B = png(1), png(2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    vision.qwen2_5_vl(folder)
    vision.tokenizer(folder)
    drafter = {"method": "ngram", "prompt_lookup_min": 1}
    with running(
        LLM(str(folder), dtype="float32", speculative_config=drafter), served_model_name=("m",)
    ) as started:
        yield started


@pytest.fixture
def claude(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LONG)


def uri(data: str) -> str:
    return f"data:image/png;base64,{data}"


def of_chats(*parts: str) -> Any:
    """A chat's content of texts and of images as data URIs."""
    return [
        {"type": "text", "text": part}
        if part == WORDS
        else {"type": "image_url", "image_url": {"url": uri(part)}}
        for part in parts
    ]


def of_responses(*parts: str) -> Any:
    return [
        {"type": "input_text", "text": part}
        if part == WORDS
        else {"type": "input_image", "image_url": uri(part), "detail": "auto"}
        for part in parts
    ]


def of_messages(*parts: str) -> Any:
    return [
        {"type": "text", "text": part}
        if part == WORDS
        else {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": part}}
        for part in parts
    ]


@pytest.mark.parametrize("parts", [(A, WORDS), (WORDS, A, B, WORDS), (B,)])
def test_the_same_answer_in_every_words(server: Running, claude: Any, parts: tuple[str, ...]) -> None:
    told: Any = {"model": "m", "temperature": 0}
    client = server.client()
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": of_chats(*parts)}], max_tokens=12, **told
    )
    expected = chat.choices[0].message.content
    assert expected and chat.usage is not None
    response = client.responses.create(
        input=[{"role": "user", "content": of_responses(*parts)}], max_output_tokens=12, **told
    )
    assert response.output_text == expected and response.usage is not None
    messages = [{"role": "user", "content": of_messages(*parts)}]
    greedy: Any = {"model": "m", "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = claude.messages.create(messages=messages, **greedy)
    assert message.content[0].text == expected
    counted = claude.messages.count_tokens(model="m", messages=messages).input_tokens
    assert counted == chat.usage.prompt_tokens == response.usage.input_tokens > 12 * len(set(parts) & {A, B})
    words = [{"role": "user", "content": WORDS}]
    assert claude.messages.create(messages=words, **greedy).content[0].text != expected


def test_a_response_goes_on_about_an_image(server: Running) -> None:
    client = server.client()
    told: Any = {"model": "m", "temperature": 0, "max_output_tokens": 6}
    first = client.responses.create(input=[{"role": "user", "content": of_responses(A)}], **told)
    after = client.responses.create(input=WORDS, previous_response_id=first.id, **told)
    messages: Any = [
        {"role": "user", "content": of_chats(A)},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": WORDS},
    ]
    chat = client.chat.completions.create(model="m", temperature=0, max_tokens=6, messages=messages)
    assert after.output_text == chat.choices[0].message.content


def test_results_of_tools_show_images(server: Running, claude: Any) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked: Any = {"role": "user", "content": WORDS}
    calling: Any = {"role": "assistant", "content": None, "tool_calls": [called]}
    chat = server.client().chat.completions.create(
        model="m",
        temperature=0,
        max_tokens=6,
        messages=[asked, calling, {"role": "tool", "tool_call_id": "c1", "content": of_chats(A, WORDS)}],
    )
    result = {"type": "tool_result", "tool_use_id": "c1", "content": of_messages(A, WORDS)}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    message = claude.messages.create(
        model="m",
        max_tokens=6,
        extra_body={"temperature": 0},
        messages=[asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
    )
    assert message.content[0].text == chat.choices[0].message.content


URL = "https://example.com/a.png"


@pytest.mark.parametrize(
    ("route", "part", "words"),
    [
        (
            "responses",
            {"type": "input_image", "image_url": URL},
            "content[0].image_url='https://example.com/a.png'",
        ),
        ("responses", {"type": "input_image", "file_id": "f1"}, "content[0].file_id: files are not kept"),
        ("responses", {"type": "input_image", "image_url": uri("!!")}, "is no base64"),
        ("responses", {"type": "input_image", "image_url": "/etc/hostname"}, "allowed_local_media_path"),
        (
            "messages",
            {"type": "image", "source": {"type": "url", "url": URL}},
            "content[0].source.url='https:",
        ),
        ("messages", {"type": "image", "source": {"type": "file", "file_id": "f1"}}, "content[0].source="),
        ("messages", {"type": "image", "source": {"type": "base64", "data": A}}, "source.media_type=None"),
        ("messages", of_messages(base64.b64encode(b"no image").decode())[0], "is no PNG, JPEG"),
    ],
)
def test_images_that_are_refused(server: Running, route: str, part: Any, words: str) -> None:
    asked = [{"role": "user", "content": [part]}]
    body = {"input": asked} if route == "responses" else {"messages": asked, "max_tokens": 3}
    with server.http() as http:
        refused = http.post(f"/v1/{route}", json=body)
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    server.check_nothing_left()


def test_hostile_images_get_an_error_each_and_the_others_go_on(server: Running, tmp_path: Path) -> None:
    made = {kind: (make(tmp_path), words) for kind, (make, words) in HOSTILE.items()}
    thin, words = made["thin"]
    made["thin"] = encoded(thin, "PNG"), words
    files = {kind: found for kind, found in made.items() if isinstance(found[0], bytes)}
    assert len(files) > 6

    def ask(data: str) -> Any:
        asked = [{"role": "user", "content": of_chats(A, data, WORDS)}]
        body = {"model": "m", "messages": asked, "max_tokens": 8, "temperature": 0}
        with server.http() as http:
            return http.post("/v1/chat/completions", json=body)

    told = [B, *(base64.b64encode(data).decode() for data, _ in files.values()), B]
    with ThreadPoolExecutor(4) as pool:
        first, *bad, last = pool.map(ask, told)
    for answer, (kind, (_, words)) in zip(bad, files.items(), strict=True):
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "image 1" in said and words in said, kind
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in (first, last, ask(B))]
    assert texts[0] and len(set(texts)) == 1
    server.check_nothing_left()
