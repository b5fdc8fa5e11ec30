"""A launched step whose results have not been processed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from draftproof.engine.costs import StepOutcome
from draftproof.engine.interface import PendingStep, RowResult, ScheduledRequest
from draftproof.engine.progress import Progress
from draftproof.engine.shadows import Shadowing


@dataclass(slots=True)
class InFlightStep:
    """A step in flight; `requests` and `scheduled` are in the order of its results. `shadowing`: what is to become of
    its drafts; None: all are verified and none compared."""

    requests: list[Progress]
    scheduled: list[ScheduledRequest]
    pending: PendingStep
    start: float  # when planning began: seconds of `time.perf_counter`
    without_drafter: bool = False
    shadowing: Shadowing | None = None
    has_prompts: bool = False  # not every request decoded
    without_models: bool = False  # no drafter with a model saw it
    stops: bool = False  # the drafter makes no drafts that going on does not pay for

    @property
    def is_plain(self) -> bool:
        """Whether it verifies no drafts and makes none, though a drafter may see it."""
        return self.without_drafter or all(map(_is_plain, self.scheduled))

    @property
    def is_shadow(self) -> bool:
        """Whether it makes drafts, and all of them are compared only."""
        found = self.shadowing
        if found is None or any(found.of_models or ()):
            return False
        return any(found.is_compared) and not any(found.most)

    def outcome(
        self,
        results: Sequence[RowResult],
        seconds: float,
        host_seconds: float,
        draft_seconds: float,
        each_tokens: float,
        *,
        is_typical: bool,
        lookups: Collection[int] = (),
    ) -> StepOutcome:
        """What the policy learns from it; for a step in which every request decoded. `lookups`: as the runner says."""
        num_rows = num_drafts = num_tokens = context = num_asked = 0
        for scheduled, result in zip(self.scheduled, results, strict=True):
            num_rows += scheduled.num_rows
            num_made = scheduled.num_drafts
            if self.stops and num_made and result.drafter not in lookups:
                num_made = max(1, result.num_proposed)  # the first even for a request without room for it
            num_drafts = max(num_drafts, num_made)
            num_asked += scheduled.num_drafts > 0
            num_tokens += len(result.token_ids)
            context += scheduled.start
        return StepOutcome(
            len(results),
            num_rows,
            num_drafts,
            num_tokens,
            context,
            seconds,
            host_seconds,
            self.is_shadow,
            draft_seconds,
            num_asked,
            is_typical,
            each_tokens,
        )


def _is_plain(scheduled: ScheduledRequest) -> bool:
    """Whether this request's drafts are neither verified nor made."""
    return scheduled.num_drafts == 0 and scheduled.num_sampled <= 1
