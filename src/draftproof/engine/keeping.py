"""For how long a choice is kept, and how many of its reports are taken in: choosing and learning take the host time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftproof.engine.costs import StepCosts
from draftproof.engine.draft_choice import DraftChoice
from draftproof.engine.kept_choice import (
    FIRST_KEPT,
    LEAST_LEFT,
    MOST_KEPT,
    PLAIN_EVERY,
    ROUNDS_KEPT,
    TOLD_KEPT,
    Kept,
)
from draftproof.engine.progress import Progress

CHOOSING_SHARE = 0.005  # share of the time for choosing
# Where the drafter ends proposals itself, the number of drafts is but a limit, and a good one lasts longer.
CHOOSING_SHARE_IF_CUT = 0.0025
# Only one in so many steps with drafts corrects the costs, unless savings are low; fewer where choices are kept longer,
# once costs are well known. While a choice's reports may wait, only one in so many is reported, and stands for all of
# them. Example: one in 128 from the start. After 2,000 steps of four requests 12 more rows were expected to take 1.57
# of a plain step, as in the first texts; 1.38 is right, and now expected after 200.
OBSERVED_EVERY = 8
SELDOM = 4  # how much more seldom still steps of a lookup are told of, once costs are well known
# While reports must not wait, so many steps of lookups are reported together: to take one in takes a tenth of a small
# model's step, and steps in which a lookup has no drafts lose little.
LOOKUPS_EVERY = 4
# Reports of a lookup's steps may take the host so much of the time, about, and one takes `REPORTING_SECONDS`: long
# steps are told of more often. Example: suffix drafting for 16 of `tiny`, ten steps of 13 ms a text. With one in 16
# told, steps of 271 rows were believed to take 16 ms for 16 texts and took 20.
# One in a power of two, so that the steps in which lookups' drafts are followed are among them.
REPORTED_SHARE, REPORTING_SECONDS = 0.002, 1e-4
MOST_OFTEN = 2  # else rounds, too, would be taken in one by one
# One in so many reports of a request's rounds is taken in where the savings last, for a drafter with a model: once
# costs are well known, if it stops by itself or several requests decode; or if at least `MANY` do, whose rounds tell as
# much in a step as those of one in a text. Taking all in took up to 3 % of the time of 64 requests of `small`, and 25
# us of the 1.2 ms of a step of four of `tiny`.
LEARNED_EVERY, MANY = 4, 32


@dataclass(frozen=True, slots=True)
class Keeping:
    """How choices of a drafter are kept. `is_lookup`, `is_cut`: see `AutoPolicy`; `stops`: whether the drafter stops by
    itself where so many requests decode; `affordable`: takes what a step loses, in plain steps, and returns for how
    many times `ROUNDS_KEPT` steps the `savings` last; `share`: how often there are drafts; `choosing_seconds`: what
    making a choice takes."""

    costs: StepCosts
    is_lookup: bool
    is_cut: bool
    stops: bool
    affordable: Callable[[float], float]
    savings: float
    share: float
    choosing_seconds: float

    def keep(
        self,
        asked: list[Progress],
        num_others: int,
        num_drafts: list[int],
        choice: DraftChoice,
        *,
        is_first: bool,
    ) -> Kept:
        """This choice, with its number of drafts for each of `asked`, for as many steps as it is worth keeping.
        `is_first`: for these requests, so that little is known of some."""
        is_limit = self.is_cut or self.stops
        share = CHOOSING_SHARE_IF_CUT if is_limit else CHOOSING_SHARE
        num_steps = ROUNDS_KEPT if choice.num_drafts else TOLD_KEPT * PLAIN_EVERY
        enough = self.choosing_seconds / (share * choice.seconds) / num_steps
        affordable = self.affordable(choice.worst) if choice.num_drafts else 0.0
        may_wait = affordable >= 1.0
        is_short = is_first and bool(choice.num_drafts) and not (self.is_lookup and may_wait)
        longer = max(1, min(round(enough / 2), FIRST_KEPT) if is_short else min(round(enough), MOST_KEPT))
        if may_wait:
            longer = min(longer, int(affordable))
        kept = Kept(
            asked,
            num_others,
            num_drafts,
            choice,
            is_first,
            longer,
            may_wait,
            num_made=len(asked) + num_others,
            fewest=len(asked) * self._least_left(num_drafts),
            share=self.share,
            admits=is_limit and bool(choice.num_drafts),
            is_dear=round(enough) > 1,
            saved=self.savings,
        )
        self._set_reports(kept, affordable)
        return kept

    def _least_left(self, num_drafts: Sequence[int]) -> float:
        """Share of its requests with which a choice is still kept.

        Where steps are captured the time of a choice hardly counts, and another number of requests has other levels.
        Where the drafter ends proposals itself, the price is that of those that are left. And fewer requests get no
        fewer drafts of a lookup: a further row takes longer the more there are."""
        if self.costs.is_padded:
            return 1.0
        is_most = self.is_lookup and min(num_drafts) == self.costs.levels[-1]
        is_limit = self.is_cut or self.stops
        return 0.0 if is_most or (is_limit and all(num_drafts)) else LEAST_LEFT

    def _set_reports(self, kept: Kept, affordable: float) -> None:
        """Set how many reports of this choice's steps and rounds are taken in. `affordable`: for how many times
        `ROUNDS_KEPT` steps the savings last."""
        if not kept.may_wait:
            # not without drafts: then these are only the steps whose drafts are compared, and each tells something
            if self.is_lookup and kept.choice.num_drafts:
                kept.report_every = LOOKUPS_EVERY
            return
        kept.report_every = OBSERVED_EVERY
        is_known = self.costs.are_well_known(kept.num_made)
        if self.is_lookup and kept.is_long:
            # the savings last also for those steps that nobody has told of when it goes on
            seldom = SELDOM * OBSERVED_EVERY
            lasts = affordable >= kept.longer + seldom / ROUNDS_KEPT
            kept.report_every = seldom if lasts and is_known else 2 * OBSERVED_EVERY
        if self.is_lookup:
            seldom_enough = REPORTING_SECONDS / (REPORTED_SHARE * kept.choice.seconds)
            while kept.report_every > max(MOST_OFTEN, seldom_enough):
                kept.report_every //= 2
        is_enough = kept.num_made >= MANY or (is_known and (self.stops or kept.num_made > 1))
        if not self.is_lookup and is_enough:
            kept.learn_every = LEARNED_EVERY
