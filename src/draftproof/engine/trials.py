"""The search for the request at fault: those of a step that raised are tried again by halves, apart from all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from draftproof.engine.progress import Progress


class Trials:
    """Groups under suspicion, the next one to be tried first; true while there are any.

    A suspect is cleared once it has emitted the token that it was about to, and found guilty if its step raises again
    while nobody else is in it. Every trial clears, halves or convicts a group, so this ends.
    """

    def __init__(self) -> None:
        self._groups: deque[list[tuple[Progress, int]]] = deque()  # each with its number of tokens then

    def __bool__(self) -> bool:
        return bool(self._groups)

    def clear(self) -> None:
        """Nobody is under suspicion any more."""
        self._groups.clear()

    @property
    def group(self) -> list[Progress]:
        """Those who are to run alone next."""
        return [request for request, _ in self._groups[0]]

    def convict(self, failed: Sequence[Progress]) -> Progress | None:
        """A step of these raised: the request to blame. None: it is not known yet, and both halves are suspects."""
        tried = self._end(failed)
        if len(failed) == 1 and tried == failed:
            return failed[0]
        marked = [(r, len(r.tokens)) for r in failed if r.finish_reason is None]
        half = (len(marked) + 1) // 2
        self._groups.extendleft(group for group in (marked[half:], marked[:half]) if group)
        return None

    def _end(self, failed: Sequence[Progress]) -> list[Progress]:
        """Take the trial off the list in which these failed; who took part in it, nobody if they failed outside one."""
        if not self._groups:
            return []
        tried = self.group
        if any(request not in tried for request in failed):
            return []
        self._groups.popleft()
        return [request for request in tried if request.finish_reason is None]

    def acquit(self) -> bool:
        """Drop the first groups in which everybody has been cleared or has ended; whether there were any."""
        num_before = len(self._groups)
        while self._groups:
            open_trials = [(r, mark) for r, mark in self._groups[0] if r.finish_reason is None]
            if any(len(r.tokens) <= mark for r, mark in open_trials):
                break
            self._groups.popleft()
        return len(self._groups) < num_before
