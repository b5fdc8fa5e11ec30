"""A server that is shutting down answers all requests within a time limit, whatever clients or the engine do."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.clients import Server
from draftproof.frontend.async_llm import AsyncLLM, ClosedError
from draftproof.frontend.requests import Requests
from draftproof.grammar.matcher import GrammarCompiler
from draftproof.server import run, service
from tests.server.running import LONG, Running, drafting, running

TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}
HANGS = """
import threading
from draftproof import DraftSpec

class Hangs:
    spec = DraftSpec(host_tokens=True)

    def __init__(self, config):
        pass

    def propose(self, verified, num_drafts):
        threading.Event().wait()
"""


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter time limits."""
    monkeypatch.setattr(run, "GRACE", 0.2)
    monkeypatch.setattr(run, "STEP_GRACE", 0.2)
    monkeypatch.setattr(service, "STEP_GRACE", 0.2)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """An event that a test's code waits for; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith(("draftproof-engine", "draftproof-encoder")):
            thread.join(LONG)


def asked(server: Running, body: dict[str, Any], route: str = TEXT) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONG)
    connection.request("POST", route, json.dumps(body), JSON)
    return connection


def opened(server: Running, start: bytes = b"", size: int | None = None) -> socket.socket:
    """A connection on which `start` was sent; `size`: its receive buffer in bytes."""
    connection = socket.socket()
    if size is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    connection.settimeout(LONG)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    connection.sendall(start)
    return connection


def raw(body: dict[str, Any], missing: int = 0) -> bytes:
    """A request without its last `missing` bytes."""
    content = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[: len(content) - missing]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def unread_stream(server: Running) -> socket.socket:
    """A stream that its client never reads, once the server's write buffer is full."""
    for listening in server.server.servers[0].sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = {"prompt": "x", "stream": True, "logprobs": 20, "max_tokens": 250, "ignore_eos": True}
    connection = opened(server, raw(body), size=4096)
    server.run(until(lambda: any(one.flow.write_paused for one in server.server.server_state.connections)))
    return connection


def test_whoever_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is freed: nothing else ends a stream whose client neither reads nor disconnects."""
    with running(drafting(), client_timeout=0.1) as server:
        with unread_stream(server):
            server.run(until(lambda: server.service.admission.num_outputs == 0))
            server.run(until(lambda: not server.server.server_state.connections))
        server.check_nothing_left()


def test_whoever_reads_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is kept as long as it reads something between two checks."""
    with running(drafting(), client_timeout=10 * LONG) as server, unread_stream(server) as connection:
        (one,) = server.server.server_state.connections
        watch = {one: (0.0, one.transport.get_write_buffer_size() + 1)}
        monkeypatch.setattr(server.server._watch, "unread", watch)
        server.run(until(lambda: one.flow.write_paused))
        server.server._watch.drop_unread(1.0)
        assert not one.transport.is_closing() and watch[one][0] > 0.0
        watch[one] = 0.0, watch[one][1]
        server.loop.call_soon_threadsafe(server.server._watch.drop_unread, 1.0)
        server.run(until(lambda: one.transport.is_closing()))
        assert connection.recv(1)


