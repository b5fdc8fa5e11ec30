"""A server in its own process, and minimal clients, so that measuring costs little."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftproof import SamplingParams

ROUTE = "/v1/completions"


@dataclass
class Asked:
    """One request and its result."""

    body: dict[str, Any]
    leaves_after: int | None = None  # events
    text: str = ""
    finish_reason: str | None = None
    gaps: list[float] = field(default_factory=list)  # seconds between events
    token_ids: list[int] = field(default_factory=list)  # if the body requests them
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        return SamplingParams(**{name: self.body[name] for name in names if name in self.body})


def as_flag(name: str, value: object) -> list[str]:
    """A setting as command-line flags; empty for None."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


async def ask(address: tuple[str, int], asked: Asked, route: str = ROUTE) -> None:
    """Stream one answer."""
    body = json.dumps(asked.body | {"stream": True}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    loop = asyncio.get_running_loop()
    reading = Reading(asked, loop.create_future())
    transport, _ = await loop.create_connection(lambda: reading, *address)
    transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reading.over
    transport.close()


class Reading(asyncio.Protocol):
    """Receives one answer, event by event. `over`: done when it has ended, or the client has disconnected."""

    def __init__(self, asked: Asked, over: asyncio.Future[None]) -> None:
        self.over = over
        self._asked = asked
        self._rest = b""
        self._num_events, self._before = 0, time.perf_counter()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {") and not self.over.done():
                self._take(json.loads(line[6:]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _take(self, event: dict[str, Any]) -> None:
        now, asked = time.perf_counter(), self._asked
        asked.gaps.append(now - self._before)
        self._before, self._num_events = now, self._num_events + 1
        if "error" in event:
            asked.finish_reason = event["error"]["message"]
            self._end()
            return
        asked.usage = event.get("usage") or asked.usage
        if not event["choices"]:
            return
        choice = event["choices"][0]
        asked.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        asked.token_ids += choice.get("token_ids", ())
        asked.finish_reason = choice["finish_reason"] or asked.finish_reason
        if self._num_events == asked.leaves_after:
            self._end()


class Server:
    """`draftproof serve` in its own process, with settings of its engine."""

    def __init__(self, settings: Mapping[str, Any], *flags: str) -> None:
        own = [part for name, value in settings.items() for part in as_flag(name, value)]
        command = [sys.executable, "-m", "draftproof", "serve", "--port", "0", *own, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        last: deque[str] = deque(maxlen=20)
        for line in self.process.stderr:
            last.append(line)
            if line.startswith("serving at http://"):
                host, _, port = line.split()[2].removeprefix("http://").removesuffix("/v1").rpartition(":")
                self.address = (host, int(port))
                break
        else:
            raise RuntimeError(f"the server did not start; the last that it said:\n{''.join(last)}")
        self.log = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def rss(self) -> float:
        """Resident memory, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    async def metrics(self) -> dict[str, float]:
        """Values of /metrics by name, summed over labels."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("draftproof:"):
                name = line.removeprefix("draftproof:").partition("{")[0]
                found[name] = found.get(name, 0.0) + float(line.split()[-1])
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(60)
        self.log.kill()
        return status
