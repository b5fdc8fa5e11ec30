"""Requests with a grammar: which waiting drafts the grammar allows, which tokens it forces, and masks of sampled rows.

Grammars need token ids only, so they belong to the host. Everything here is called while no pass is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.engine.interface import Runner
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import PlannedRows
from draftproof.grammar.matcher import Matcher


def choose_drafts(running: Sequence[Progress], runner: Runner) -> None:
    """Cut each request's drafts at the first that its grammar refuses, since the target's masked row would reject it.
    Where the grammar leaves no choice, the forced tokens replace the drafts, if a drafter for forced text exists."""
    for request in running:
        matcher = request.matcher
        if matcher is None:
            continue
        request.forced, request.is_cut, request.drafts = [], False, []
        if request.num_drafts:
            waiting = runner.known_drafts(request.slot, len(request.tokens), request.num_drafts)
            request.drafts = waiting[: matcher.num_allowed(waiting)]
            request.is_cut = len(request.drafts) < len(waiting)
        forced = _must_follow(request, matcher, runner)
        if request.drafts[: len(forced)] != forced:
            request.forced, request.drafts, request.is_cut = forced, forced, False
            request.drafter = len(runner.drafter_names) - 1
        request.num_drafts = len(request.drafts)


def _must_follow(request: Progress, matcher: Matcher, runner: Runner) -> list[int]:
    """The tokens that must follow the output by its grammar, as many as may be forced."""
    most, spec = runner.most_forced, request.spec
    is_open = request.num_outputs > 0 and request.num_to_compute == 1
    if not most or not is_open:
        return []
    if spec.members and len(runner.drafter_names) - 1 not in spec.members:
        return []
    room = request.at_most(min(most, request.room))
    return matcher.forced(room) if room > 0 else []


def forced(rows: Sequence[PlannedRows]) -> list[tuple[int, int, list[int]]]:
    """The forced drafts for `StepInput.forced`, of requests whose drafts were scheduled."""
    return [
        (r.request.slot, len(r.request.tokens), r.request.forced[: r.num_sampled - 1])
        for r in rows
        if r.request.forced and r.num_sampled > 1
    ]


def masks(rows: PlannedRows) -> bytes:
    """For each sampled row, the tokens that the request's grammar allows; see `StepInput.masks`. The matcher itself
    does not advance: drafts are not part of the output yet."""
    request = rows.request
    if request.matcher is None or not rows.num_sampled:
        return b""
    return request.matcher.masks(request.drafts[: rows.num_sampled - 1], rows.num_sampled)
