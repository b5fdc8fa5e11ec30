"""A server on a free port, in a thread, for tests that talk to it as clients do."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from draftproof import LLM, assets
from draftproof.frontend.async_llm import AsyncLLM
from draftproof.server.app import create_app
from draftproof.server.run import Server, make_server
from draftproof.server.service import Service
from draftproof.server.settings import ServerConfig

LONG = 120  # seconds after which a test gives up waiting
EAGLE3 = {"model": str(assets.path("tiny-eagle3")), "num_speculative_tokens": 4}
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}


def drafting(**settings: Any) -> LLM:
    """An engine with a drafter, and few slots and blocks."""
    return LLM(**{"speculative_config": EAGLE3, "num_kv_blocks": 40, **ENGINE, **settings})


@dataclass
class Running:
    """A running server: its address, and the loop and thread that it runs in."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop
    server: Server
    thread: threading.Thread

    def stop(self) -> None:
        """Stop the server as a signal does; return once it has ended."""
        self.server.should_exit = self.service.is_draining = True
        self.thread.join(LONG)
        assert not self.thread.is_alive(), "the server is stuck"

    def client(self, **settings: Any) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": LONG, **settings}
        )

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LONG)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LONG)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG)

    def check_nothing_left(self) -> None:
        """Assert that all blocks, slots and admissions are free once all requests are over."""
        self.run(self.service.llm.drained())
        llm, scheduler = self.service.llm.llm, self.service.llm.llm.engine.scheduler
        scheduler.pages.check_integrity()
        assert scheduler.pages.num_free == scheduler.pages.num_blocks - 1
        assert not scheduler.running and not scheduler.waiting and not llm.requests.running
        assert self.service.llm.num_open == 0


@contextlib.contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[Running]:
    """A server over `llm`, which is shut down at the end."""
    service = Service(AsyncLLM(llm), ServerConfig(port=0, **settings))
    address: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop]] = queue.SimpleQueue()
    server = make_server(service, lambda url: address.put((url, asyncio.get_running_loop())))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    url, loop = address.get(timeout=LONG)
    started = Running(url, service, loop, server, thread)
    try:
        yield started
    finally:
        started.stop()


@contextlib.asynccontextmanager
async def local(llm: LLM, **settings: Any) -> Any:
    """(client, service) of the application without a port; responses arrive whole. Shuts the engine down at the end."""
    service = Service(AsyncLLM(llm), ServerConfig(**settings))
    transport = httpx.ASGITransport(create_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=LONG) as client:
            yield client, service
    finally:
        await service.llm.shutdown()
