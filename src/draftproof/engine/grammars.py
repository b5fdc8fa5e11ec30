"""Outputs that follow a grammar: which of the drafts that wait may stand, which are forced, and masks of sampled rows.

Grammars see ids alone, so this is the host's; all of it is asked while no pass is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.engine.interface import Runner
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import PlannedRows
from draftproof.grammar.matcher import Matcher


def choose_drafts(running: Sequence[Progress], runner: Runner) -> None:
    """Drafts end where the grammar refuses one, since the target will, too; and what it leaves no choice about takes
    their place, where there is a drafter for that."""
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
    """What must follow the output, as far as there is room for it."""
    most, spec = runner.most_forced, request.spec
    is_open = request.num_outputs > 0 and request.num_to_compute == 1
    if not most or not is_open:
        return []
    if spec.members and len(runner.drafter_names) - 1 not in spec.members:
        return []
    room = request.at_most(min(most, spec.limit - len(request.tokens) - 1))
    return matcher.forced(room) if room > 0 else []


def forced(rows: Sequence[PlannedRows]) -> list[tuple[int, int, list[int]]]:
    """Drafts of ours, as `StepInput.forced` has them, where there are rows for them."""
    return [
        (r.request.slot, len(r.request.tokens), r.request.forced[: r.num_sampled - 1])
        for r in rows
        if r.request.forced and r.num_sampled > 1
    ]


def masks(rows: PlannedRows) -> bytes:
    """What the request's grammar lets each sampled row have. The matcher stays where it is: it follows the tokens that
    stand, and drafts are none yet."""
    request = rows.request
    if request.matcher is None or not rows.num_sampled:
        return b""
    return request.matcher.masks(request.drafts[: rows.num_sampled - 1], rows.num_sampled)
