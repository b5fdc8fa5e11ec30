"""Runs a server until a signal stops it; open requests are answered before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from types import FrameType

import uvicorn

from draftproof.frontend.async_llm import AsyncLLM
from draftproof.frontend.llm import LLM
from draftproof.runtime.collector import exempt_loaded
from draftproof.server.app import create_app
from draftproof.server.connections import MOST_HEADER_BYTES, Connection, Watch, allow_files, lending_writes
from draftproof.server.service import STEP_GRACE, Service
from draftproof.server.settings import ServerConfig

TICKS = 10  # uvicorn's ticks, of 0.1 s, between two checks for stalled connections
GRACE = 5  # seconds to send the last answers once the engine has ended


class Server(uvicorn.Server):
    """uvicorn's server. The first signal makes it refuse new requests and finish the running ones; a second one ends it
    at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        watch: Watch,
        told: Callable[[str], None] | None = None,
    ) -> None:
        """`told` is called with the server's address once it listens."""
        super().__init__(config)
        self._service = service
        self._watch = watch
        self._told = told or partial(_print_address, has_page=service.config.page)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            where = f"[{host}]" if ":" in host else host
            scheme = "http" if self._service.config.ssl_certfile is None else "https"
            self._told(f"{scheme}://{where}:{port}")

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS == 0:
            timeout = self._service.config.client_timeout
            self._watch.close_silent(timeout)
            self._watch.drop_unread(timeout)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Ends within `shutdown_timeout`, a step, and `GRACE`; connections that are still open then are aborted."""
        ending = asyncio.create_task(self._service.shut_down(0 if self.force_exit else None))
        try:
            await super().shutdown(sockets)
            if not self.force_exit:
                await ending
        finally:
            for connection in list(self.server_state.connections):
                connection.transport.abort()


def _print_address(address: str, *, has_page: bool) -> None:
    print(f"serving at {address}/v1", file=sys.stderr, flush=True)
    if has_page:
        print(f"a page to try it: {address}/", file=sys.stderr, flush=True)


def check_address(config: ServerConfig) -> None:
    """ValueError if the server could not listen; called before the model is loaded, which may take minutes."""
    try:
        found = getaddrinfo(config.host, config.port, type=SOCK_STREAM, flags=AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket(family, kind) as tried:
            tried.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise ValueError(
            f"host={config.host!r}, port={config.port}: nothing can listen there: {error.strerror}; give others"
        ) from None


def serve(llm: LLM, config: ServerConfig) -> None:
    """Serve until a signal; shuts the engine down."""
    allow_files(config.max_connections)
    exempt_loaded(llm)  # the server's objects, too
    service = Service(AsyncLLM(llm), config)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again after its shutdown
        make_server(service).run()
    if service.llm.is_alive:  # its step did not end, or a second signal came
        logging.shutdown()
        os._exit(1)  # a normal exit would wait for the thread


def make_server(service: Service, told: Callable[[str], None] | None = None) -> Server:
    """A server with the settings of its service; `told` as in `Server`."""
    config = service.config
    watch = Watch()
    settings = uvicorn.Config(
        lending_writes(create_app(service)),
        host=config.host,
        port=config.port,
        log_level="warning",
        access_log=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        http=partial(Connection, watch=watch),  # type: ignore[arg-type]
        ws="none",
        server_header=False,
        limit_concurrency=config.max_connections,
        backlog=config.max_connections,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout + STEP_GRACE + GRACE),
    )
    return Server(settings, service, watch, told)
