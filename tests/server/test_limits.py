"""What a server refuses, with OpenAI's error objects, and what it survives."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from pydantic import ValidationError

from draftproof.engine.core import EngineCore
from draftproof.server import limits
from draftproof.server.messages import CountBody, MessagesBody
from draftproof.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from draftproof.server.responses import ResponsesBody
from draftproof.server.service import Service
from tests.server.running import LONG, Running, drafting, local, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
JSON = {"Content-Type": "application/json"}
ONE = b'{"messages": [{"role": "user", "content": "Hi"}], '
KEY = {"Authorization": "Bearer second"}
DEEP = '{"properties":{"a":' * 300 + "{}" + "}}" * 300


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(
        drafting(), max_body_bytes=1 << 20, client_timeout=0.2, max_choices=8, max_prompt_chars=60_000
    ) as started:
        yield started
        started.check_nothing_left()


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of an answer, which must have all of OpenAI's fields."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "temperature='hot': "),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"temperature": True}, "temperature", "temperature=True: "),
        ({"n": 0}, "n", "n=0: must be an integer from 1"),
        ({"n": 9}, "n", "n=9: of 1 prompts are 9 outputs, of at most max_choices=8"),
        ({"n": 1.5}, "n", "n=1.5: "),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: "),
        ({"max_tokens": "many"}, "max_tokens", "max_tokens='many': "),
        ({"stop": 5}, "stop", "stop=5: "),
        ({"stop": ["a"] * 65}, "stop", "stop: has 65 entries, at most 64"),
        ({"stop": ["x"] * 100_000}, "stop", "stop: has 100000 entries, at most 64"),
        ({"stop": [""]}, "stop", "stop="),
        ({"stop": "a" * 5000}, "stop", "stop: has 5000 characters, at most 4096"),
        ({"bad_words": ["a" * 3000, "b" * 2000]}, "bad_words", "bad_words: has 5000 characters"),
        ({"allowed_token_ids": [5] * 5000}, "allowed_token_ids", "has 5000 entries, at most 4096"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "logit_bias"),
        ({"seed": "one"}, "seed", "seed='one': "),
        ({"top_p": 2}, "top_p", "top_p=2"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs=21: must be at most 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "prompt_logprobs=1: streams have none"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "'5': '1': must be a number"),
        (
            {"structured_outputs": {"json": DEEP, "disable_additional_properties": True}},
            "structured_outputs",
            "structured_outputs: json: is nested too deeply",
        ),
        ({"stream": "yes"}, "stream", "stream='yes': "),
        ({"stream_options": 1}, "stream_options", "stream_options=1: "),
        ({"speculation": {"num_speculative_tokens": -1}}, None, "num_speculative_tokens=-1"),
        (
            {"speculation": {"num_speculative_tokens": "lots"}},
            "speculation",
            ".num_speculative_tokens='lots': ",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format",
            "response_format: type='xml': must be text",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format",
            "response_format: cannot be followed: Invalid type: no",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex: cannot be followed"),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs: no rule is given"),
        ({"guided_regex": "("}, "guided_regex", "guided_regex: cannot be followed"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "did you mean 'regex'"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json", "guided_regex is given too"),
        (
            {"guided_choice": ["a" * 70_000]},
            "guided_choice",
            "has 70000 characters, at most max_grammar_chars",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "functions: is not served"),
        ({"tools": [{"type": "function"}]}, "tools", "tools"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids=[]"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_wrong_fields_are_named(
    server: Running, route: str, changed: dict[str, Any], param: str | None, message: str
) -> None:
    prompt: dict[str, Any] = {"messages": MESSAGES} if route == CHAT else {"prompt": "x"}
    with server.http() as http:
        response = http.post(route, json={"model": "tiny", **prompt, **changed})
    assert response.status_code == 400
    error = error_of(response)
    assert message in error["message"]
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        (CHAT, b'{"messages": []}', 400, "messages"),
        (CHAT, b'{"messages": [{"content": "x"}]}', 400, "messages[0]="),
        (CHAT, b'{"messages": [1]}', 400, "messages[0]=1: "),
        (CHAT, b"{}", 400, "messages: is missing"),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "content[0]"),
        (CHAT, ONE + b'"tools": [{"type": "function"}]}', 400, "tools[0].function: is missing"),
        (CHAT, ONE + b'"tools": [{"type": "x", "function": {"name": "f"}}]}', 400, "tools[0].type='x': "),
        (CHAT, ONE + b'"tools": [{"type": "function", "function": {"name": 1}}]}', 400, "tools[0].function"),
        (CHAT, ONE + b'"tool_choice": "required"}', 400, "tool_choice='required': needs `tools`"),
        (TEXT, b'{"prompt": ""}', 400, "prompt"),
        (TEXT, b'{"prompt": []}', 400, "prompt"),
        (TEXT, b'{"prompt": [[]]}', 400, "prompt"),
        (TEXT, b'{"prompt": [1, "x"]}', 400, "prompt"),
        (TEXT, b'{"prompt": [-5]}', 400, "prompt: token id -5"),
        (TEXT, b'{"prompt": [99999999999999999999]}', 400, "prompt: token id 99999999999999999999"),
        (TEXT, b'{"prompt": "x", "model": "gpt-9"}', 404, "model='gpt-9': is not served here"),
        (TEXT, b'{"prompt": "' + b"word " * 5000 + b'"}', 400, "max_model_len=256"),
        (TEXT, b'{"prompt": "' + b"x" * 70_000 + b'"}', 400, "prompt: has 70000 characters, at most 60000"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "' + b"x" * 70_000 + b'"}]}',
            400,
            "messages: has 70",
        ),
        (TEXT, b"", 400, "body: "),
        (TEXT, b"[]", 400, "body: "),
        (TEXT, b"null", 400, "body: "),
        (TEXT, b'{"prompt": "x"', 400, "body: Invalid JSON"),
        (TEXT, b'{"prompt": "\xff\xfe"}', 400, "body: Invalid JSON"),
        (TEXT, b'{"prompt": "\\ud800"}', 400, "body: Invalid JSON"),
        (TEXT, b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", 400, "out of range"),
        (TEXT, b'{"prompt": "x", "temperature": NaN}', 400, "body: Invalid JSON"),
        ("/v1/responses", b'{"input": "x", "metadata": {"a": -Infinity}}', 400, "body: Invalid JSON"),
        ("/tokenize", b'{"prompt": "' + b"x" * 70_000 + b'"}', 400, "prompt: has 70000 characters, at most"),
        ("/tokenize", ONE + b'"tools": [1]}', 400, "tools[0]=1: "),
        ("/tokenize", ONE + b'"prompt": "x"}', 400, "prompt: give either prompt or messages"),
        ("/detokenize", b'{"tokens": [' + b"5," * 70_000 + b"5]}", 400, "tokens: has 70001 entries, at most"),
        (TEXT, b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "recursion limit"),
        (TEXT, b"\x00" * 100, 400, "body: Invalid JSON"),
        (TEXT, b'{"prompt": "x", "stop": ["' + b"a" * 1_100_000 + b'"]}', 413, "max_body_bytes=1048576"),
        ("/v1/nothing", b"{}", 404, "POST /v1/nothing: Not Found"),
        ("/health", b"{}", 405, "POST /health: Method Not Allowed"),
    ],
)
def test_broken_bodies_are_refused(
    server: Running, route: str, body: bytes, status: int, message: str
) -> None:
    with server.http() as http:
        response = http.post(route, content=body, headers=JSON)
    assert response.status_code == status, response.text
    assert message in error_of(response)["message"]


def test_tools_without_a_parser_are_refused() -> None:
    """The server is configured without a tool parser."""
    with running(drafting(), tool_call_parser="none") as server, server.http() as http:
        tools = [{"type": "function", "function": {"name": "f"}}]
        response = http.post(CHAT, json={"messages": MESSAGES, "tools": tools})
        assert response.status_code == 400
        assert error_of(response)["message"].startswith("tools: is not served")


def test_a_nul_is_a_character_as_any_other(server: Running) -> None:
    with server.http() as http:
        assert http.post(TEXT, content=b'{"prompt": "a\\u0000b"}', headers=JSON).status_code == 200


def test_other_content_types_are_refused(server: Running) -> None:
    """A web page may send these types to any origin without a CORS preflight."""
    with server.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            response = http.post(TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": kind})
            assert response.status_code == 415
            assert error_of(response)["message"] == f"Content-Type='{kind}': must be application/json"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_body_of_100_megabytes_is_refused_unread(server: Running, is_told: bool) -> None:
    num_sent = 0

    def body() -> Iterator[bytes]:
        nonlocal num_sent
        yield b'{"prompt": "'
        for _ in range(100):
            num_sent += 1
            yield b"x" * (1 << 20)

    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONG)
    headers = {**JSON, **({"Content-Length": str(100 << 20)} if is_told else {})}
    try:
        connection.request("POST", TEXT, body(), headers, encode_chunked=not is_told)
    except (BrokenPipeError, ConnectionResetError):
        assert num_sent < 100  # the server closed the connection
    response = connection.getresponse()
    assert response.status == 413
    assert "max_body_bytes=1048576" in json.loads(response.read())["error"]["message"]
    connection.close()


def test_a_body_that_never_comes_is_not_waited_for(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), LONG) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ") and b"client_timeout=0.2" in answer


@pytest.mark.parametrize("start", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_connection_on_which_no_request_comes_is_closed(server: Running, start: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), LONG) as connection:
        connection.sendall(start)
        assert not connection.recv(1 << 16)


@pytest.mark.parametrize("num_bytes", [40_000, 400_000])
def test_a_head_that_is_too_long_is_told_how_long_it_may_be(server: Running, num_bytes: int) -> None:
    """The limit is named whether the headers come in one piece or several."""
    with server.http() as http:
        assert http.get("/version", headers={"X-Long": "x" * 20_000}).status_code == 200
        response = http.get("/version", headers={"X-Long": "x" * num_bytes})
        assert response.status_code == 431 and "32768 bytes" in error_of(response)["message"]
        assert http.get("/version").status_code == 200
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), LONG) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"invalid_request_error"' in answer


BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, MessagesBody, CountBody, ResponsesBody)


@pytest.mark.parametrize("kind", BODIES)
def test_of_a_million_wrong_entries_one_is_told(kind: type[Body]) -> None:
    """Reporting all of them would take a thousand times the body's memory."""
    many = 1000
    for name in kind.model_fields:
        names = [f"{number}" for number in range(many)]
        wrong = ([[]] * many, [["x"] * many], dict.fromkeys(names, "x"), dict.fromkeys(names, True))
        for value in wrong:
            try:
                kind.model_validate({name: value})
            except ValidationError as error:
                assert error.error_count() < 20, name


