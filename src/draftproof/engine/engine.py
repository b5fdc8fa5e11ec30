"""What a front drives: one engine of this process, or several in processes of their own."""

from __future__ import annotations

from typing import Protocol

from draftproof.cache.events import CacheEvent
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import RequestSpec
from draftproof.metrics import EngineLoad, EngineStats


class Engine(Protocol):
    """`EngineCore` is one, and `frontend.replicas` makes one of several. One thread at a time may call it, but for
    `wake`, which is anybody's."""

    error: str | None  # why it takes no more requests

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_due(self) -> bool:
        """Whether a step has something to do, or to wait for."""
        ...

    def add_request(self, request_id: str, spec: RequestSpec) -> None: ...
    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[TokenDelta]:
        """What has come since the last one. It may wait for others, until `wake`."""
        ...

    def wake(self) -> None: ...
    def draft(self, spec: RequestSpec, num_drafts: int) -> list[int]: ...
    def reset_prefix_cache(self) -> None: ...
    def set_paused(self, is_paused: bool) -> None: ...
    def loads(self) -> list[EngineLoad]: ...

    def keep_cache_events(self) -> None:
        """From now on note what happens in the prefix cache, for `take_cache_events`."""
        ...

    def take_cache_events(self) -> list[CacheEvent]: ...
    def shutdown(self) -> None: ...
