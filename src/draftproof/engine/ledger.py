"""What drafts have gained and lost against plain decoding, by the steps that were reported, and what they may lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftproof.engine.acceptance import Acceptance
from draftproof.engine.costs import StepCosts, StepOutcome
from draftproof.engine.keeping import OBSERVED_EVERY
from draftproof.engine.kept_choice import ROUNDS_KEPT, Kept
from draftproof.engine.shadow_turns import ShadowTurns

# What exploring may lose, in plain steps: the budget at the start, what each `PLAIN_EVERY` without drafts add to it,
# its maximum, and the part of it that one step may risk.
ALLOWANCE = 2.0
INCOME = 0.08
MOST_SAVED = 30.0
STAKE = 0.6
LOOKUP_ALLOWANCE = 1.0  # the budget of lookups at the start: of their drafts comparisons tell as well
EARNED = 10.0  # savings from which drafts are believed to pay
CONTEXT_STEP = 256  # tokens of each request within which steps count as equally long, relative to plain ones

_Seconds = Callable[[int, int], float]  # takes the rows and drafts of a step


@dataclass(slots=True)
class Ledger:
    """`savings`, in plain steps: they fall by what steps with drafts lose and rise by what they gain. The steps correct
    `costs` as well."""

    costs: StepCosts
    acceptance: Acceptance
    shadow_turns: ShadowTurns
    savings: float = ALLOWANCE
    _num_unobserved: int = 0  # steps since one has corrected the costs
    # by requests and about their context: seconds of plain steps, and of others; see `_longer`
    _steps_about: dict[tuple[int, int], tuple[float, _Seconds]] = field(default_factory=dict)

    @property
    def stake(self) -> float:
        """What the next step may risk."""
        return STAKE * self.savings

    def affordable(self, worst: float) -> float:
        """For how many times `ROUNDS_KEPT` steps the savings last if no draft is accepted and each loses `worst`."""
        return (self.savings - ALLOWANCE) / max(ROUNDS_KEPT * worst, 1e-9)

    def pay(self, price: float) -> None:
        """Count what showing a prompt took. The first drafts that follow may still cost something."""
        self.savings = max(min(self.savings, ALLOWANCE), self.savings - price)

    def rest(self, num_steps: float) -> None:
        """Count `PLAIN_EVERY` times so many steps without drafts. What is known of acceptance fades by them: by fewer
        if drafts are seldom compared, since what those tell is to last."""
        self.acceptance.fade(num_steps * self.shadow_turns.frequency)
        self._save(INCOME * num_steps)

    def forget_sizes(self) -> None:
        """Look up again what steps take, since it is known better."""
        self._steps_about.clear()

    def take(self, steps: Sequence[tuple[StepOutcome, int]], kept: Kept | None, *, is_lookup: bool) -> None:
        """Correct the costs and the savings by these steps of the choice that is kept, each with the number that it
        stands for. `is_lookup`: of a drafter that is one."""
        resting = [step for step, num_steps in steps if step.is_plain and num_steps and step.is_typical]
        self.costs.observe_alike(resting)
        is_resting = kept is None or not kept.choice.num_drafts
        for step, num_steps in steps:
            if step.is_plain and num_steps:
                if step.is_typical:
                    self._num_unobserved = 0
                self.rest(num_steps)
                continue
            if step.is_shadow and is_resting:
                self.costs.observe_drafting(step)
                if step.is_typical:
                    plain = self.costs.plain(step.num_requests, step.context)
                    self.shadow_turns.took(step.seconds / plain - 1.0)
                continue
            self._num_unobserved += num_steps
            is_known = self.costs.are_well_known(step.num_requests)
            every = OBSERVED_EVERY * (kept.longer if kept is not None and is_known else 1)
            # a lookup's steps are told of as seldom as they are to be taken in
            if is_lookup and kept is not None and kept.may_wait:
                every = min(every, kept.report_every)
            is_rare = step.is_plain or step.is_shadow
            is_due = is_rare or self.savings < ALLOWANCE or self._num_unobserved >= every
            if is_due and step.is_typical and (is_lookup or not step.is_last):
                self._num_unobserved = 0
                self.costs.observe(step)
            if not is_rare:
                self._save(num_steps * (step.tokens_per_request - self._longer(step)))

    def _save(self, gained: float) -> None:
        """Count so many plain steps as gained, or lost."""
        self.savings = min(MOST_SAVED, max(0.0, self.savings + gained))

    def _longer(self, step: StepOutcome) -> float:
        """Plain steps that a step of this size takes, in about this context: looked up once until the next choice. By
        the cost model, not this step's time: a disturbance would have slowed a plain step as well."""
        about = step.num_requests, step.context // (CONTEXT_STEP * step.num_requests)
        known = self._steps_about.get(about)
        if known is None:
            plain = self.costs.plain(step.num_requests, step.context)
            known = self._steps_about[about] = plain, self.costs.drafting(step.num_requests, step.context)
        plain, drafting = known
        return drafting(step.num_rows, step.num_drafts) / plain
