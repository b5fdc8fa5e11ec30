"""Makes the steps of a runner fail because of one request."""

from __future__ import annotations

from collections.abc import Callable

from draftproof.engine.interface import StepInput


def poison(num_prompt: int, at: int = 0) -> Callable[[StepInput], None]:
    """A check that raises for each step with rows from position `at` on of the request with `num_prompt` prompt
    tokens."""
    slots: set[int] = set()

    def before(step: StepInput) -> None:
        slots.difference_update(step.released)
        slots.difference_update(a.slot for a in step.admitted)
        slots.update(a.slot for a in step.admitted if a.num_prompt == num_prompt)
        if any(s.slot in slots and s.start + s.num_rows > at for s in step.scheduled):
            raise ZeroDivisionError("poisonous")

    return before
