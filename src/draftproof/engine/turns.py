"""Who may use an engine: the threads of the process that made it, one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

_processes: set[int] = set()  # that have made an engine: this one, and those that it was forked from


def claim_process() -> None:
    """RuntimeError in a process that was forked off one with an engine: OpenMP's threads are gone there, and whoever
    waits for them waits for ever."""
    if _processes - {os.getpid()}:
        raise RuntimeError(
            "LLM: this process was forked from one in which an LLM was made, and the threads that compute do not "
            "survive a fork; start it with multiprocessing's 'spawn' method (multiprocessing.get_context('spawn'))"
        )
    _processes.add(os.getpid())


class Turns:
    """Turns of the threads that share an engine. A turn is short, a step of the engine, so that a thread which does
    nothing with a stream of its own is in nobody's way."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._queue, self._turn = threading.Lock(), threading.Lock()
        self._holder: int | None = None
        self._put_off: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Wait for a turn and have it inside `with`. RuntimeError where this thread has one already (a drafter that
        asks its own engine for something), and in a forked process."""
        self.check_process()
        if self._turn.locked() and self._holder == threading.get_ident():
            raise RuntimeError("LLM: called from within one of its own steps; call it when that has returned")
        with contextlib.ExitStack() as turn:
            with self._queue:  # a thread that comes back for its next turn stands behind those that wait
                turn.enter_context(self._own())
            yield

    def soon(self, action: Callable[[], None]) -> None:
        """Do it now where nobody has a turn, else when that one ends, at the latest when the next begins. Never waits:
        this may be the garbage collector's call, or a signal handler's, in the middle of a step. Nothing is done in a
        forked process."""
        if self._process != os.getpid():
            return
        self._put_off.append(action)
        self._catch_up_if_free()

    def check_process(self) -> None:
        """RuntimeError in a process that was forked off the engine's."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"LLM: was made in process {self._process} and cannot be used in {os.getpid()}, forked from it: the "
                "threads that compute do not survive a fork; start processes with multiprocessing's 'spawn' method "
                "(multiprocessing.get_context('spawn')), and make an LLM in each"
            )

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        try:
            with self._turn:
                self._holder = threading.get_ident()
                try:
                    self._catch_up()
                    yield
                finally:
                    self._holder = None
        finally:
            self._catch_up_if_free()

    def _catch_up_if_free(self) -> None:
        """Where the turn is another's, that one looks again when it has released it: nothing is left behind."""
        while self._put_off and self._turn.acquire(blocking=False):
            self._holder = threading.get_ident()
            try:
                self._catch_up()
            finally:
                self._holder = None
                self._turn.release()

    def _catch_up(self) -> None:
        while self._put_off:
            self._put_off.popleft()()
