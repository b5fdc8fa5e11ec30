"""Protection of the server: API keys, limits of one request, and limits of all open requests together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import hmac
import logging
import re
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftproof.server.errors import RefusalError, unavailable
from draftproof.server.logs import FACTS, REQUEST_ID
from draftproof.server.settings import ServerConfig

log = logging.getLogger(__name__)
OPEN_ROUTES = ("/health", "/ready")  # for load balancers, which have no key
RETRY_SECONDS = 1
GRACE_SECONDS = 1.0  # time that a thread has to end
T = TypeVar("T")
PLAIN = re.compile(r"[\x21-\x7e]{1,128}")  # request ids that are safe to send back in a header


class Gate:
    """Middleware: checks the key (except on `open_routes`), gives every request an id, sent back in a header, and
    answers 503 to requests that a server shutting down (`is_draining`) cancels. The request's state gets `at_end`, an
    ExitStack that is closed after the answer."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        is_draining: Callable[[], bool],
        open_routes: Collection[str] = OPEN_ROUTES,
    ) -> None:
        self._app = app
        self._open_routes = open_routes
        self._is_draining = is_draining
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if PLAIN.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)

        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                if message["status"] >= 400:
                    _log_refusal(scope, request_id, message["status"])
            await send(message)

        if self._digests and scope["path"] not in self._open_routes and not self._is_known(headers):
            refused = RefusalError(
                401, "Authorization: no such key; send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
            await JSONResponse(refused.body_for(scope["path"]), 401)(scope, receive, send_with_id)
            return
        try:
            with contextlib.ExitStack() as scope["state"]["at_end"]:
                await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not self._is_draining():
                raise
            if not has_begun:
                refused = unavailable("the server is shutting down")
                hang_up = {**refused.headers, "Connection": "close"}
                await JSONResponse(refused.body_for(scope["path"]), refused.status, hang_up)(
                    scope, receive, send_with_id
                )

    def _is_known(self, headers: Headers) -> bool:
        """Whether the request has a known key, in constant time: every digest is compared to its end. Headers come
        decoded as latin-1, which encoding reverses."""
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"
        scheme, _, key = given.partition(" ")
        digest = hashlib.sha256(key.strip(" \t").encode("latin-1")).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _log_refusal(scope: Scope, request_id: str, status: int) -> None:
    asked = f"{scope['method']} {scope['path']:.80}"
    facts = {"method": scope["method"], "path": f"{scope['path']:.80}", "status": status}
    log.info("%s: %r got %d", request_id, asked, status, extra={FACTS: facts})


async def read_body(request: Request, limits: ServerConfig, admission: Admission) -> bytes:
    """The body, within limits; its bytes count as held until the request has been answered. Refusals: 408 too slow, 413
    too long, 415 not JSON, 429 too many bytes are held."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # CORS: a page of another origin needs no preflight for other types
        raise RefusalError(415, f"Content-Type={kind!r:.80}: must be application/json")
    most = limits.max_body_bytes
    told = request.headers.get("content-length", "")
    if told.isdecimal() and (len(told) > 18 or int(told) > most):
        raise _too_long(most)
    parts: list[bytes] = []
    ticket = Ticket()
    request.state.at_end.callback(admission.leave, ticket)
    try:
        async with asyncio.timeout(limits.client_timeout):
            async for part in request.stream():
                if ticket.num_bytes + len(part) > most:
                    raise _too_long(most)
                admission.add_bytes(ticket, len(part))
                parts.append(part)
    except TimeoutError:
        message = f"body: took longer than client_timeout={limits.client_timeout:g} seconds"
        raise RefusalError(408, message, headers={"Connection": "close"}) from None
    return b"".join(parts)


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, untrusted Python code, run in its own thread; a 400 if it takes longer than `seconds`.

    The thread is then ended by an asynchronous exception. One that is inside a call of C code ends when that returns.
    """
    future: Future[T] = Future()

    def act() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=act, name="draftproof-template", daemon=True)
    thread.start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.done():
            _end_thread(thread)
            raise RefusalError(
                400,
                f"messages: the chat template took longer than chat_template_timeout={seconds:g} seconds; send less",
                param="messages",
                code="template_timeout",
            ) from None
        raise


def _end_thread(thread: threading.Thread) -> None:
    assert thread.ident is not None, "it was started"
    ended = ctypes.py_object(SystemExit)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ended)
    thread.join(GRACE_SECONDS)


def _too_long(most: int) -> RefusalError:
    message = f"body: is longer than max_body_bytes={most}; send less"
    return RefusalError(413, message, code="body_too_long", headers={"Connection": "close"})


@dataclass(slots=True)
class Ticket:
    """One request's share of the counts in `Admission`."""

    num_outputs: int = 0
    num_tokens: int = 0
    num_bytes: int = 0


class Admission:
    """Counts the outputs, prompt tokens and body bytes of open requests, and refuses requests beyond the limits."""

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self.num_outputs = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_refused = 0

    def enter(self, num_outputs: int) -> Ticket:
        """Admit a request of `num_outputs` outputs; the caller passes the ticket to `leave`. 429 for too many."""
        most = self._limits.max_open_requests
        if self.num_outputs + num_outputs > most:
            what = "this one alone asks for more than that" if num_outputs > most else "try again"
            raise self._refuse(f"{self.num_outputs} outputs are open, of max_open_requests={most}; {what}")
        self.num_outputs += num_outputs
        return Ticket(num_outputs)

    def add_tokens(self, ticket: Ticket, num_tokens: int) -> None:
        """Count a request's prompt tokens, once per output. 429 if too many are open."""
        most = self._limits.max_open_tokens
        if self.num_tokens + num_tokens > most and self.num_tokens > ticket.num_tokens:
            raise self._refuse(
                f"{self.num_tokens} prompt tokens are open, of max_open_tokens={most}; try again"
            )
        self.num_tokens += num_tokens
        ticket.num_tokens += num_tokens

    def add_bytes(self, ticket: Ticket, num_bytes: int) -> None:
        """Count a part of a body. 429 if too many bytes are held, including those of incomplete bodies."""
        most = self._limits.max_open_bytes
        if self.num_bytes + num_bytes > most and self.num_bytes > ticket.num_bytes:
            refusal = self._refuse(f"{self.num_bytes} bytes are held, of max_open_bytes={most}; try again")
            refusal.headers["Connection"] = "close"  # the rest of the body is not read
            raise refusal
        self.num_bytes += num_bytes
        ticket.num_bytes += num_bytes

    def leave(self, ticket: Ticket) -> None:
        """Release a ticket's counts. Idempotent."""
        self.num_outputs -= ticket.num_outputs
        self.num_tokens -= ticket.num_tokens
        self.num_bytes -= ticket.num_bytes
        ticket.num_outputs = ticket.num_tokens = ticket.num_bytes = 0

    def _refuse(self, message: str) -> RefusalError:
        self.num_refused += 1
        return RefusalError(429, message, code="overloaded", headers={"Retry-After": str(RETRY_SECONDS)})
