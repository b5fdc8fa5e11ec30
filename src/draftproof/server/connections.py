"""Connections of clients: how many there may be, and how long one may be idle."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from h11 import IDLE, SEND_RESPONSE, Data, EndOfMessage, RemoteProtocolError, Response
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from draftproof.server.errors import RefusalError
from draftproof.server.limits import RETRY_SECONDS
from draftproof.server.streaming import WRITE

MOST_HEADER_BYTES = 1 << 15
PIECE = 1 << 12
TOO_LONG = 431  # status for headers beyond MOST_HEADER_BYTES
ROOM_FOR_FILES = 256  # file descriptors reserved for other uses: weights, listening sockets, logs


class Watch:
    """Stalled connections. `silent`: those without an open request, longest first; may include some that have one by
    now. `unread`: those whose write buffer is full -> (time of the client's last read, bytes buffered)."""

    def __init__(self) -> None:
        self.silent: dict[Connection, None] = {}
        self.unread: dict[Connection, tuple[float, int]] = {}

    def close_silent(self, timeout: float) -> None:
        """Close connections without a request for `timeout` seconds; uvicorn itself waits for headers for ever."""
        now = time.monotonic()
        for connection in list(self.silent):
            if now - connection.silent_since < timeout:
                return  # ordered by time: all others are younger
            del self.silent[connection]
            if connection.is_silent:
                connection.transport.close()

    def drop_unread(self, timeout: float) -> None:
        """Abort connections whose client has read nothing for `timeout` seconds; their buffered bytes are dropped."""
        now = time.monotonic()
        for connection, (since, size) in list(self.unread.items()):
            left = connection.transport.get_write_buffer_size()
            if left < size:
                self.unread[connection] = now, left
            elif now - since >= timeout:
                connection.transport.abort()


class Connection(H11Protocol):
    """uvicorn's connection with a limit: beyond `limit_concurrency` connections the longest silent one is closed, so
    idle clients cannot keep others out; if all are being served, the new one's request gets a 503.
    """

    def __init__(self, *args: Any, watch: Watch, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._silent, self._unread = watch.silent, watch.unread
        self.silent_since = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether no request has come, or all have been answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most and not self._make_room():
            refused = RefusalError(
                503, f"max_connections={self._most}: all are being served; try again", code="overloaded"
            )
            headers = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
            self.app = JSONResponse(refused.body(), refused.status, headers)
        self._fall_silent()

    def data_received(self, data: bytes) -> None:
        """Feed headers to the parser in pieces, since it checks their length only while they are incomplete."""
        size = PIECE if self.is_silent else len(data)
        for start in range(0, len(data), size):
            if not self.transport.is_closing():
                super().data_received(data[start : start + size])

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_silent and not self.transport.is_closing():
            self._fall_silent()

    def connection_lost(self, exc: Exception | None) -> None:
        self._silent.pop(self, None)
        self._unread.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread[self] = time.monotonic(), self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request with our error object; for headers that are too long it names the limit. uvicorn
        calls this while it handles the parser's error."""
        if self.conn.our_state not in (IDLE, SEND_RESPONSE):  # a response has begun already
            self.transport.close()
            return
        wrong = sys.exc_info()[1]
        status = wrong.error_status_hint if isinstance(wrong, RemoteProtocolError) else 400
        if status == TOO_LONG:
            msg = f"headers: are longer than {MOST_HEADER_BYTES} bytes; send less"
        content = bytes(JSONResponse(RefusalError(status, msg).body()).body)
        headers = [("Content-Type", "application/json"), ("Connection", "close")]
        headers.append(("Content-Length", str(len(content))))
        for event in (Response(status_code=status, headers=headers), Data(content), EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _fall_silent(self) -> None:
        self.silent_since = time.monotonic()
        self._silent.pop(self, None)
        self._silent[self] = None

    def _make_room(self) -> bool:
        """Close the connection that has been silent for longest; returns whether there was one."""
        while self._silent:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            if oldest.is_silent and not oldest.transport.is_closing():
                oldest.transport.close()
                return True
        return False


def lending_writes(app: ASGIApp) -> ASGIApp:
    """`app` with a function in its scope that writes parts of a body directly, past uvicorn's and h11's bookkeeping,
    which dominates the cost of a short event. Only for chunked bodies (HTTP/1.1), between start and end."""

    async def lend(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle) and scope["http_version"] == "1.1":
            scope["state"][WRITE] = partial(_write_chunk, cycle)
        await app(scope, receive, send)

    return lend


async def _write_chunk(cycle: RequestResponseCycle, part: bytes) -> None:
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def allow_files(num_connections: int) -> None:
    """Raise the process's limit of open files to hold `num_connections`, as far as the system allows."""
    try:
        import resource
    except ImportError:  # not on Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + ROOM_FOR_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
