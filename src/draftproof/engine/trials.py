"""Bisection for the request that makes steps raise: a failed step's requests are rerun in halves, isolated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from draftproof.engine.progress import Progress


class Trials:
    """Groups of suspects, the next to be tried first; truthy while there are any.

    A suspect is cleared once it has emitted another token, and convicted if a step raises in which it is alone. Every
    trial clears, halves or convicts a group, so the search ends.
    """

    def __init__(self) -> None:
        self._groups: deque[list[tuple[Progress, int]]] = deque()  # (suspect, number of tokens at failure)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def clear(self) -> None:
        """Drop all suspicions."""
        self._groups.clear()

    @property
    def group(self) -> list[Progress]:
        """The requests to run in isolation next."""
        return [request for request, _ in self._groups[0]]

    def convict(self, failed: Sequence[Progress]) -> Progress | None:
        """A step of these requests raised: the one at fault. None: not known yet, and both halves become suspects."""
        tried = self._end(failed)
        if len(failed) == 1 and tried == failed:
            return failed[0]
        marked = [(r, len(r.tokens)) for r in failed if r.finish_reason is None]
        half = (len(marked) + 1) // 2
        self._groups.extendleft(group for group in (marked[half:], marked[:half]) if group)
        return None

    def _end(self, failed: Sequence[Progress]) -> list[Progress]:
        """Remove the trial in which these failed: its requests that still run, or [] if they failed outside one."""
        if not self._groups:
            return []
        tried = self.group
        if any(request not in tried for request in failed):
            return []
        self._groups.popleft()
        return [request for request in tried if request.finish_reason is None]

    def acquit(self) -> bool:
        """Drop the leading groups in which every request is cleared or has ended; returns whether there were any."""
        num_before = len(self._groups)
        while self._groups:
            open_trials = [(r, mark) for r, mark in self._groups[0] if r.finish_reason is None]
            if any(len(r.tokens) <= mark for r, mark in open_trials):
                break
            self._groups.popleft()
        return len(self._groups) < num_before