def test_idle_connections_are_not_waited_for(hurried: None) -> None:
    with running(drafting(), shutdown_timeout=10 * LONG) as server:
        with server.http() as kept:
            assert kept.get("/health").status_code == 200
            silent = [opened(server), opened(server, b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: ")]
            server.stop()
        for connection in silent:
            assert not connection.recv(1), "it was closed"
            connection.close()


def test_whoever_reads_nothing_is_not_waited_for_longer_than_said(hurried: None) -> None:
    with running(drafting(), shutdown_timeout=0.2, client_timeout=10 * LONG) as server:
        connection = unread_stream(server)
        server.stop()
        answer = b""
        with connection:
            while part := connection.recv(1 << 16):
                answer += part
        assert answer and not answer.endswith(b"0\r\n\r\n"), "it was cut off"


def test_a_body_that_has_not_come_is_answered(hurried: None) -> None:
    with running(drafting(), shutdown_timeout=0.2, client_timeout=10 * LONG) as server:
        connection = opened(server, raw({"prompt": "x"}, missing=3))
        server.run(until(lambda: any(one.cycle for one in server.server.server_state.connections)))
        server.stop()
        with connection:
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer


def test_whoever_waits_to_be_encoded_is_answered_at_once(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizing thread is busy with a prompt, and others are queued for it."""
    with running(drafting(), shutdown_timeout=10 * LONG) as server:
        llm = server.service.llm
        entered = threading.Event()
        monkeypatch.setattr(Requests, "prepare", lambda *_: entered.set() or held.wait())
        connections = [asked(server, {"prompt": "x"})]
        assert entered.wait(LONG)
        connections += [asked(server, {"prompt": "x", "stream": i == 1}) for i in range(2)]
        connections.append(asked(server, {"prompt": "x"}, "/tokenize"))
        server.run(until(lambda: len(llm._prepared) == 4))
        server.stop()
        for connection in connections:
            response = connection.getresponse()
            text = response.read()
            assert response.status == 503 and response.headers["Retry-After"], text
            assert b"ask another" in text


def test_whoever_waits_for_a_grammar_is_answered_at_once(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(drafting(), shutdown_timeout=10 * LONG, grammar_timeout=10 * LONG) as server:
        monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: held.wait())
        connections = [asked(server, {"prompt": "x", "guided_regex": "a"}) for _ in range(4)]
        server.run(until(lambda: len(server.service.llm._prepared) == 4))
        server.stop()
        for connection in connections:
            response = connection.getresponse()
            text = response.read()
            assert response.status == 503 and response.headers["Retry-After"], text


def test_a_step_that_does_not_end_is_left_alone(
    hurried: None, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests are being computed, one more waits for a slot."""
    entered = threading.Event()

    def hang(self: Requests) -> None:
        entered.set()
        held.wait()

    with running(drafting(max_num_seqs=1), shutdown_timeout=0.2) as server:
        monkeypatch.setattr(Requests, "step", hang)
        connections = [asked(server, {"prompt": "x", "stream": i == 1, "n": 2 - i % 2}) for i in range(3)]
        server.run(until(lambda: server.service.llm.num_open == 3 and entered.is_set()))
        server.stop()
        assert server.service.llm.is_alive
        whole, streamed, waiting = (connection.getresponse() for connection in connections)
        assert whole.status == waiting.status == 503
        events = streamed.read().strip().split(b"\n\n")
        assert events[-1] == b"data: [DONE]" and b'"finish_reason":"abort"' in events[-2]


def test_an_answer_that_is_there_is_written_though_it_is_long_work(hurried: None) -> None:
    """Log-probabilities are rendered by the tokenizing thread, which has ended by then."""
    with running(drafting()) as server:
        server.run(server.service.llm.pause())
        connection = asked(server, {"prompt": "x", "max_tokens": 4, "logprobs": 2, "ignore_eos": True})
        llm = server.service.llm
        server.run(until(lambda: llm.num_open == 1))
        server.server.should_exit = True
        server.run(until(lambda: llm.error is not None))
        server.run(llm.resume())
        server.stop()
        response = connection.getresponse()
        assert response.status == 200
        assert len(json.loads(response.read())["choices"][0]["logprobs"]["tokens"]) == 4


def test_of_two_shutdowns_the_sooner_end_counts(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        monkeypatch.setattr(Requests, "step", lambda _: held.wait())
        stream = llm.begin(await llm.prepare("x"))
        await llm.shutdown(0.0, 0.01)
        await asyncio.wait_for(llm.shutdown(10 * LONG, 0.01), LONG)
        assert [delta.finish_reason async for delta in stream] == ["abort"]
        with pytest.raises(ClosedError):
            await llm.prepare("x")

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_the_process_ends_though_its_drafter_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_signals: int
) -> None:
    (tmp_path / "hanging.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    timeout = "0" if num_signals == 1 else str(10 * LONG)
    settings = {"speculative_config": {"method": "hanging.Hangs"}, "max_model_len": 256}
    server = Server(settings, "--shutdown-timeout", timeout, "--keep-alive-interval", "0.1")
    connection = http.client.HTTPConnection(*server.address, timeout=LONG)
    connection.request("POST", TEXT, json.dumps({"prompt": "x", "stream": True}), JSON)
    assert connection.getresponse().readline() == b": keep-alive\n"
    for _ in range(num_signals - 1):
        server.process.send_signal(signal.SIGINT)
        while connection_taken(server):
            pass
    assert server.stop() == 1
    connection.close()


def connection_taken(server: Server) -> bool:
    """Whether a server still accepts connections."""
    try:
        socket.create_connection(server.address, LONG).close()
    except ConnectionError:
        return False
    return True
