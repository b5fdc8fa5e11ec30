"""Silent connections and slow chat templates do not keep other clients out."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from draftproof.server import run
from draftproof.server.connections import ROOM_FOR_FILES, allow_files
from draftproof.server.settings import ServerConfig
from tests.server.running import LONG, Running, drafting, running

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MOST = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(drafting(), max_connections=MOST, chat_template_timeout=0.05) as started:
        yield started


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), LONG)


def ask(server: Running, route: str, **body: object) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONG)
    connection.request("POST", route, json.dumps(body), {**JSON, "Connection": "close"})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_silent_connections_give_way_longest_first(server: Running) -> None:
    silent = [connect(server) for _ in range(3 * MOST)]
    assert ask(server, TEXT, prompt="x", max_tokens=1)[0] == 200
    for connection in silent[: 2 * MOST]:
        assert not connection.recv(1), "it was closed"
    silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert silent[-1].recv(1 << 12).startswith(b"HTTP/1.1 200 ")
    for connection in silent:
        connection.close()


def test_where_all_are_served_a_newcomer_gets_a_503(server: Running) -> None:
    service = server.service
    server.run(service.llm.pause())
    body = json.dumps({"prompt": "x", "max_tokens": 1, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    served = [connect(server) for _ in range(MOST)]
    for connection in served:
        connection.sendall(head.encode() + body)
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
    status, answer = ask(server, TEXT, prompt="x")
    assert status == 503 and answer["error"]["type"] == "server_error"  # type: ignore[index]
    assert f"max_connections={MOST}" in str(answer)
    server.run(service.llm.resume())
    for connection in served:
        while not connection.recv(1 << 16).endswith(b"0\r\n\r\n"):
            pass
    assert ask(server, TEXT, prompt="x", max_tokens=1)[0] == 200, "those that were served give way now"
    for connection in served:
        connection.close()


@pytest.mark.parametrize("route", [CHAT, "/tokenize"])
def test_a_chat_template_has_so_much_time(
    server: Running, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    tokenizer = server.service.llm.llm.tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer._hugging_face(), "chat_template", ENDLESS)
        status, answer = ask(server, route, messages=MESSAGES)
    assert status == 400 and "chat_template_timeout=0.05" in str(answer)
    for thread in threading.enumerate():
        if thread.name == "draftproof-template":
            thread.join(LONG)
            assert not thread.is_alive(), "what nobody waits for has ended"
    assert ask(server, CHAT, messages=MESSAGES, max_tokens=1)[0] == 200


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_chat_template_is_kept_in_its_sandbox(
    server: Running, monkeypatch: pytest.MonkeyPatch, template: str, why: str
) -> None:
    """A template that fails is answered with a 400, not a 500."""
    monkeypatch.setattr(server.service.llm.llm.tokenizer._hugging_face(), "chat_template", template)
    monkeypatch.setattr(server.service, "config", replace(server.service.config, chat_template_timeout=LONG))
    status, answer = ask(server, CHAT, messages=MESSAGES)
    assert status == 400 and why in str(answer), answer


def test_the_process_may_open_as_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    for limits in ((1024, 4096), (1024, 1500), (1 << 20, 1 << 20), (1024, resource.RLIM_INFINITY)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        allow_files(2048)
    wanted = 2048 + ROOM_FOR_FILES
    assert given == [(wanted, 4096), (1500, 1500), (wanted, resource.RLIM_INFINITY)]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_events_are_framed_as_the_client_reads_them(server: Running, version: str) -> None:
    """HTTP/1.0 has no chunked bodies; with HTTP/1.1 each event is a chunk."""
    body = json.dumps({"prompt": "x", "max_tokens": 3, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with connect(server) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert (b"chunked" in headers) == (version == "1.1")
    events = content.split(b"\n\n")
    if version == "1.0":
        assert all(event.startswith(b"data: ") for event in events[:-1]) and not events[-1]
        assert events[-2] == b"data: [DONE]"
    else:
        assert content.endswith(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        sizes = [int(event.split(b"\r\n")[-2], 16) for event in events[:-1]]
        assert sizes == [len(event.split(b"\r\n")[-1]) + 2 for event in events[:-1]]


def test_what_is_loaded_is_not_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full garbage collection would scan all objects of torch and a model, for some tenths of a second."""
    counts: list[int] = []

    def count(server: run.Server) -> None:
        counts.append(gc.get_freeze_count())
        asyncio.run(server._service.shut_down(0))

    monkeypatch.setattr(run.Server, "run", count)
    try:
        with drafting() as llm:
            run.serve(llm, ServerConfig(port=0))
    finally:
        gc.unfreeze()
    assert counts[0] > 10_000
