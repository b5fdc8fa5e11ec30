"""What the log says about drafting: a line a drafter at the start, and acceptance at intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftproof.drafters import registry
from draftproof.drafters.base import DraftSpec
from draftproof.drafters.context import DraftContext
from draftproof.engine.plans import DraftPlan
from draftproof.metrics import Prediction, SpeculationStats

INTERVAL = 10.0  # seconds
TARGETS = "the target's"


def start_line(plan: DraftPlan, spec: DraftSpec, ctx: DraftContext) -> str:
    """What was chosen for a drafter, by whom, and what it shares with its target."""
    notes = ctx.notes
    parts = [f"drafter {plan.method}: K={plan.num_drafts} ({_whose_number(plan)})", _taps(spec, notes)]
    if plan.checkpoint is not None:
        parts.append(f"embedding: {notes.get('embed_tokens', 'own')}")
        parts.append(f"lm_head: {notes.get('lm_head', 'own')}")
        parts.append(f"vocabulary: {notes.get('vocabulary', TARGETS)}")
        parts.append(f"from {plan.checkpoint.where}")
    return "; ".join(parts)


def _whose_number(plan: DraftPlan) -> str:
    """Who said K."""
    own = None if plan.checkpoint is None else plan.checkpoint.num_drafts
    number, whose = registry.default_drafts(plan.method, is_auto=plan.settings.is_auto), "the method's"
    if own is not None:
        number, whose = own, "its checkpoint's"
    if plan.settings.num_speculative_tokens is not None:
        number, whose = plan.settings.num_speculative_tokens, "as asked"
    return whose if number == plan.num_drafts else "what its chain allows"


def _taps(spec: DraftSpec, notes: dict[str, str]) -> str:
    names = [str(layer) for layer in spec.taps.layers] + ["final"] * spec.taps.final
    return f"taps: {' '.join(names)} ({notes.get('taps', 'the method sets them')})" if names else "taps: none"


def speculation_line(predictions: Sequence[Prediction]) -> str:
    """What an engine that chooses the number of drafts expects, by number of requests, ascending."""
    on = [p for p in predictions if p.num_drafts]
    if not on:
        return "speculation off: plain decoding is predicted to be faster; drafts are tried now and then"
    best = max(on, key=lambda p: p.speedup)
    at = [on[0]] if best is on[0] else [on[0], best]
    told = ", ".join(f"{p.speedup:.1f}x at batch {p.num_requests} with K={p.num_drafts}" for p in at)
    off = [p.num_requests for p in predictions if p.num_requests > on[-1].num_requests]
    return f"speculation on: predicted {told}{f', off above {on[-1].num_requests}' if off else ''}"


class AcceptanceReport:
    """Lines about what the engine counts, which `stats` gives, each about the time since the one before. Times in
    seconds."""

    def __init__(self, stats: Callable[[], SpeculationStats], now: float) -> None:
        self._stats = stats
        self._then, self._before = now, stats().since(SpeculationStats())

    def due(self, now: float) -> str | None:
        """The line, where the interval is over and something was drafted in it."""
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
