"""One replica's process, in the entry: it is started, sent messages, listened to, and restarted when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftproof.frontend.replicas import wire
from draftproof.frontend.replicas.routing import PrefixIndex
from draftproof.metrics import EngineLoad

log = logging.getLogger(__name__)
CODE = "from draftproof.frontend.replicas.child import main; main()"
MOST_STARTS = 5  # consecutive failures to start after which a replica is given up
EXIT_GRACE = 5.0  # seconds that a process has to end, before it is killed


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which a replica counts as dead: without a first message, without a further one, and in one step."""

    start: float = 300.0
    silent: float = 60.0
    step: float = 900.0


class Listener(Protocol):
    """The owner of the replicas; each replica calls it in its own thread."""

    def began(self, line: Line, hello: wire.Hello) -> str | None:
        """The process is ready: set `line.is_ready` and return None, or return why it may not be used."""
        ...

    def came(self, line: Line, message: wire.Stepped | wire.Answered) -> None: ...

    def lost(self, line: Line) -> None:
        """A process that was ready has died."""
        ...

    def gave_up(self, replica: Replica, failure: wire.Failed) -> None:
        """The replica will not be started again."""
        ...

    def progress(self, replica: Replica, what: str, done: int, total: int) -> None: ...


@dataclass(slots=True, eq=False)
class Line:
    """One process of a replica, from its start to its death. `index` and `load`: as it reported; `placed`: requests
    that it computes, by key; `calls`: futures of unanswered calls; `trial`: the suspect that it computes alone."""

    replica: Replica
    channel: wire.Channel
    process: subprocess.Popen[bytes]
    out: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    load: EngineLoad | None = None
    placed: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, Any] = field(default_factory=dict)
    trial: Any = None
    is_ready: bool = False

    def send(self, message: wire.ToReplica) -> None:
        """Queue a message. Never waits: another thread runs `write`."""
        self.out.put(self.channel.encode(message))

    def write(self) -> None:
        """Write the queued messages, until the end."""
        try:
            while (data := self.out.get()) is not None:
                self.channel.end.sendall(data)
        except OSError:  # closing the socket tells the listening thread
            with contextlib.suppress(OSError):
                self.channel.end.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Replica:
    """Starts its process, listens to it and restarts it, in a thread of its own, until `close`."""

    def __init__(
        self,
        number: int,
        setup: wire.Setup,
        environment: Mapping[str, str],
        listener: Listener,
        patience: Patience,
    ) -> None:
        self.number = number
        self.num_placed = 0
        self.line: Line | None = None
        self._setup = setup
        self._environment = environment
        self._listener = listener
        self._patience = patience
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"draftproof-replica-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the process and the thread; `join` waits for both."""
        self._closing.set()
        line = self.line
        if line is not None:
            with contextlib.suppress(OSError):
                line.channel.end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * EXIT_GRACE)

    def _run(self) -> None:
        try:
            self._keep_alive()
        except BaseException as error:
            log.exception("replica %d is left alone", self.number)
            self._listener.gave_up(self, wire.Failed(f"{type(error).__name__}: {error}", is_users=False))

    def _keep_alive(self) -> None:
        is_first, num_failed = True, 0
        while not self._closing.is_set():
            was_ready, failure = self._live()
            if self._closing.is_set():
                return
            num_failed = 0 if was_ready else num_failed + 1
            if num_failed and (is_first or num_failed == MOST_STARTS):
                self._listener.gave_up(self, failure or wire.Failed("did not start", is_users=False))
                return
            is_first = False
            if num_failed:
                self._closing.wait(2.0**num_failed / 2)

    def _live(self) -> tuple[bool, wire.Failed | None]:
        """Run one process from start to end; returns whether it was ready, and the failure if it was not."""
        line = self.line = self._spawn()
        writer = threading.Thread(target=line.write, daemon=True)
        writer.start()
        line.send(self._setup)
        failure = None
        try:
            if not self._closing.is_set():
                failure = self._listen(line)
        except wire.ClosedSocketError:
            pass
        except TimeoutError:
            log.error("replica %d: no sign of life for %g s", self.number, self._patience.silent)
            line.kill()
        line.out.put(None)
        how = self._reap(line)
        writer.join()
        line.channel.end.close()
        was_ready = line.is_ready
        if was_ready and not self._closing.is_set():
            log.error("replica %d has ended, %s; it is started again", self.number, how)
            self._listener.lost(line)
        return was_ready, failure or wire.Failed(f"ended while it was started, {how}", is_users=False)

    def _listen(self, line: Line) -> wire.Failed | None:
        """Handle messages until the process fails to start; returns why. Exceptions end it otherwise."""
        while True:
            message: wire.ToEntry = line.channel.read()
            line.channel.end.settimeout(self._patience.silent)
            match message:
                case wire.Stepped() | wire.Answered():
                    self._listener.came(line, message)
                case wire.Alive(step_seconds):
                    if step_seconds > self._patience.step:
                        log.error("replica %d: a step has taken %.0f s", self.number, step_seconds)
                        line.kill()
                case wire.Logged(level, name, text):
                    logging.getLogger(name).log(level, "replica %d: %s", self.number, text)
                case wire.Progressed(what, done, total):
                    self._listener.progress(self, what, done, total)
                case wire.Failed():
                    return message
                case wire.Hello():
                    refusal = self._listener.began(line, message)
                    if refusal is not None:
                        return wire.Failed(refusal, is_users=True)

    def _spawn(self) -> Line:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._patience.start)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", CODE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=dict(self._environment),
            start_new_session=True,  # so that only the entry gets Ctrl-C
        )
        theirs.close()
        return Line(self, wire.Channel(ours, wire.ToEntry), process)

    def _reap(self, line: Line) -> str:
        """Close the socket, which tells the process to end, and wait for it, killing it if needed. Returns how it
        ended."""
        with contextlib.suppress(OSError):
            line.channel.end.shutdown(socket.SHUT_RDWR)
        try:
            code = line.process.wait(EXIT_GRACE)
        except subprocess.TimeoutExpired:
            line.kill()
            code = line.process.wait()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


def environment(**changed: str) -> dict[str, str]:
    """This process's environment, with its import path and the changes."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **changed}
