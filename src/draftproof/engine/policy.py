"""Policies: how many drafts each request gets. They change speed only: by law 1 the output cannot depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from draftproof.engine.costs import StepOutcome
from draftproof.engine.interface import RowPrice
from draftproof.engine.kept_choice import PLAIN_EVERY, RESTING_EVERY
from draftproof.engine.progress import Progress, Round
from draftproof.engine.shadows import Comparison


class Parts(NamedTuple):
    """A choice in a chain of lookups and others: number of drafts for each request if a lookup makes them, and if a
    drafter that runs a model does."""

    of_lookups: Sequence[int]
    of_models: Sequence[int]


class Policy(Protocol):
    @property
    def parts(self) -> Parts | None:
        """The last choice by who makes the drafts; None: it is the same for all drafters."""
        ...

    @property
    def compares(self) -> bool:
        """Whether it learns from comparing drafts with the output instead of from verifying them, where that can be."""
        ...

    @property
    def report_every(self) -> int:
        """Number of steps that saw the drafter of which one is to be reported by `finished`."""
        ...

    @property
    def plain_every(self) -> int:
        """Number of steps that it did not see of which one is to be reported."""
        ...

    @property
    def is_probing(self) -> bool:
        """Whether the last choice has no drafts only to find out what such steps take: the drafter is to see them, if
        it would miss their rows, and its time is left out of the report."""
        ...

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        """Number of drafts for each of `asked`, which decode in the next pass beside `num_others` requests that cannot
        draft. `num_joining` more will decode with them once passes after this one have computed their prompts. All 0:
        the drafter may be skipped."""
        ...

    def shadows(self, chosen: Sequence[int], num_others: int) -> Sequence[int]:
        """Number of drafts to make for each request and compare with the output, of which those `chosen` by `choose`
        are verified; 0: as many as chosen, and none compared. Empty: none of any. Called after `choose`, where drafts
        can be compared."""
        ...

    def num_repeats(self) -> int:
        """For how many more steps of the same requests its last answer holds, at most: they have as many drafts, and
        none to compare. Called after `choose` and `shadows`, and after reports while it holds."""
        ...

    def repeated(self, num_steps: int) -> None:
        """Its answer was used for so many more steps."""
        ...

    def price(self) -> RowPrice:
        """When a further row of the next pass is worth its time."""
        ...

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        """Whether drafts for a new request beside `num_others` others would be worth showing its prompt to the drafter,
        for which the target must recompute `num_lost` cached tokens. `num_decoding` of the others decode already."""
        ...

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool) -> None:
        """A drafter was asked for `num_asked` drafts for this request, and proposed `num_drafts`. `is_model`: not a
        lookup. If a policy compares it is told of some of its lookups' proposals, and of `looked_up` for all."""
        ...

    def looked_up(self, request: Progress, num_asked: int, num_given: int) -> None:
        """Lookups were asked for drafts for this request in `num_asked` steps more, and had some in `num_given` of
        them. Called only if the policy compares."""
        ...

    def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
        """A request's drafts were verified. If the policy compares: lookups' only if it was told of the proposal, and
        they are not compared."""
        ...

    def learn(self, request: Progress, rounds: Sequence[Round]) -> None:
        """A request's last rounds, oldest first: what became of drafts that are not compared, and how many were
        proposed. Stands for `verified` and `proposed` for each."""
        ...

    def compared(self, request: Progress, found: Comparison) -> None:
        """Drafts of a request were compared with its new tokens."""
        ...

    def finished(self, step: StepOutcome) -> None:
        """A decode-only step has finished."""
        ...

    def prompted(self, num_rows: int, draft_seconds: float, num_asked: int = 0, num_drafts: int = 0) -> None:
        """The drafter took `draft_seconds` for `num_rows` rows, most of them of prompts, and for `num_drafts` drafts of
        each of `num_asked` requests."""
        ...


def learn_each(policy: Policy, request: Progress, rounds: Sequence[Round]) -> None:
    """Tell a policy of a request's rounds one at a time."""
    for its in rounds:
        if its.num_observed:
            policy.verified(request, its.num_observed, its.num_accepted, is_model=True)
        if its.num_asked:
            policy.proposed(request, its.num_asked, its.num_proposed, is_model=True)


class FixedPolicy:
    """Always K drafts for each request."""

    parts: Parts | None = None
    compares = False
    report_every = PLAIN_EVERY
    plain_every = PLAIN_EVERY
    is_probing = False

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        return [self._num_drafts] * len(asked)

    def shadows(self, chosen: Sequence[int], num_others: int) -> Sequence[int]:
        return ()

    def num_repeats(self) -> int:
        return RESTING_EVERY

    def repeated(self, num_steps: int) -> None:
        pass

    def price(self) -> RowPrice:
        return RowPrice()

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return self._num_drafts > 0

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool) -> None:
        pass

    def looked_up(self, request: Progress, num_asked: int, num_given: int) -> None:
        pass

    def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
        pass

    def learn(self, request: Progress, rounds: Sequence[Round]) -> None:
        learn_each(self, request, rounds)

    def compared(self, request: Progress, found: Comparison) -> None:
        pass

    def finished(self, step: StepOutcome) -> None:
        pass

    def prompted(self, num_rows: int, draft_seconds: float, num_asked: int = 0, num_drafts: int = 0) -> None:
        pass
