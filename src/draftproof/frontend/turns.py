"""Who may use an engine: the threads of the process that made it, one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_processes: set[int] = (
    set()
)  # ids of processes that made an engine: this one, and those that it was forked from


def claim_process() -> None:
    """RuntimeError in a process that was forked off one with an engine: the threads that compute are gone there, and
    whoever waits for them waits for ever."""
    if _processes - {os.getpid()}:
        raise RuntimeError(
            "LLM: this process was forked from one in which an LLM was made, and the threads that compute do not "
            "survive a fork; start it with multiprocessing's 'spawn' method (multiprocessing.get_context('spawn'))"
        )
    _processes.add(os.getpid())


@dataclass(slots=True, eq=False)
class _Waiter:
    """A thread for which others step."""

    done: Callable[[], bool]
    woken: threading.Event = field(default_factory=threading.Event)


class Turns:
    """Turns of the threads that share an engine. Whoever has the turn steps for everybody; the others sleep until what
    they wait for is there, or until it is theirs to step. So requests of many threads are one batch, and a thread that
    does nothing with a stream of its own is in nobody's way."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._put_off: deque[Callable[[], None]] = deque()
        self._waiters: list[_Waiter] = []

    def until(self, done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return once `done()`, a look at what steps have brought: steps are this thread's, or those of whichever
        thread has the turn. RuntimeErrors as in `take`."""
        self._check_caller()
        try:
            while not self._stepped(done, step) and not done():
                pass
        finally:
            self._wake_one()  # the turn may have been offered to us

    def _stepped(self, done: Callable[[], bool], step: Callable[[], None]) -> bool:
        """Whether the turn was free, and steps were made until `done`. Else it was waited for."""
        waiter = _Waiter(done)
        self._waiters.append(waiter)  # before the look at the turn: who gives it up later will find us
        try:
            if self._turn.acquire(blocking=False):
                self._step_until(done, step)
                return True
            if not done():
                waiter.woken.wait()
            return False
        finally:
            self._waiters.remove(waiter)

    def _step_until(self, done: Callable[[], bool], step: Callable[[], None]) -> None:
        """With the turn in hand, which is given up."""
        with self._holding():
            while not done():
                step()
                for waiter in list(self._waiters):
                    if not waiter.woken.is_set() and waiter.done():
                        waiter.woken.set()
                self._catch_up()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Wait for a turn and have it inside `with`. RuntimeError where this thread has one already (a drafter that
        asks its own engine for something), and in a forked process."""
        self._check_caller()
        self._turn.acquire()
        with self._holding():
            yield

    def _check_caller(self) -> None:
        self.check_process()
        if self._turn.locked() and self._holder == threading.get_ident():
            raise RuntimeError("LLM: called from within one of its own steps; call it when that has returned")

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
    def _holding(self) -> Iterator[None]:
        """The turn has been acquired; it is released at the end, and offered to a thread that waits."""
        self._holder = threading.get_ident()
        try:
            self._catch_up()
            yield
        finally:
            self._holder = None
            self._turn.release()
            self._catch_up_if_free()
            self._wake_one()

    def _wake_one(self) -> None:
        """Offer the turn to the thread that has waited longest, unless somebody has taken it."""
        if not self._turn.locked():
            for waiter in list(self._waiters):
                if not waiter.woken.is_set():
                    waiter.woken.set()
                    return

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