def test_a_fault_in_an_answer_is_not_the_requests(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a 500: a 400 would have clients change a correct request. The response announces the closed connection."""

    def fail(*given: Any) -> Any:
        raise ValueError("a bug of ours")

    with server.http() as http:
        for route, body in ((TEXT, {"prompt": "x"}), ("/v1/messages", {"messages": MESSAGES})):
            with monkeypatch.context() as patch:
                patch.setattr(Service, "usage", fail)
                response = http.post(route, json={**body, "max_tokens": 2})
            assert response.status_code == 500 and response.headers["connection"] == "close"
            assert "a bug of ours" not in response.text
            assert http.post(route, json={**body, "max_tokens": 2}).status_code == 200


def test_the_client_raises_what_openais_raises(server: Running) -> None:
    with pytest.raises(BadRequestError, match="temperature=-1") as caught:
        server.client().completions.create(model="tiny", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"


def test_ids_and_unread_fields_come_back(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 1, "future_field": 1, "odd\nname: x": 2, "request_id": "mine", "": 3}
    with server.http() as http:
        response = http.post(TEXT, json=body, headers={"X-Request-Id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        assert response.headers["x-unread-fields"] == "future_field, odd?name??x, ?"
        assert response.json()["id"] == "cmpl-mine"
        drawn = http.get("/version", headers={"X-Request-Id": "sp ace" * 50}).headers["x-request-id"]
        assert len(drawn) == 32
        many = {f"field{i}": i for i in range(2000)}
        response = http.post(TEXT, json={"prompt": "x", "max_tokens": 1, **many})
        assert response.headers["x-unread-fields"].endswith(", and 1984 more")


def test_keys_are_asked_for_everywhere_but_at_the_doors_of_balancers(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    same = limits.hmac.compare_digest

    def counted(first: bytes, second: bytes) -> bool:
        compared.append(len(first) + len(second))
        return same(first, second)

    monkeypatch.setattr(limits.hmac, "compare_digest", counted)

    async def main() -> None:
        async with local(drafting(), api_key=("first", "second", "voilà")) as (client, _):
            described = (await client.get("/openapi.json", headers=KEY)).json()["paths"]
            routes = [(route, way) for route, ways in described.items() for way in ways]
            assert len(routes) > 17 and ("/v1/responses/{response_id}", "delete") in routes
            routes += [("/nothing", "get"), ("/openapi.json", "get"), ("/metrics", "head"), ("/", "options")]
            for route, way in routes:
                for headers in ({}, {"Authorization": "Bearer secon"}, {"Authorization": "second"}):
                    response = await client.request(way, route, headers=headers)
                    is_open = route in ("/health", "/ready", "/")
                    assert (response.status_code == 401) != is_open, (route, way)
            compared.clear()
            for key in ("first", "second", "f", "", "x" * 1000):
                assert (await client.get("/version", headers={"X-Api-Key": key})).status_code in (200, 401)
            assert compared == [64] * 15, "as much is compared for any key"
            bearer = {"Authorization": "Bearer voilà".encode()}
            assert (await client.get("/version", headers=bearer)).status_code == 200
            for route in ("/health", "/ready"):
                assert (await client.get(route)).status_code == 200
                assert (await client.head(route)).status_code == 200
            assert (await client.get("/v1/models", headers=KEY)).status_code == 200
            response = await client.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers=KEY)
            assert response.status_code == 200

    asyncio.run(main())


def test_orders_ask_for_a_key() -> None:
    """Without a key the control routes do not exist."""

    async def main() -> None:
        async with local(drafting(), api_key=("second",)) as (client, service):
            assert (await client.post("/pause")).status_code == 401
            assert (await client.post("/pause", headers=KEY)).status_code == 200
            waiting = asyncio.create_task(
                client.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers=KEY)
            )
            await begun(service, 1)
            assert (await client.post("/reset_prefix_cache", headers=KEY)).status_code == 200
            assert not waiting.done()
            assert (await client.post("/resume", headers=KEY)).status_code == 200
            assert (await waiting).status_code == 200

    asyncio.run(main())


def test_the_schema_names_everything_it_refers_to(server: Running) -> None:
    with server.http() as http:
        schema = http.get("/openapi.json").json()
        assert http.post("/pause", json={}).status_code == 404  # the server has no key
    refers = set(re.findall(r'"#/([^"]+)"', json.dumps(schema)))
    assert "components/schemas/Speculation" in refers
    for reference in refers:
        found = schema
        for part in reference.split("/"):
            found = found[part]
    fields = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "top_logprobs", "speculation"} <= set(fields["properties"])


async def begun(service: Any, number: int) -> None:
    """Return once `number` requests are open."""
    while service.llm.num_open < number:
        await asyncio.sleep(0.001)


def test_too_much_at_once_is_asked_to_come_again() -> None:
    async def main() -> None:
        async with local(drafting(), max_open_requests=3, max_open_tokens=40) as (client, service):
            await service.llm.pause()
            body = {"prompt": [5] * 15, "max_tokens": 2}
            first = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(2)]
            await begun(service, 2)
            for changed in ({"n": 2}, {"prompt": [5] * 11}):
                response = await client.post(TEXT, json={**body, **changed})
                assert response.status_code == 429 and response.headers["retry-after"] == "1"
                assert error_of(response)["type"] == "rate_limit_error"
            assert (await client.get("/load")).json() == {"server_load": 2, "prompt_tokens": 30}
            assert "admission_rejections_total" in (text := (await client.get("/metrics")).text)
            assert 'admission_rejections_total{engine="0",model_name="tiny"} 2.0' in text
            await service.llm.resume()
            assert [(await task).status_code for task in first] == [200, 200]
            assert (await client.post(TEXT, json={**body, "n": 3, "prompt": "x"})).status_code == 200
            assert (await client.get("/load")).json() == {"server_load": 0, "prompt_tokens": 0}
            left = service.admission
            assert left.num_outputs == left.num_tokens == left.num_bytes == 0

    asyncio.run(main())


def test_bodies_of_all_that_are_open_have_room_for_so_many_bytes() -> None:
    async def main() -> None:
        async with local(drafting(), max_open_bytes=1000) as (client, service):
            await service.llm.pause()
            body = {"prompt": "x", "max_tokens": 2, "some": "x" * 700}
            for stream in (True, False):
                first = asyncio.create_task(client.post(TEXT, json={**body, "stream": stream}))
                await begun(service, 1)
                response = await client.post(TEXT, json=body)
                assert response.status_code == 429 and response.headers["retry-after"] == "1"
                assert "of max_open_bytes=1000; try again" in error_of(response)["message"]
                await service.llm.resume()
                assert (await first).status_code == 200 and service.admission.num_bytes == 0
                await service.llm.pause()
            await service.llm.resume()
            alone = {**body, "some": "x" * 2000}
            assert (await client.post(TEXT, json=alone)).status_code == 200

    asyncio.run(main())


def test_shutting_down_answers_everybody() -> None:
    async def main() -> None:
        async with local(drafting()) as (client, service):
            await service.llm.pause()
            body = {"prompt": "x", "max_tokens": 2}
            plain = asyncio.create_task(client.post(TEXT, json=body))
            streamed = asyncio.create_task(client.post(TEXT, json={**body, "stream": True}))
            scored = {**body, "stream": True, "echo": True, "logprobs": 1, "n": 2}
            scoring = asyncio.create_task(client.post(TEXT, json=scored))
            await begun(service, 3)
            service.is_draining = True
            response = await client.post(TEXT, json=body)
            assert response.status_code == 503 and "retry-after" in response.headers
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            await service.llm.shutdown()
            assert (await plain).status_code == 503
            for task, num_choices in ((streamed, 1), (scoring, 2)):
                *events, last = (await task).text.strip().split("\n\n")
                assert last == "data: [DONE]"
                assert sum('"finish_reason":"abort"' in event for event in events) == num_choices

    asyncio.run(main())


def test_a_fault_of_the_engine_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EngineCore) -> None:
        raise MemoryError("none left")

    async def main() -> None:
        async with local(drafting()) as (client, service):
            await service.llm.pause()
            body = {"prompt": "x", "max_tokens": 2}
            plain = asyncio.create_task(client.post(TEXT, json=body))
            streamed = asyncio.create_task(client.post(TEXT, json={**body, "stream": True}))
            await begun(service, 2)
            monkeypatch.setattr(EngineCore, "step", fail)
            await service.llm.resume()
            response = await plain
            assert response.status_code == 500 and "none left" in error_of(response)["message"]
            events = (await streamed).text.strip().split("\n\n")
            assert events[-1] == "data: [DONE]"
            assert "none left" in json.loads(events[-2][6:])["error"]["message"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.post(TEXT, json=body)).status_code == 503

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_not_computed_for(server: Running, stream: bool) -> None:
    """No step is made, so only the disconnection can end the request."""
    service = server.service
    server.run(service.llm.pause())
    before = service.llm.llm.stats.num_generated_tokens
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONG)
    connection.request("POST", TEXT, json.dumps({"prompt": "x", "stream": stream}), JSON)
    server.run(begun(service, 1))
    connection.close()
    server.check_nothing_left()
    assert service.llm.llm.stats.num_generated_tokens == before
    assert service.admission.num_outputs == service.admission.num_tokens == 0
    server.run(service.llm.resume())


def test_idle_streams_get_comments() -> None:
    with running(drafting(), keep_alive_interval=0.01) as server:
        server.run(server.service.llm.pause())
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONG)
        connection.request("POST", TEXT, '{"prompt": "x", "stream": true}', JSON)
        response = connection.getresponse()
        assert response.readline() == b": keep-alive\n"
        server.run(server.service.llm.resume())
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()


def test_stopping_lets_requests_end() -> None:
    """Requests that have begun are answered; then the server's thread ends."""
    with running(drafting()) as server:
        answers: list[int] = []
        server.run(server.service.llm.pause())

        def ask() -> None:
            with server.http() as client:
                answers.append(client.post(TEXT, json={"prompt": "x", "max_tokens": 3}).status_code)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        server.run(begun(server.service, 1))
        server.run(server.service.llm.resume())
    thread.join(LONG)
    assert answers == [200]
