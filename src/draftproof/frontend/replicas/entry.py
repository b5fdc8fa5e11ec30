"""Several replicas behind one engine's interface: places requests, merges their output, and moves the requests of a
replica that dies to others.

A token is a function of its row and the request's seed, which is drawn before the request is placed, so any replica can
continue where another one stopped: it is sent the prompt and the tokens so far, as after a preemption.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from draftproof.cache.events import CacheEvent, block_hashes
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import RequestSpec
from draftproof.engine.items import ItemInput, ItemStore
from draftproof.frontend.replicas import routing, wire
from draftproof.frontend.replicas.process import Line, Patience, Replica
from draftproof.metrics import EngineLoad, EngineStats

log = logging.getLogger(__name__)
LOOK = 1.0  # most seconds that `step` waits for output
TRIED_AFTER = 2  # deaths of replicas after which a request is computed alone
NO_NEWS: list[TokenDelta] = []


@dataclass(slots=True, eq=False)
class Placed:
    """An open request. `line`: where it is computed, None: it waits for a replica; `token_ids` and `num_scores`: its
    output so far; `num_deaths`: replicas that died while they computed it; `cleared_at`: number of tokens after which a
    suspect that is computed alone is cleared."""

    id: str
    spec: RequestSpec
    inputs: list[ItemInput]
    hashes: list[int]
    key: int = 0
    line: Line | None = None
    token_ids: list[int] = field(default_factory=list)
    num_scores: int = 0
    num_uncached: int = 0  # tokens of its prompt that its replica was expected to compute
    is_computing: bool = False  # output has come since it was placed
    num_deaths: int = 0
    cleared_at: int = 0


class Replicas:
    """An engine made of replicas; see `frontend.engine.Engine`. Its lock is held briefly, and never while waiting for a
    replica."""

    def __init__(
        self,
        setups: Sequence[tuple[wire.Setup, Mapping[str, str]]],
        *,
        rule: str = "prefix",
        progress: Callable[[str, int, int], None] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Starts the replicas, the first one before the others, so that these find its certificates and measurements.
        `setups`: (setup, environment) of each. ValueError for wrong settings, RuntimeError for other failures."""
        self.error: str | None = None
        self.items: ItemStore | None = None  # holds the inputs of items
        self._rule = rule
        self._progress = progress
        self._lock = threading.RLock()
        self._news: queue.SimpleQueue[list[TokenDelta]] = queue.SimpleQueue()
        self._open: dict[str, Placed] = {}
        self._waiting: deque[Placed] = deque()  # for any replica
        self._suspects: deque[Placed] = deque()  # for a replica that computes nothing else
        self._past: list[EngineStats] = []  # of processes that have ended
        self._keys, self._calls = itertools.count(), itertools.count()
        self._is_paused = self._is_shut_down = False
        self._ready: list[Future[wire.Hello]] = [Future() for _ in setups]
        patience = patience or Patience()
        self.replicas = [
            Replica(number, setup, env, self, patience) for number, (setup, env) in enumerate(setups)
        ]
        try:
            self.replicas[0].start()
            self.hello = self._ready[0].result()
            for replica in self.replicas[1:]:
                replica.start()
            for ready in self._ready:
                ready.result()
        except BaseException:
            self.shutdown()
            raise

    # The engine's interface.

    @property
    def is_due(self) -> bool:
        with self._lock:  # `came` and `_fail` close a request and queue its last delta under the lock
            if not self._news.empty():
                return True
            return bool(self._open) and not self._is_paused and self.error is None

    def add_request(self, request_id: str, spec: RequestSpec) -> None:
        """Like `EngineCore.add_request`, for a validated spec."""
        with self._lock:
            if self.error is not None:
                raise RuntimeError(self.error)
            if request_id in self._open:
                raise ValueError(f"request_id={request_id!r}: is running already; give another")
            inputs = [self.items.input(item.content) for item in spec.items] if self.items else []
            block_size = self.hello.load.block_size
            contents = spec.contents(spec.token_ids)[:-1]  # at least one token is computed
            hashes = list(block_hashes(contents, block_size)) if spec.reads_prefix_cache else []
            placed = self._open[request_id] = Placed(request_id, spec, inputs, hashes)
            self._place([placed])

    def abort(self, request_id: str) -> None:
        with self._lock:
            placed = self._open.get(request_id)
            if placed is None:
                return
            if placed.line is not None:
                placed.line.send(wire.Abort(placed.key))
            self._close(placed)

    def step(self) -> list[TokenDelta]:
        """The deltas that have come; if there are none, wait for some or for `wake`, at most `LOOK` seconds."""
        deltas = list(NO_NEWS)
        try:
            deltas += self._news.get(timeout=LOOK if self.is_due else 0)
            while True:
                deltas += self._news.get_nowait()
        except queue.Empty:
            return deltas

    def wake(self) -> None:
        """End a `step` that waits. Takes no lock, so it may be called anywhere."""
        self._news.put(NO_NEWS)

    def draft(self, spec: RequestSpec, num_drafts: int) -> list[int]:
        """`EngineCore.draft`, by the first replica that is ready."""
        with self._lock:
            if self._open:
                raise ValueError("draft: other requests are running; finish or close their streams first")
            lines = self._lines()[:1]
        packed = wire.pack_spec(spec)
        answers = self._call(lines, lambda call: wire.Draft(call, packed, num_drafts))
        if not answers:
            raise RuntimeError(self.error or "draft: no replica is there; try again")
        return answers[0].token_ids

    def reset_prefix_cache(self) -> None:
        self._call(self._lines(), wire.Reset)

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume all replicas; returns once they have."""
        self._is_paused = is_paused
        self._call(self._lines(), lambda call: wire.Pause(call, is_paused))

    @property
    def stats(self) -> EngineStats:
        """Sums over all replicas, including those that died; predictions are those of one replica."""
        with self._lock:
            total = _empty(self.hello.load.stats)
            for stats in (*self._past, *(load.stats for load in self.loads())):
                total.add(stats)
            return total

    def loads(self) -> list[EngineLoad]:
        """The load of each replica; one that is starting counts as idle."""
        with self._lock:
            return [self._load(replica) for replica in self.replicas]

    def _load(self, replica: Replica) -> EngineLoad:
        line = replica.line
        if line is not None and line.is_ready and line.load is not None:
            return line.load
        blank = self.hello.load
        return EngineLoad(
            stats=_empty(blank.stats),
            num_free_blocks=blank.num_blocks,
            num_blocks=blank.num_blocks,
            block_size=blank.block_size,
        )

    def keep_cache_events(self) -> None:
        """Nothing to do: replicas always keep them."""

    def take_cache_events(self) -> list[CacheEvent]:
        """Empty: each replica publishes its own."""
        return []

    def shutdown(self) -> None:
        """End all processes; open requests get no more output."""
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            self.error = self.error or "the engine has been shut down"
            self._open.clear()
            self._waiting.clear()
            self._suspects.clear()
        for replica in self.replicas:
            replica.close()
        for replica in self.replicas:
            replica.join()

    def _call(self, lines: Sequence[Line], ask: Callable[[int], Any]) -> list[wire.Answered]:
        """Send a call to replicas and wait for the answers; those that die give none. ValueError if one answers with an
        error."""
        asked: list[Future[wire.Answered | None]] = []
        for line in lines:
            with self._lock:
                call, future = next(self._calls), Future[wire.Answered | None]()
                if not line.is_ready:
                    continue
                line.calls[call] = future
                line.send(ask(call))
                asked.append(future)
        answers = [answer for future in asked if (answer := future.result()) is not None]
        for answer in answers:
            if answer.error is not None:
                raise ValueError(answer.error)
        return answers

    def _lines(self) -> list[Line]:
        return [r.line for r in self.replicas if r.line is not None and r.line.is_ready]

    # Placing requests; the caller holds the lock.

    def _place(self, requests: Iterable[Placed]) -> None:
        for placed in requests:
            lines = [line for line in self._lines() if line.trial is None]
            if not lines:
                self._waiting.append(placed)
                continue
            candidates = [self._candidate(line, placed) for line in lines]
            number = routing.choose(self._rule, candidates)
            chosen = next(i for i, c in enumerate(candidates) if c.number == number)
            placed.num_uncached = candidates[chosen].num_uncached
            self._start(placed, lines[chosen])

    def _candidate(self, line: Line, placed: Placed) -> routing.Candidate:
        size = self.hello.load.block_size
        num_tokens = len(placed.spec.token_ids) + len(placed.token_ids)
        ahead = list(line.placed.values())
        return routing.Candidate(
            number=line.replica.number,
            num_uncached=num_tokens - size * line.index.num_cached(placed.hashes),
            num_waiting=sum(other.num_uncached for other in ahead if not other.is_computing),
            num_outputs=len(ahead),
            num_placed=line.replica.num_placed,
        )

    def _start(self, placed: Placed, line: Line) -> None:
        placed.key, placed.line, placed.is_computing = next(self._keys), line, False
        line.placed[placed.key] = placed
        line.index.place(placed.hashes)
        line.replica.num_placed += 1
        is_resumed = placed.num_deaths > 0 or placed.token_ids
        resumed = (placed.token_ids, placed.num_scores) if is_resumed else None
        items = [wire.pack_item(item) for item in placed.inputs]
        line.send(wire.Start(placed.key, wire.pack_spec(placed.spec), items, resumed))

    def _close(self, placed: Placed) -> None:
        """Remove a request: it has ended."""
        self._open.pop(placed.id, None)
        line = placed.line
        if line is None:
            for queued in (self._waiting, self._suspects):
                if placed in queued:
                    queued.remove(placed)
            return
        self._take_off(placed, line)
        if line.trial is placed:
            self._try_next(line)

    def _take_off(self, placed: Placed, line: Line) -> None:
        line.placed.pop(placed.key, None)
        line.index.unplace(placed.hashes)
        placed.line = None

    def _try_next(self, line: Line) -> None:
        """Start the next suspect on this replica, which computes nothing else but cleared ones; without suspects, the
        replica is open to all waiting requests."""
        line.trial = None
        if self._suspects:
            line.trial = placed = self._suspects.popleft()
            placed.cleared_at = len(placed.token_ids) + 4 ** (placed.num_deaths - TRIED_AFTER)
            self._start(placed, line)
            return
        waiting, self._waiting = self._waiting, deque()
        self._place(waiting)

    def _fail(self, placed: Placed, error: str) -> None:
        self._close(placed)
        self._news.put([TokenDelta(placed.id, finish_reason="error", error=error)])

    # Called by the replicas' threads.

    def began(self, line: Line, hello: wire.Hello) -> str | None:
        first = self._ready[0]
        known = first.result() if first.done() else hello
        for name, ours, theirs in (
            ("the fingerprint", known.fingerprint, hello.fingerprint),
            ("the model's files", known.files, hello.files),
        ):
            if ours != theirs:
                return (
                    f"data_parallel_size: replica {line.replica.number} would not give the bits of the others: {name} "
                    f"is {theirs}, that of the first was {ours}; give replicas devices of one kind, and leave the "
                    "files alone"
                )
        with self._lock:
            line.load, line.is_ready = hello.load, True
            if self._is_paused:
                line.send(wire.Pause(next(self._calls), is_paused=True))
            if not self._ready[line.replica.number].done():
                self._ready[line.replica.number].set_result(hello)
            else:
                log.info("replica %d is back", line.replica.number)
                self._try_next(line)
        return None

    def came(self, line: Line, message: wire.Stepped | wire.Answered) -> None:
        with self._lock:
            if isinstance(message, wire.Answered):
                future = line.calls.pop(message.call, None)
                if future is not None:
                    future.set_result(message)
                return
            if message.load is not None:
                line.load = message.load
            _learn(line.index, message.events)
            news = [delta for delta in message.deltas if self._took(line, delta)]
            if news:
                self._news.put(news)

    def _took(self, line: Line, delta: TokenDelta) -> bool:
        """Record a delta in its request; False if that is not open any more."""
        placed = line.placed.get(int(delta.id))
        if placed is None:  # the request was aborted
            return False
        delta.id = placed.id
        placed.is_computing = True
        placed.token_ids += delta.token_ids
        placed.num_scores += len(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self._close(placed)
        elif line.trial is placed and len(placed.token_ids) >= placed.cleared_at:
            self._try_next(line)
        return True

    def lost(self, line: Line) -> None:
        """Move the requests of a replica that died. A request in whose replicas' `TRIED_AFTER` deaths it was involved
        becomes a suspect: it is computed alone, so that one that kills replicas is found and fails."""
        with self._lock:
            line.is_ready = False
            if line.load is not None and not self._is_shut_down:
                self._past.append(line.load.stats)
            for future in line.calls.values():
                future.set_result(None)
            line.calls.clear()
            orphans, tried, line.trial = list(line.placed.values()), line.trial, None
            for placed in orphans:
                self._take_off(placed, line)
                placed.num_deaths += 1
            if tried is not None and orphans == [tried]:
                times = f"replicas have died {tried.num_deaths} times while they computed this request"
                self._fail(tried, f"{times}, the last time it alone; others are not affected")
                return
            suspects = [placed for placed in orphans if placed.num_deaths >= TRIED_AFTER]
            suspects.sort(
                key=lambda placed: placed is not tried
            )  # the tried one goes first, so it will be alone on its next replica
            self._suspects.extendleft(reversed(suspects))
            self._place(placed for placed in orphans if placed.num_deaths < TRIED_AFTER)

    def gave_up(self, replica: Replica, failure: wire.Failed) -> None:
        with self._lock:
            log.error("replica %d cannot be started: %s", replica.number, failure.error)
            ready = self._ready[replica.number]
            if not ready.done():
                kind = ValueError if failure.is_users else RuntimeError
                ready.set_exception(kind(failure.error))
                return
            replica.line = None
            if any(other.line is not None for other in self.replicas):
                for placed in list(self._suspects):
                    self._fail(placed, f"replicas died while they computed this request: {failure.error}")
                return
            self.error = f"the engine has ended: no replica can be started: {failure.error}"
            for placed in list(self._open.values()):
                self._fail(placed, self.error)
            self.wake()

    def progress(self, replica: Replica, what: str, done: int, total: int) -> None:
        if self._progress is not None and not self._ready[replica.number].done():
            self._progress(what, done, total)


def _learn(index: routing.PrefixIndex, events: Sequence[Any]) -> None:
    for event in events:
        match event:
            case wire.StoredOnWire(hashes):
                index.stored.update(hashes)
            case wire.RemovedOnWire(hashes):
                index.stored.difference_update(hashes)
            case wire.ClearedOnWire():
                index.stored.clear()


def _empty(like: EngineStats) -> EngineStats:
    """Statistics with zero counts, for the drafters of `like`."""
    drafters = [type(drafter)(drafter.name) for drafter in like.drafters]
    return EngineStats(drafters=drafters, predictions=like.predictions)
