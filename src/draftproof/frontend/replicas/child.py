"""A replica: an engine in a process of its own, which serves the requests of its entry.

The main thread makes the steps. Another reads the entry's messages, so that the entry never waits for a step, and ends
the process when the entry is gone; a third sends heartbeats. Grammars are compiled in a thread pool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import Resumed
from draftproof.engine.items import ItemInput
from draftproof.frontend.llm import LLM
from draftproof.frontend.replicas import wire
from draftproof.types import SamplingParams

ALIVE_INTERVAL = 1.0  # seconds between two heartbeats
LOAD_INTERVAL = 0.1  # least seconds between two reports of counters while steps are made
OWN_LOGGER = "draftproof"


class ReplicaLLM(LLM):
    """An `LLM` whose engine is in this process, although its settings ask for replicas."""

    @property
    def has_replicas(self) -> bool:
        return False


class Forward(logging.Handler):
    """Sends log records to the entry."""

    def __init__(self, channel: wire.Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(wire.ClosedSocketError):
            self._channel.send(wire.Logged(record.levelno, record.name, self.format(record)))


class Replica:
    """Runs the engine and serves the entry's messages. `step_started`: when the current step began, 0 between steps."""

    def __init__(self, channel: wire.Channel) -> None:
        self._channel = channel
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._compiler = ThreadPoolExecutor(2, "draftproof-grammars")
        self._compiling: set[int] = set()  # requests whose grammars are being compiled
        self._inputs: dict[int, list[ItemInput]] = {}  # of running requests; the store refers to them weakly
        self._load_sent = 0.0
        self.step_started = 0.0
        self.llm: LLM | None = None

    # In a thread that reads.

    def read(self) -> None:
        """Queue the entry's messages; once the entry is gone, end the process."""
        try:
            while True:
                self._actions.put(partial(self._do, self._channel.read()))
        except BaseException as error:
            if not isinstance(error, wire.ClosedSocketError):
                sys.stderr.write(f"draftproof replica: {type(error).__name__}: {error}\n")
        finally:
            os._exit(0)

    def tell_alive(self) -> None:
        """Send heartbeats until the entry is gone."""
        with contextlib.suppress(wire.ClosedSocketError):
            while True:
                started = self.step_started
                self._channel.send(wire.Alive(time.monotonic() - started if started else 0.0))
                time.sleep(ALIVE_INTERVAL)

    # In the thread that makes steps.

    def run(self, llm: LLM) -> None:
        """Make steps, and run queued messages between them, until the engine fails."""
        self.llm = llm
        engine = llm.engine
        while engine.error is None:
            if not engine.is_due:
                self._actions.get()()
            while not self._actions.empty():
                self._actions.get()()
            if engine.is_due:
                self._step()

    def _step(self) -> None:
        assert self.llm is not None
        engine = self.llm.engine
        self.step_started = time.monotonic()
        deltas = engine.step()
        self.step_started = 0.0
        if engine.error is not None:  # the entry gives these requests to other replicas
            deltas = [delta for delta in deltas if delta.finish_reason != "error"]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._inputs.pop(int(delta.id), None)
        events = engine.take_cache_events()
        self.llm.requests.publish(events)
        now, load = time.monotonic(), None
        if now - self._load_sent >= LOAD_INTERVAL or not engine.is_due:
            self._load_sent, load = now, engine.loads()[0]
        if deltas or events or load:
            self._channel.send(wire.Stepped(deltas, wire.pack_events(events), load))

    def _do(self, message: wire.ToReplica) -> None:
        match message:
            case wire.Start():
                self._start(message)
            case wire.Abort(key):
                self._compiling.discard(key)
                self._inputs.pop(key, None)
                self._engine().abort(str(key))
            case wire.Reset(call):
                self._engine().reset_prefix_cache()
                self._tell_events()
                self._channel.send(wire.Answered(call, []))
            case wire.Pause(call, is_paused):
                self._engine().set_paused(is_paused)
                self._channel.send(wire.Answered(call, []))
            case wire.Draft():
                self._draft(message)

    def _tell_events(self) -> None:
        events = self._engine().take_cache_events()
        assert self.llm is not None
        self.llm.requests.publish(events)
        self._channel.send(wire.Stepped([], wire.pack_events(events), self._engine().loads()[0]))

    def _engine(self) -> Any:
        assert self.llm is not None, "whoever asks has been told that it is ready"
        return self.llm.engine

    def _start(self, message: wire.Start) -> None:
        assert self.llm is not None
        params = SamplingParams(**message.spec.params)
        if params.structured_outputs is None:
            self._queue(message, params, None)
            return
        self._compiling.add(message.key)
        inputs = self.llm.requests.inputs

        def work() -> None:
            try:
                grammar = inputs.grammar(params)  # the entry has compiled it already, so it is valid
            except Exception as error:
                told = TokenDelta(str(message.key), finish_reason="error", error=str(error))
                self._actions.put(partial(self._fail_compiled, message.key, told))
            else:
                self._actions.put(partial(self._queue_compiled, message, params, grammar))

        self._compiler.submit(work)

    def _queue_compiled(self, message: wire.Start, params: SamplingParams, grammar: Any) -> None:
        if message.key in self._compiling:  # else the request was aborted
            self._compiling.discard(message.key)
            self._queue(message, params, grammar)

    def _fail_compiled(self, key: int, told: TokenDelta) -> None:
        if key in self._compiling:
            self._compiling.discard(key)
            self._channel.send(wire.Stepped([told], [], None))

    def _queue(self, message: wire.Start, params: SamplingParams, grammar: Any) -> None:
        assert self.llm is not None
        store = self.llm.items
        self._inputs[message.key] = [store.hold(wire.unpack_item(item)) for item in message.items]
        spec = wire.unpack_spec(message.spec, params, grammar)
        resumed = None if message.resumed is None else Resumed(*message.resumed)
        self._engine().add_request(str(message.key), spec, resumed)

    def _draft(self, message: wire.Draft) -> None:
        spec = wire.unpack_spec(message.spec, SamplingParams(**message.spec.params), None)
        try:
            ids = self._engine().draft(spec, message.num_drafts)
        except ValueError as error:
            self._channel.send(wire.Answered(message.call, [], str(error)))
        else:
            self._channel.send(wire.Answered(message.call, ids))


