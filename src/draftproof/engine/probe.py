"""What the drafter would propose after a prompt, without generating anything."""

from __future__ import annotations

from draftproof.engine.engine import Engine
from draftproof.engine.scheduler import Plan, Work
from draftproof.engine.sequence import Sequence


def draft(engine: Engine, sequence: Sequence, k: int) -> list[int]:
    """The proposal that follows the sequence's last token.

    All tokens but the last are computed, as a prompt's chunk; the last is known to follow them, as the next prompt
    token of a chunk is. Asking for drafts there is all that differs from an ordinary chunk.
    """
    p = engine.parts
    assert p.guard is not None
    if p.scheduler.running or p.scheduler.waiting:
        raise ValueError("draft: other requests are running; finish or close their streams first")
    engine.settle()  # what is under way is of requests that have ended
    engine.add(sequence)
    try:
        while True:
            plan = p.scheduler.plan()
            work = plan.work[0]
            left = len(sequence.tokens) - 1 - sequence.num_computed
            last = work.num_rows >= left
            chunk = Work(sequence, work.start, min(work.num_rows, left), 0)
            engine.launch(Plan([chunk], plan.admitted), [k if last else 0])
            engine.settle()
            if last:
                known = len(sequence.tokens)
                drafts_L = p.state.slots.tokens_SL[sequence.slot, known : known + sequence.num_drafts]
                return [int(token) for token in drafts_L.tolist()]
    finally:
        engine.finish(sequence)
