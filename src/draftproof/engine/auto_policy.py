"""The policy that chooses the numbers of drafts by measured costs and acceptance."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draftproof.engine.acceptance import Acceptance, AcceptanceRecord, RequestClass
from draftproof.engine.costs import StepCosts, StepOutcome
from draftproof.engine.draft_choice import RISKED_ON_MANY, WORTH_GOING_ON, WORTH_IT, Chooser, DraftChoice
from draftproof.engine.exploring import Exploring
from draftproof.engine.interface import RowPrice
from draftproof.engine.keeping import Keeping
from draftproof.engine.kept_choice import (
    LEAST_LEFT,
    PLAIN_EVERY,
    RESTING_EVERY,
    ROUNDS_KEPT,
    Kept,
    ReadyChoice,
)
from draftproof.engine.ledger import (
    ALLOWANCE,
    CONTEXT_STEP,
    EARNED,
    LOOKUP_ALLOWANCE,
    MOST_SAVED,
    Ledger,
)
from draftproof.engine.opening import SHORT, is_early
from draftproof.engine.policy import Parts
from draftproof.engine.probes import NUM_COUNTED, Probes
from draftproof.engine.progress import Progress, Round
from draftproof.engine.row_price import row_prices, stop_price
from draftproof.engine.shadow_turns import ShadowTurns
from draftproof.engine.shadows import Comparison
from draftproof.metrics import Prediction

MOST_WAITING = 512  # reports that wait to be taken in, at most: nothing is chosen while no request can draft
MOST_STEPS = 16  # the same for steps: while no request can draft they come in, too
MOST_STEPS_KEPT = 256  # steps after which a choice is made again, whatever became of its drafts
KNOWN_FROM = 256  # reports after which drafts are compared in some steps only
RENEWED_EVERY = 64  # steps after which a choice that goes on is looked at again, once costs are well known
MOST_TAKEN = 256  # reports taken in after which the choice for new requests is made again
MOST_TAKEN_PLAIN = 64  # the same if it has no drafts, with those that wait: the next one may have some
# The same for lookups, with those that wait: there it is the choice that was made for earlier requests. Either counts
# for at most as many as it was made by: the first choices are soon made again.
MOST_NEW = 192
# A choice without drafts is made again once some request would have drafts so much more often than all had.
MORE_OFTEN = 2.0
# Least gain for which a drafter is shown a prompt, over what that takes: if the savings allow it or acceptance is well
# known, and at the start. The price is paid for sure, and what is expected of a request may not come.
WORTH_SHOWING, SURELY_WORTH = 1.25, 3.0
# A drafter that rests is tried with new requests only if at most this share of those that will soon decode together
# decode already. Such a trial may lose this share of an output's plain steps beyond what is expected: predictions are
# off by a few per cent.
MOST_DECODING, DOUBTED_LOSS = 0.25, 0.02
# Requests whose outputs differ by at most so many tokens, or half of the longest, began at about one time. Where slots
# are reused they differ by nearly a whole output.
TOGETHER = 64
MOST_TOKENS = 256  # output length that a new request is expected to have at most: limits are seldom reached


@dataclass(slots=True)
class AutoPolicy:
    """Chooses the numbers of drafts with which requests are soonest done, by measured costs and acceptance.

    The loss against plain decoding is bounded: `savings`, in plain steps, fall by what steps with drafts lose and rise
    by what they gain, and limit what the next step may risk.

    Reports are taken in together where they can wait: between two steps a model's weights pass through the caches, so
    the first computation after a step takes several times as long as those that follow it. And the choice for requests
    that are new is made in advance: until a first prompt is launched, a device waits for it.
    """

    costs: StepCosts
    acceptance: Acceptance
    is_lookup: bool = False  # its drafts are compared with the output
    probes: bool = False  # now and then some steps have no drafts, see `probes.py`
    is_cut: bool = False  # the drafter, a lookup, itself ends proposals where they do not pay
    stops: bool = False  # the drafter makes no drafts where going on does not pay, see `RowPrice`
    number: int = 0  # which of a request's `records` is this policy's
    chooser: Chooser = field(init=False)
    ledger: Ledger = field(init=False)
    _probes: Probes = field(init=False)
    _shadow_turns: ShadowTurns = field(default_factory=ShadowTurns)
    _exploring: Exploring = field(default_factory=Exploring)
    _length: float = 0.0  # mean tokens of a request in the last step
    _kept: Kept | None = None
    _ready: ReadyChoice | None = None
    _gives_less: bool = False  # at some time the drafter had fewer drafts than it was asked for
    _full: Counter[int] = field(default_factory=Counter)  # proposals before that, by number of drafts
    _num_taken: int = 0  # reports and steps that were taken in
    _was_asked: bool = False  # since a step was last reported
    # reports to be taken in: (method, arguments); and steps, each with the number that it stands for
    _reports: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _steps: list[tuple[StepOutcome, int]] = field(default_factory=list)
    _choosing_seconds: float = 0.0  # time that the last choice took, with the reports before it

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.costs, self.acceptance, self.stops)
        self.ledger = Ledger(self.costs, self.acceptance, self._shadow_turns)
        if self.is_lookup:
            self.savings = LOOKUP_ALLOWANCE
        self._probes = Probes(self.costs, is_seen=not self.is_lookup)

    @property
    def savings(self) -> float:
        """What steps with drafts have gained, and what they may lose, in plain steps."""
        return self.ledger.savings

    @savings.setter
    def savings(self, savings: float) -> None:
        self.ledger.savings = savings

    @property
    def parts(self) -> Parts | None:
        return None

    def _stops(self, num_requests: int) -> bool:
        """Whether the drafter stops by itself where so many requests decode. Of several some go on nearly always, so
        that no draft is left out; and those that are surer would be done sooner and leave the others alone."""
        return self.stops and num_requests == 1

    @property
    def levels(self) -> tuple[int, ...]:
        return self.costs.levels

    @property
    def compares(self) -> bool:
        """Not where steps are padded to the most drafts that are made: each that is only compared would cost rows."""
        return not self.costs.is_padded

    @property
    def report_every(self) -> int:
        return self._kept.report_every if self._kept is not None else 1

    @property
    def plain_every(self) -> int:
        if self.is_probing:
            return 1
        kept = self._kept
        is_resting = not self._was_asked or (kept is not None and kept.is_long and not kept.choice.num_drafts)
        return RESTING_EVERY if is_resting else PLAIN_EVERY

    @property
    def is_probing(self) -> bool:
        kept = self._kept
        return kept is not None and kept.is_probe and not kept.is_over

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        if not asked:
            return []
        if not self.costs.is_padded:
            num_joining = 0  # there rows of few requests cost as much without prompts as beside them
        probe = self._kept
        if probe is not None and probe.interrupted and probe.has_ended(asked, num_others):
            self._kept = self._after_probe(probe.interrupted)
        kept = self._kept
        if kept is None or not kept.is_for(asked, num_others):
            kept = self._next(asked, num_others, kept, num_joining)
            kept = self._probing(kept, is_new=kept.is_first)
        elif kept.is_over:
            if not self._goes_on(kept):
                kept = self._next(asked, num_others, kept, num_joining)
            kept = self._probing(kept)
        self._kept = kept
        kept.count_steps(1)
        self._was_asked = True
        return kept.num_drafts

    def _goes_on(self, kept: Kept) -> bool:
        """Whether a choice whose time is over is kept for as long again: where making one takes notable time, if the
        savings allow it, and the drafts are a lookup's or the drafter stops where they do not pay, and they have not
        lost since."""
        if not (kept.choice.num_drafts and kept.is_dear and kept.num_steps < MOST_STEPS_KEPT):
            return False
        stops = self._stops(kept.num_made)
        if not (self.is_lookup or stops) or not self._may_go_on(kept):
            return False
        enough = kept.saved - kept.choice.worst
        if stops:
            enough = min(enough, EARNED)
        if self.savings < MOST_SAVED or self._num_losing(kept):  # else what waits changes nothing
            self._settle_steps()
        if self.savings < enough:
            return False
        kept.go_on(self.savings)
        self._renew_if_due(kept)
        return True

    def _renew_if_due(self, kept: Kept, *, is_due: bool = False) -> None:
        """Let the price of drafts of a choice that goes on depend on what is known now: at once if it is due or while
        little is known of the costs, and else once in a while."""
        is_old = kept.num_steps >= kept.num_renewed + RENEWED_EVERY
        if is_due or is_old or not self.costs.are_well_known(kept.num_made):
            kept.num_renewed = kept.num_steps
            kept.prices = kept.stop_price = None

    def _passes_on(self, kept: Kept, asked: Sequence[Progress], ready: DraftChoice) -> bool:
        """Whether the choice that was kept for new requests, of which this is what they get, is kept for these ones."""
        is_same = kept.choice is ready and not kept.num_others and kept.num_made == len(asked)
        return is_same and not kept.is_over and self._may_go_on(kept)

    def _may_go_on(self, kept: Kept) -> bool:
        """Whether the savings last for as long again, whatever becomes of the drafts."""
        # the steps that wait have lost as much at most
        if self.ledger.affordable(kept.choice.worst) < kept.longer + self._num_losing(kept) / ROUNDS_KEPT:
            self._settle_steps()
            return self.ledger.affordable(kept.choice.worst) >= kept.longer
        return True

    def _num_losing(self, kept: Kept) -> int:
        """How many steps may have lost, of those that wait: not those with more tokens than come in the time of the
        longest step."""
        longest = 1.0 + kept.choice.worst
        return sum(
            number for step, number in self._steps if not step.is_plain and step.tokens_per_request < longest
        )

    def _next(self, asked: list[Progress], num_others: int, before: Kept | None, num_joining: int) -> Kept:
        """The choice to keep from now on, instead of the one `before` or passed on from it."""
        is_new = not num_others and self._are_new(asked, before)
        num_requests = len(asked) + num_joining  # if all are new
        if is_new and not self._num_tried(asked):
            ready = self._made_ready(num_requests)
            if ready is not None:  # reports wait for the next choice, which is made while a step runs
                if before is not None and self._passes_on(before, asked, ready):
                    longer = abs(len(asked[0].tokens) - len(before.asked[0].tokens))
                    before.pass_on(asked)
                    self._renew_if_due(before, is_due=longer > CONTEXT_STEP)
                    return before
                self._settle_steps()
                self._let_go()
                its_class = next(iter(ready.num_drafts), self._unknown(num_requests))
                return self._kept_for(asked, 0, [its_class] * len(asked), ready, is_first=True)
        start = time.perf_counter()
        self._settle()
        self._let_go()
        kept = self._choice_for(asked, num_others, before, num_joining)
        self.ledger.forget_sizes()
        self._choosing_seconds = time.perf_counter() - start
        if self.is_lookup:  # nobody asks in advance whether a lookup will draft
            if is_new:
                self._ready = ReadyChoice(
                    num_requests, kept.choice, self._num_taken, kept.share, self.savings
                )
        elif before is not None and before.is_first and not kept.is_first:
            self._renew_ready()
        return kept

    def _probing(self, kept: Kept, *, is_new: bool = False) -> Kept:
        """The probe that interrupts this choice, if one is due and no request's limit would end it first. `is_new`:
        some of its requests have not decoded, and steps after prompts are not typical. There a few steps come first:
        all may be too many, since requests end."""
        may_probe = self.probes and bool(kept.choice.num_drafts) and not kept.num_others
        # costs are corrected by the bit length of the number of requests, of fewer they would be others
        may_probe = may_probe and len(kept.asked).bit_length() == kept.num_made.bit_length()
        if not may_probe or not self._probes.is_due(kept.choice, kept.num_made, kept.num_unprobed):
            return kept
        num_reported = self._probes.num_reported(kept.num_made, kept.choice.plain_seconds)
        num_before = ROUNDS_KEPT if is_new else 0  # tokens; drafts that are there are still verified
        if any(its.room - its.num_drafts < num_before + num_reported for its in kept.asked):
            return kept
        if is_new:
            kept.hurry()
            return kept
        self._probes.start(kept.num_made)
        return kept.probe(self._longest(kept), num_reported)

    def _after_probe(self, kept: Kept) -> Kept:
        """The choice that a probe has interrupted. It goes on, unless its drafts pay no longer by what is known."""
        self._settle()
        self._probes.settle()
        gain = kept.choice.balanced / kept.num_made / (1.0 + kept.choice.worst)
        if gain * kept.longest < WORTH_IT * self._longest(kept):
            kept.is_over, kept.is_dear = True, False
        return kept

    def _longest(self, kept: Kept) -> float:
        """Plain steps that a step takes in which all drafts of this choice are verified."""
        number, most = kept.num_made, max(kept.choice.num_drafts.values())
        context = self._context(number)
        return self.costs.step(number, number * (1 + most), most, context) / self.costs.plain(number, context)

    def _made_ready(self, num_requests: int) -> DraftChoice | None:
        """The choice for so many new requests, if it is made and still holds."""
        ready = self._ready
        if ready is None or ready.num_requests != num_requests:
            return None
        choice, num_new = ready.choice, self._num_taken - ready.num_taken
        num_waiting = len(self._reports) + len(self._steps)
        if not choice.num_drafts:
            is_as_rare = self.acceptance.share <= MORE_OFTEN * ready.share
            is_fresh = num_new + num_waiting <= min(MOST_TAKEN_PLAIN, ready.num_taken)
            # else the savings may have been too low for drafts that pay
            is_as_poor = ready.savings >= EARNED or self.savings < ready.savings + ALLOWANCE
            return choice if is_as_rare and is_fresh and is_as_poor else None
        # for such requests as are now expected, or about such
        expected = self._unknown(num_requests)
        is_expected = all(
            its.odds == expected.odds
            and abs(its.rarity - expected.rarity) <= 1
            and abs(its.opening - expected.opening) <= 1
            for its in choice.num_drafts
        )
        is_safe = choice.risk <= RISKED_ON_MANY * self.ledger.stake
        most_new = MOST_TAKEN
        if self.is_lookup:
            num_new += num_waiting
            most_new = MOST_NEW
        is_fresh = num_new <= min(most_new, ready.num_taken)
        return choice if is_expected and is_safe and is_fresh else None

    def _renew_ready(self) -> None:
        """Make the choice for new requests again, if it no longer holds."""
        if self._ready is not None and self._made_ready(self._ready.num_requests) is None:
            self._make_ready(self._ready.num_requests)

    def _make_ready(self, num_requests: int) -> DraftChoice:
        choice = self._best_for(self._unknown(num_requests), num_requests)
        self._ready = ReadyChoice(num_requests, choice, self._num_taken, self.acceptance.share, self.savings)
        return choice

    def _best_for(self, its_class: RequestClass, num_requests: int) -> DraftChoice:
        counts, context = {its_class: num_requests}, self._context(num_requests)
        return self.chooser.best(counts, 0, context, self.ledger.stake)

    def _unknown(self, num_requests: int) -> RequestClass:
        """The class of so many new requests; see `_choice_for`."""
        its_class = self.acceptance.unknown
        return its_class._replace(opening=0) if self._stops(num_requests) else its_class

    def _context(self, num_requests: int) -> int:
        """Tokens of so many requests, if they are as long as those of the last step."""
        return round(self._length * num_requests)

    def _choice_for(
        self, asked: list[Progress], num_others: int, before: Kept | None, num_joining: int = 0
    ) -> Kept:
        # not where the drafter stops by itself: it knows better, and the number of drafts is but a limit
        has_opening = not (self.is_lookup or self._stops(len(asked) + num_others))
        are_early = [has_opening and is_early(request.num_outputs, request.most_outputs) for request in asked]
        classes = [
            self._class_of(request, is_early=early) for request, early in zip(asked, are_early, strict=True)
        ]
        length = sum(len(request.tokens) for request in asked) / len(asked)  # the others' is not known
        num_requests = len(asked) + num_others + num_joining
        context = round(length * num_requests)
        stake = self.ledger.stake
        seen = _ids(before)
        num_seen = sum(id(request) in seen for request in asked)
        is_first = num_seen < len(asked)
        level = 0
        if before is not None and num_seen >= LEAST_LEFT * len(asked):
            level = max(before.num_drafts, default=0)
        num_tried = self._num_tried(asked)
        num_begun = sum(are_early) if level else 0
        worth = self._least_speedup(asked, num_others, num_begun, num_tried)
        together = self.costs.is_padded and _began_together(asked)  # else it does not matter
        counts = Counter(classes)
        if num_joining:  # beside prompts rows of few requests are not free, and soon there are more
            counts[self._unknown(num_requests)] += num_joining
        choice = self.chooser.best(counts, num_others, context, stake, worth, level, began_together=together)
        if num_tried and not choice.num_drafts:
            self._exploring.lose(num_tried)
        return self._kept_for(asked, num_others, classes, choice, is_first=is_first)

    def _class_of(self, request: Progress, *, is_early: bool) -> RequestClass:
        """The class of a request; of one that takes part in a trial with the odds that may be hoped for. Rows that its
        output has no room for take time where steps are padded, and bring nothing. Example: the last 40 of 64 requests
        have one to six tokens to go. With five drafts each, steps of 6 ms took 11."""
        record = request.records[self.number]
        its_class = self.acceptance.class_of(record, is_early=is_early)
        if self.costs.is_padded and request.room < self.levels[-1]:
            its_class = its_class._replace(room=max(0, request.room))
        return self.acceptance.hoped(its_class) if self._exploring.is_tried(record) else its_class

    def _num_tried(self, asked: Sequence[Progress]) -> int:
        """How many of these take part in a trial."""
        if not self._exploring.is_running:
            return 0
        return sum(self._exploring.is_tried(request.records[self.number]) for request in asked)

    def _least_speedup(
        self, asked: Sequence[Progress], num_others: int, num_begun: int, num_tried: int
    ) -> float:
        """Least speed-up of a step at which these requests get drafts, `num_begun` of which are at their beginning and
        had some in the last step. A model's drafts go on if they have paid, or while most are at their beginning. In a
        trial they may lose as much while there is hope; then nothing, since the prompts are already shown."""
        if self.is_lookup:
            return WORTH_IT
        is_hoped = 2 * num_tried > len(asked) and self.acceptance.hope > 0
        if is_hoped or 2 * num_begun > len(asked) or self.savings >= EARNED:
            share = len(asked) / (len(asked) + num_others)
            return 1.0 - share * (1.0 - WORTH_GOING_ON)
        return 1.0 if 2 * num_tried > len(asked) else WORTH_IT

    def _kept_for(
        self,
        asked: list[Progress],
        num_others: int,
        classes: Sequence[RequestClass],
        choice: DraftChoice,
        *,
        is_first: bool,
    ) -> Kept:
        """This choice, for as many steps as it is worth keeping. `classes`: of each request; `is_first`: for these
        requests, so that little is known of some."""
        num_drafts = [choice.num_drafts.get(its_class, 0) for its_class in classes]
        keeping = Keeping(
            self.costs,
            is_lookup=self.is_lookup,
            is_cut=self.is_cut,
            stops=self._stops(len(asked) + num_others),
            affordable=self.ledger.affordable,
            savings=self.savings,
            share=self.acceptance.share,
            choosing_seconds=self._choosing_seconds,
        )
        kept = keeping.keep(asked, num_others, num_drafts, choice, is_first=is_first)
        self.acceptance.decode_together(kept.num_made, kept.learn_every)
        return kept

    def _report(self, take: Callable[..., None], *given: Any) -> None:
        """Note what `take(*given)` takes in before the next choice."""
        self._reports.append((take, given))
        if self._kept is None or len(self._reports) >= MOST_WAITING:
            self._settle()

    def _settle(self) -> None:
        """Take in all reports."""
        reports, self._reports = self._reports, []
        self._num_taken += len(reports)
        for take, given in reports:
            take(*given)
        self._settle_steps()

    def _settle_steps(self) -> None:
        """Take in the reported steps."""
        steps, self._steps = self._steps, []
        self._num_taken += len(steps)
        if steps:
            last = steps[-1][0]
            self._length = last.context / last.num_requests
            self.ledger.take(steps, self._kept, is_lookup=self.is_lookup)

    def _let_go(self) -> None:
        """Drop the kept choice. What is known of requests that got no drafts under it fades."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        self._probes.count(kept.num_made, kept.num_unprobed, has_drafts=bool(kept.choice.num_drafts))
        for request, number in zip(kept.asked, kept.num_drafts, strict=True):
            if not number:
                request.records[self.number].fade(kept.num_steps - kept.num_before)

    @property
    def _is_known(self) -> bool:
        """Whether enough is known of the requests, or of all, to compare drafts in some steps only."""
        return self._num_taken > KNOWN_FROM or (self._kept is not None and not self._kept.is_first)

    def shadows(self, chosen: Sequence[int], num_others: int) -> Sequence[int]:
        num_requests, most = len(chosen) + num_others, self.levels[-1]

        def drafting(num_asked: int) -> float:
            kept = self._kept
            if kept is not None and kept.num_made == num_requests:
                plain = kept.choice.plain_seconds
            else:
                plain = self.costs.plain(num_requests, self._context(num_requests))
            return self.costs.draft.at(num_asked, most) / plain

        return self._shadow_turns.next(chosen, most, drafting, is_known=self._is_known)

    def num_repeats(self) -> int:
        self._was_asked = True
        kept = self._kept
        if kept is None or kept.is_over:
            return 0
        if not self.compares or not self.is_lookup:
            return kept.num_left
        num_until = self._shadow_turns.num_until(kept.num_drafts, self.levels[-1], is_known=self._is_known)
        return min(kept.num_left, num_until)

    def repeated(self, num_steps: int) -> None:
        self._shadow_turns.skip(num_steps)
        if self._kept is not None:
            self._kept.count_steps(num_steps)

    def price(self) -> RowPrice:
        kept = self._kept
        if kept is None or self.costs.is_padded:
            return RowPrice()
        if self._stops(kept.num_made):
            if kept.stop_price is None:
                kept.stop_price = stop_price(self.costs, kept.choice, len(kept.asked[0].tokens))
            return kept.stop_price
        if kept.prices is None:
            length = sum(len(request.tokens) for request in kept.asked) / len(kept.asked)
            kept.prices = row_prices(
                self.costs, kept.choice, kept.num_made, length, kept.share, is_cut=self.is_cut
            )
        return kept.prices.at(len(kept.asked) + kept.num_others)

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        if self._exploring.is_tried(request.records[self.number]):
            return True  # asked again, since its prompt takes several steps
        num_requests = 1 + num_others  # all assumed to be like this one
        choice = self._made_ready(num_requests)
        if choice is None:
            self._settle()
            choice = self._make_ready(num_requests)
        plain = choice.plain_seconds
        shown = (len(request.tokens) - request.num_computed) * self.costs.prompt_row_seconds
        price = shown + num_lost * self.costs.target_row_seconds
        saved = self._num_tokens(request) * (plain / num_requests - choice.seconds / choice.tokens)
        if choice.num_drafts:
            is_affordable = num_requests * price < (self.savings - ALLOWANCE) * plain
            doubt = 0.0 if is_affordable else self.acceptance.accepted.doubt
            if saved > price * (WORTH_SHOWING + doubt * (SURELY_WORTH - WORTH_SHOWING)):
                self._exploring.end(pays=True)
                return True
        if self._tries(request, num_requests, num_decoding, price / plain):
            return True
        if saved > 0:
            self.costs.doubt_prompts()
        return False

    def _tries(self, request: Progress, num_requests: int, num_decoding: int, price: float) -> bool:
        """Whether a new request takes part in a trial, which may begin with it. `price`: plain steps that showing its
        prompt takes."""
        record = request.records[self.number]
        if self._exploring.join(record, request.arrival, price):
            return True
        is_due = not self.is_lookup and self.acceptance.hope > 0 and self.savings > ALLOWANCE
        if not is_due or num_decoding > MOST_DECODING * num_requests or request.most_outputs <= SHORT:
            return False
        hoped = self._hoped(num_requests)
        if not hoped.num_drafts:
            return False
        length, price_of_all = hoped.seconds / hoped.plain_seconds, num_requests * price
        (num_drafts,) = hoped.num_drafts.values()
        expected = self.chooser.class_tokens(self._unknown(num_requests), num_requests)[num_drafts]
        num_tokens = self._num_tokens(request)
        if num_tokens * (1.0 - length * num_requests / hoped.tokens) <= WORTH_SHOWING * price_of_all:
            return False
        to_lose = price_of_all + max(0.0, num_tokens * (length / expected - 1.0)) + DOUBTED_LOSS * num_tokens
        to_spend = self.savings - ALLOWANCE
        num_new = num_requests - num_decoding
        self._exploring.begin(num_new, request.arrival, to_lose, to_spend, MOST_SAVED - ALLOWANCE)
        return self._exploring.join(record, request.arrival, price)

    def _hoped(self, num_requests: int) -> DraftChoice:
        """The choice for so many new requests if drafts are right as often as may be hoped."""
        ready = self._ready
        assert ready is not None and ready.num_requests == num_requests
        if ready.hoped is None:
            ready.hoped = self._best_for(self.acceptance.hoped(self._unknown(num_requests)), num_requests)
        return ready.hoped

    @staticmethod
    def _num_tokens(request: Progress) -> int:
        """Tokens that a new request is expected to have."""
        return min(MOST_TOKENS, request.spec.limit - len(request.tokens))

    def predict(self, num_requests: int, context: int = 0, num_tokens: float = math.inf) -> Prediction:
        """The expected speed-up for `num_requests` new requests with `context` tokens in all, until the first of them
        ends; outputs have `num_tokens` each. In its last step half of what that could bring is lost on average.
        Example: 12 tokens a step. A request of 100 takes not 8.3 steps but 8.8, so 11.4 a step."""
        self._settle()
        average = self.acceptance.average
        choice = self.chooser.best({average: num_requests}, context=context)
        plain = num_requests / self.costs.plain(num_requests, context)
        each = choice.tokens / num_requests
        num_steps = num_tokens / each + (1.0 - 1.0 / each) / 2
        tokens = choice.tokens - (each - 1.0) / 2 / num_steps
        speedup = tokens / choice.seconds / plain
        return Prediction(num_requests, choice.num_drafts.get(average, 0), speedup)

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool = True) -> None:
        record = request.records[self.number]
        if not is_model:
            self._report(self.acceptance.count_length, record, num_asked, num_drafts)
            return
        if self.stops:
            count = self._note if self._are_whole else self.acceptance.count_given
            self._report(count, record, num_asked, num_drafts)
            return
        if num_drafts < num_asked and not self._gives_less:
            self._gives_less = True
            self.acceptance.count_full(self._full)
        if self._gives_less:
            self._report(self.acceptance.count_given, record, num_asked, num_drafts)
        else:  # there is nothing to learn
            self._full[num_asked] += 1
            record.last_asked, record.last_given = num_asked, num_drafts

    @property
    def _are_whole(self) -> bool:
        """Whether all drafts are made, though the drafter stops by itself where one request decodes alone."""
        return self.stops and not (self._kept is not None and self._stops(self._kept.num_made))

    @staticmethod
    def _note(record: AcceptanceRecord, num_asked: int, num_given: int) -> None:
        """Note a proposal that is not counted."""
        record.last_asked, record.last_given = num_asked, num_given

    def looked_up(self, request: Progress, num_asked: int, num_given: int) -> None:
        self._report(self.acceptance.count_some, request.records[self.number], num_asked, num_given)

    def verified(
        self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool = True
    ) -> None:
        self._count(request.records[self.number], num_drafted, num_accepted)

    def _count(
        self, record: AcceptanceRecord, num_drafted: int, num_accepted: int, *, is_early: bool = False
    ) -> None:
        count = partial(self.acceptance.count, is_whole=self._are_whole, is_early=is_early)
        self._report(count, record, num_drafted, num_accepted)

    def learn(self, request: Progress, rounds: Sequence[Round]) -> None:
        record = request.records[self.number]
        record.num_reports += 1
        # in turn: else the first rounds of all requests would be left out, or those of a step taken in at once
        place = request.arrival + record.num_reports
        if self._kept is not None and place % self._kept.learn_every:
            for its in reversed(rounds):
                if its.num_asked:  # in its turn, since reports before it wait
                    self._report(self._note, record, its.num_asked, its.num_proposed)
                    return
            return
        for its in rounds:
            if its.num_observed:
                early = is_early(its.num_outputs, request.most_outputs)
                self._count(record, its.num_observed, its.num_accepted, is_early=early)
            if its.num_asked:
                self.proposed(request, its.num_asked, its.num_proposed)

    def compared(self, request: Progress, found: Comparison) -> None:
        num_more = found.num_accepted - found.num_before
        kept = self._kept
        if num_more:
            num_requests = len(kept.asked) + kept.num_others if kept is not None else 1
            self._shadow_turns.hit(num_more / num_requests)
        self._report(self.acceptance.count_compared, request.records[self.number], found)
        is_first = num_more > 0 and not found.num_before
        if is_first and kept is not None and not (kept.choice.num_drafts or kept.is_over):
            self._settle()
            its_share = self.acceptance.share_of(request.records[self.number])
            kept.is_over = its_share > MORE_OFTEN * kept.share

    def prompted(self, num_rows: int, draft_seconds: float, num_asked: int = 0, num_drafts: int = 0) -> None:
        of_rows = draft_seconds - self.costs.draft.at(num_asked, num_drafts)
        if of_rows <= 0:
            return
        self.costs.observe_prompt(num_rows, of_rows)
        if self._ready is not None:  # made for as many requests as will soon decode together
            price = of_rows / self._ready.choice.plain_seconds
            self.ledger.pay(price)

    def finished(self, step: StepOutcome, num_steps: int = 0) -> None:
        """See `Policy`. `num_steps`: for how many a step without drafts stands, if not for `plain_every`."""
        kept = self._kept
        is_probed = self.is_probing and step.is_plain  # its first step verifies the drafts that there are
        num_plain = (num_steps or self.plain_every) // PLAIN_EVERY
        if not is_probed:
            self._steps.append((step, num_plain if step.is_plain else self.report_every))
            self._was_asked = False
        elif kept is not None and self._counts(step, kept):
            self._probes.steps.append(step)
        # those without drafts are alike, and nothing is risked until the next choice
        waits = step.is_plain if kept is None else kept.may_wait or not kept.choice.num_drafts
        if not waits or len(self._steps) >= MOST_STEPS:
            self._settle_steps()
        if kept is not None and not step.is_shadow and (step.is_plain or not kept.is_probe):
            kept.count_told(self.ledger.stake, max(1, num_plain) if step.is_plain else 1)

    @staticmethod
    def _counts(step: StepOutcome, probe: Kept) -> bool:
        """Whether this step of a probe tells what plain ones take, for about as many requests as it was made for."""
        is_settled = probe.num_told >= probe.num_reported - NUM_COUNTED
        return is_settled and step.num_requests.bit_length() == probe.num_made.bit_length()

    def rested(self, num_steps: int) -> None:
        """So many steps had no drafts of these drafters, whoever else made some; one of them was reported."""
        if not self.is_probing:
            self.ledger.rest(num_steps / PLAIN_EVERY)
        if self._kept is not None:  # more are reported of a lookup's long steps
            self._kept.count_told(self.ledger.stake, min(1.0, num_steps / PLAIN_EVERY))

    def _are_new(self, asked: Sequence[Progress], before: Kept | None) -> bool:
        """Whether nothing is known of any of these requests, nor waits among the reports."""
        seen = _ids(before)
        return not any(id(request) in seen or request.records[self.number].last_asked for request in asked)


def _began_together(asked: Sequence[Progress]) -> bool:
    """Whether these requests began at about one time."""
    outputs = [request.num_outputs for request in asked]
    longest = max(outputs)
    return longest - min(outputs) <= max(TOGETHER, longest / 2)


def _ids(kept: Kept | None) -> set[int]:
    """The requests of a kept choice, by `id`."""
    return set(map(id, kept.asked)) if kept is not None else set()
