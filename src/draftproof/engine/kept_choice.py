"""A choice of the numbers of drafts that is used for several steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftproof.engine.draft_choice import DraftChoice
from draftproof.engine.interface import RowPrice
from draftproof.engine.progress import Progress
from draftproof.engine.row_price import RowPrices

# For how long a choice is kept, since making one takes the host as long as a layer or two of a small model. With
# drafts, while the savings allow it: `ROUNDS_KEPT` steps. Without drafts: `TOLD_KEPT` reported steps, of which there is
# one in `PLAIN_EVERY`, since they are alike. If choosing would then take more than `CHOOSING_SHARE` of the time, up to
# `MOST_KEPT` times as long; the first choice for these requests, if it took twice that, up to `FIRST_KEPT` times,
# unless it is a lookup's and the savings last. Then it may go on for as long again, if the drafter stops by itself or
# is a lookup, or be passed on to new requests.
ROUNDS_KEPT, TOLD_KEPT = 8, 3
FEWEST_HURRIED = 2  # the first after prompts is not like the others
PLAIN_EVERY = 8
# While no request can draft, or a choice without drafts is kept for long, one step in so many is reported, and stands
# for four of those.
RESTING_EVERY = 4 * PLAIN_EVERY
MOST_KEPT, FIRST_KEPT = 16, 2
# Share of the requests that a choice was made for, with which it is still kept, where the drafter does not end
# proposals itself. And share of those that it goes on with, where others take the place of those that have ended.
LEAST_LEFT = 0.5


@dataclass(slots=True)
class Kept:
    """A choice that is kept for some steps: the requests it was made for, and the drafts of each. `is_first`: for these
    requests. `longer`: how many times as long it is kept as one that takes no time. `may_wait`: whether reports of its
    steps are taken in only afterwards, since the savings last until then whatever the reports say. `admits`: others may
    take the place of requests that have ended, since the number of drafts is but a limit."""

    asked: list[Progress]
    num_others: int
    num_drafts: list[int]
    choice: DraftChoice
    is_first: bool
    longer: int
    may_wait: bool
    num_made: int  # requests that it was made for, others included
    fewest: float  # requests with which it is still kept
    share: float  # how often there are drafts, as was known when it was made
    report_every: int = 1  # steps with drafts
    learn_every: int = 1  # reports of a request's rounds, of which one is taken in
    admits: bool = False
    is_dear: bool = False  # making one takes more than its share of the time
    saved: float = 0.0  # savings when it was made, or went on
    interrupted: Kept | None = None  # for a probe, see `probes.py`: the choice that goes on after it
    # see `Policy.price`, once it was asked for: of rows, or of a request whose drafter stops by itself
    prices: RowPrices | None = None
    stop_price: RowPrice | None = None
    num_steps: int = 0
    num_before: int = 0  # steps that it was used for before it was passed on to its requests
    num_probed: int = 0  # the same, before it was last interrupted
    num_reported: int = 0  # steps of a probe, until it is over
    longest: float = 1.0  # plain steps that a step with all its drafts took, as was believed then
    num_told: float = 0  # steps reported by `finished`
    num_renewed: int = 0  # steps that it was used for when its price was last looked at
    is_over: bool = False
    _num_more: int = 0  # steps for which it is kept beyond the first `ROUNDS_KEPT * longer`

    @property
    def is_probe(self) -> bool:
        return self.interrupted is not None

    def pass_on(self, asked: list[Progress]) -> None:
        """Be kept for these requests, as long as for the first and as many, instead of ones that have ended. All are
        new, so they get the same number of drafts."""
        self.asked = asked
        self.num_drafts = [next(iter(self.choice.num_drafts.values()), 0)] * len(asked)
        self.num_told = 0
        self.num_before = self._num_more = self.num_steps

    def probe(self, longest: float, num_reported: int) -> Kept:
        """What is kept instead until so many steps without drafts are reported. `longest`: see there."""
        self.num_probed, self.longest = self.num_steps, longest
        return replace(
            self,
            num_drafts=[0] * len(self.asked),
            longer=1,
            may_wait=False,
            report_every=1,
            interrupted=self,
            num_reported=num_reported,
            num_steps=0,
            _num_more=0,
            num_before=0,
            num_told=0,
            is_over=False,
        )

    def hurry(self) -> None:
        """Be over after the steps that `ROUNDS_KEPT` tokens of each request take, or a few. Example: of a lookup whose
        steps bring ten tokens two of the ten that a text has; after eight it would end before a probe does."""
        num_steps = max(FEWEST_HURRIED, round(ROUNDS_KEPT * self.num_made / self.choice.tokens))
        self._num_more -= max(0, self.num_left - num_steps)

    def go_on(self, savings: float) -> None:
        """Be kept for as long again, if `savings` are what is saved now."""
        self.saved = savings
        self._num_more += ROUNDS_KEPT * self.longer
        self.is_over = False

    def is_for(self, asked: list[Progress], num_others: int) -> bool:
        """Whether these are its requests, or most of those that it was made for: the others have ended since. Compares
        identities: it is called before each step."""
        if num_others != self.num_others:
            return False
        if len(asked) < len(self.asked):
            self._leave_ended(asked)
        if self._are_its(asked):
            return True
        if self.admits:
            self._admit(asked)
        return self._are_its(asked)

    def has_ended(self, asked: list[Progress], num_others: int) -> bool:
        """Whether a probe is to end before this step: beside prompts and in new sizes its steps are not told. Until
        then it is a probe, in which the drafter sees the rows."""
        return self.is_over or not self.num_left or not self.is_for(asked, num_others)

    def _are_its(self, asked: Sequence[Progress]) -> bool:
        return len(asked) == len(self.asked) and all(map(operator.is_, asked, self.asked))

    def _admit(self, asked: list[Progress]) -> None:
        """Go on with `asked`, if they are no more than it was made for, and enough, and most of them are its
        requests."""
        numbers = {id(request): number for request, number in zip(self.asked, self.num_drafts, strict=True)}
        num_known = sum(id(request) in numbers for request in asked)
        are_as_many = self.fewest <= len(asked) <= self.num_made - self.num_others
        if are_as_many and num_known >= LEAST_LEFT * len(asked):
            most = 0 if self.is_probe else max(self.choice.num_drafts.values())
            self.asked, self.num_drafts = asked, [numbers.get(id(request), most) for request in asked]

    def _leave_ended(self, asked: Sequence[Progress]) -> None:
        """Go on with `asked`, if they are enough of those that it was made for."""
        ids = set(map(id, asked))
        left = [pair for pair in zip(self.asked, self.num_drafts, strict=True) if id(pair[0]) in ids]
        if len(left) == len(asked) >= self.fewest:
            self.asked, self.num_drafts = [request for request, _ in left], [number for _, number in left]

    @property
    def is_long(self) -> bool:
        """Whether it is kept for so long that fewer reports do."""
        return self.longer >= RESTING_EVERY // PLAIN_EVERY

    @property
    def num_unprobed(self) -> int:
        """Steps that it was used for since it was interrupted."""
        return self.num_steps - self.num_probed

    @property
    def num_left(self) -> int:
        """For how many more steps it is kept, at most."""
        if self.is_probe:
            return max(0, 2 * self.num_reported - self.num_steps)
        if not self.choice.num_drafts:
            return RESTING_EVERY  # it ends by what is reported
        return ROUNDS_KEPT * self.longer + self._num_more - self.num_steps

    def count_steps(self, num_steps: int) -> None:
        """Count steps that it was used for."""
        self.num_steps += num_steps
        if self.choice.num_drafts and self.num_left <= 0 and not self.is_probe:
            self.is_over = True

    def count_told(self, stake: float, num_steps: float = 1) -> None:
        """Count a reported step, which stands for `num_steps` times as many as others, and after which a step may risk
        `stake`, in plain steps."""
        self.num_told += num_steps
        if self.is_probe:
            self.is_over = self.is_over or self.num_told >= self.num_reported
        elif not self.choice.num_drafts:
            self.is_over = self.num_told >= TOLD_KEPT * self.longer
        elif not self.may_wait and (stake < self.choice.risk or not stake):
            self.is_over = True


@dataclass(slots=True)
class ReadyChoice:
    """A choice for `num_requests` new requests, made when `num_taken` reports and steps had been taken in, `share` was
    known, as in `Kept`, and so much was saved. `hoped`: what would be chosen if drafts were right as often as may be
    hoped; None until somebody asks."""

    num_requests: int
    choice: DraftChoice
    num_taken: int
    share: float = 1.0
    savings: float = 0.0
    hoped: DraftChoice | None = None
