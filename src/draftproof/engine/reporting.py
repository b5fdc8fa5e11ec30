"""Log lines about drafting: the predicted speed-up at the start, and acceptance at intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftproof.metrics import Prediction, SpeculationStats

INTERVAL = 10.0  # seconds


def speculation_line(predictions: Sequence[Prediction]) -> str:
    """The line about an adaptive engine's predictions, which are ascending by number of requests."""
    on = [p for p in predictions if p.num_drafts]
    if not on:
        return "speculation off: plain decoding is predicted to be faster; drafts are tried now and then"
    best = max(on, key=lambda p: p.speedup)
    at = [on[0]] if best is on[0] else [on[0], best]
    told = ", ".join(f"{p.speedup:.1f}x at batch {p.num_requests} with K={p.num_drafts}" for p in at)
    last = on[-1].num_requests
    between = [str(p.num_requests) for p in predictions if not p.num_drafts and p.num_requests < last]
    told += f", off at {', '.join(between)}" if between else ""
    told += f", off above {last}" if predictions[-1].num_requests > last else ""
    return f"speculation on: predicted {told}"


class AcceptanceReport:
    """Makes a line about acceptance per interval, from the engine's counters (`stats`). Times in seconds."""

    def __init__(self, stats: Callable[[], SpeculationStats], now: float) -> None:
        self._stats = stats
        self._then, self._before = now, stats().since(SpeculationStats())

    def due(self, now: float) -> str | None:
        """The line, if the interval is over and had drafts; else None."""
        seconds = now - self._then
        if seconds < INTERVAL:
            return None
        stats = self._stats()
        new = stats.since(self._before)
        self._then, self._before = now, stats.since(SpeculationStats())
        if not new.num_draft_tokens:
            return None
        by_position = " ".join(f"{n / new.num_rounds:.2f}" for n in new.accepted_per_position)
        return (
            f"drafting, last {seconds:.0f} s: {new.num_accepted_tokens} of {new.num_draft_tokens} drafts accepted "
            f"({100 * new.acceptance_rate:.0f} %), {new.acceptance_length:.2f} tokens a round in {new.num_rounds} "
            f"rounds; rounds that accepted the first, second, ...: {by_position}"
        )