def hello(llm: LLM) -> wire.Hello:
    """The message that the engine is ready."""
    return wire.Hello(
        fingerprint=llm.fingerprint,
        files=files_of(llm.directory),
        max_model_len=llm.max_model_len,
        num_drafts=llm.num_speculative_tokens,
        methods=llm.methods,
        memory=asdict(llm.memory),
        arithmetic=llm.arithmetic,
        operators=llm.operators,
        device_name=llm.device_name,
        load=llm.engine.loads()[0],
    )


def files_of(directory: Path) -> str:
    """Names, sizes and times of a model's files: shows a replica that starts later that they were replaced."""
    found = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file()]
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in found)


def make(setup: wire.Setup, channel: wire.Channel) -> LLM:
    """Build the engine that `setup` describes."""
    torch.set_num_threads(setup.num_threads)
    forward = Forward(channel)
    forward.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger(OWN_LOGGER)
    own.setLevel(setup.log_level)
    own.addHandler(forward)
    own.propagate = False

    def show(what: str, done: int, total: int) -> None:
        channel.send(wire.Progressed(what, done, total))

    settings: Mapping[str, Any] = setup.settings
    llm = ReplicaLLM(**settings, progress=show, replica=setup.number)
    llm.engine.keep_cache_events()
    return llm


def main() -> None:
    """`python -c 'from draftproof.frontend.replicas.child import main; main()' FD`."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a signal to the process group is for the entry, which then ends this process
        signal.signal(number, signal.SIG_IGN)
    channel = wire.Channel(socket.socket(fileno=int(sys.argv[1])), wire.ToReplica)
    try:
        setup = channel.read()
    except wire.ClosedSocketError:
        return
    replica = Replica(channel)
    for work in (replica.read, replica.tell_alive):
        threading.Thread(target=work, daemon=True).start()
    try:
        llm = make(setup, channel)
    except BaseException as error:
        is_users = isinstance(error, ValueError)
        text = str(error) if is_users else f"{type(error).__name__}: {error}"
        channel.send(wire.Failed(text, is_users))
        os._exit(1)
    channel.send(hello(llm))
    try:
        replica.run(llm)
        channel.send(wire.Logged(logging.ERROR, OWN_LOGGER, str(llm.engine.error)))
    except BaseException as error:
        logging.getLogger(OWN_LOGGER).exception("the engine has failed: %s", error)
    os._exit(1)
