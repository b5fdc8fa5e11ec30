"""Mutual exclusion for an engine: threads of the process that made it use it one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_processes: set[int] = set()  # ids of processes that made an engine: this one and, after a fork, its parents


def claim_process() -> None:
    """Register this process. RuntimeError if it was forked from one with an engine: the compute threads do not exist in
    it, so waiting for them would never end."""
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
    """Turns of the threads that share an engine. The thread with the turn steps for all; the others sleep until their
    condition holds, or until the turn is offered to them. So requests of many threads form one batch, and a thread that
    pauses its stream blocks no other."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._put_off: deque[Callable[[], None]] = deque()
        self._waiters: list[_Waiter] = []

    def until(self, done: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return once `done()`, which checks the results of steps. Steps are run by this thread, or by the one with the
        turn. RuntimeErrors as in `take`."""
        self.check_caller()
        try:
            while not self._stepped(done, step) and not done():
                pass
        finally:
            self._wake_one()  # the turn may have been offered to this thread, which no longer needs it

    def _stepped(self, done: Callable[[], bool], step: Callable[[], None]) -> bool:
        """If the turn was free, step until `done` and return True; else wait to be woken and return False."""
        waiter = _Waiter(done)
        self._waiters.append(
            waiter
        )  # before trying the turn, so that a thread that releases it later finds this one
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
        """Step until `done`, with the turn acquired; release it at the end."""
        with self._holding():
            while not done():
                step()
                for waiter in list(self._waiters):
                    if not waiter.woken.is_set() and waiter.done():
                        waiter.woken.set()
                self._catch_up()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Context manager that waits for the turn and holds it. RuntimeError if this thread has it already (a drafter
        that calls its own engine), and in a forked process."""
        self.check_caller()
        self._turn.acquire()
        with self._holding():
            yield

    def check_caller(self) -> None:
        """Raise RuntimeError as in `take`."""
        self.check_process()
        if self._turn.locked() and self._holder == threading.get_ident():
            raise RuntimeError("LLM: called from within one of its own steps; call it when that has returned")

    def soon(self, action: Callable[[], None]) -> None:
        """Run the action now if the turn is free, else when the turn ends, at the latest when the next begins. Never
        waits: the caller may be the garbage collector or a signal handler in the middle of a step. Does nothing in a
        forked process."""
        if self._process != os.getpid():
            return
        self._put_off.append(action)
        self._catch_up_if_free()

    def check_process(self) -> None:
        """Raise RuntimeError in a process forked from the engine's."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"LLM: was made in process {self._process} and cannot be used in {os.getpid()}, forked from it: the "
                "threads that compute do not survive a fork; start processes with multiprocessing's 'spawn' method "
                "(multiprocessing.get_context('spawn')), and make an LLM in each"
            )

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Context manager for an acquired turn: releases it at the end, and offers it to a waiting thread."""
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
        """Offer the turn to the thread that has waited longest, unless it is taken."""
        if not self._turn.locked():
            for waiter in list(self._waiters):
                if not waiter.woken.is_set():
                    waiter.woken.set()
                    return

    def _catch_up_if_free(self) -> None:
        """Run postponed actions if the turn is free; else its holder calls this after releasing it, so none is lost."""
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
