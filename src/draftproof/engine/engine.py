"""The `Engine` protocol: what a front end drives, be it one engine in this process or several in their own."""

from __future__ import annotations

from typing import Protocol

from draftproof.cache.events import CacheEvent
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import RequestSpec
from draftproof.metrics import EngineLoad, EngineStats


class Engine(Protocol):
    """Implemented by `EngineCore`, and by `frontend.replicas` for several. One thread at a time may call it; only
    `wake` may be called by any thread."""

    error: str | None  # why it accepts no more requests

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_due(self) -> bool:
        """Whether a step has something to do, or to wait for."""
        ...

    def add_request(self, request_id: str, spec: RequestSpec) -> None: ...
    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenDelta]:
        """Run a step, or wait for other processes until `wake`. Returns the deltas since the last call."""
        ...

    def wake(self) -> None: ...
    def draft(self, spec: RequestSpec, num_drafts: int) -> list[int]: ...
    def reset_prefix_cache(self) -> None: ...
    def set_paused(self, is_paused: bool) -> None: ...
    def loads(self) -> list[EngineLoad]: ...

    def keep_cache_events(self) -> None:
        """Start recording events of the prefix cache, for `take_cache_events`."""
        ...

    def take_cache_events(self) -> list[CacheEvent]: ...
    def shutdown(self) -> None: ...
