"""How many drafts each request gets in a chain of lookups and drafters that run a model, on a CPU.

A lookup's drafts cost hardly any time, and long ones pay where a text repeats; a model's cost its pass. So the numbers
of both kinds are chosen apart, by their own records and as if each were alone: which of them has drafts for a request
is known only when they are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.costs import StepOutcome
from draftproof.engine.interface import RowPrice
from draftproof.engine.policy import Parts
from draftproof.engine.progress import Progress, Round
from draftproof.engine.shadows import Comparison
from draftproof.metrics import Prediction


@dataclass(slots=True)
class ChainPolicy:
    """One policy for all lookups of a chain, whose drafts are compared with the output, and one for its other members.
    A step in which these draft is one of theirs; other steps with drafts are the lookups'."""

    lookups: AutoPolicy
    models: AutoPolicy
    _parts: Parts = field(default_factory=lambda: Parts([], []))
    _are_models_asked: bool = False  # about the last choice: models may draft for some request

    @property
    def levels(self) -> tuple[int, ...]:
        return self.lookups.levels

    @property
    def parts(self) -> Parts:
        return self._parts

    @property
    def compares(self) -> bool:
        return True

    @property
    def report_every(self) -> int:
        return (self.models if any(self._parts.of_models) else self.lookups).report_every

    @property
    def plain_every(self) -> int:
        return self.lookups.plain_every

    @property
    def is_probing(self) -> bool:
        """Never for the models: with or without lookups' drafts they see the rows only while they draft."""
        return False

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        # the model's drafters have not seen all rows of the others
        able = [request for request in asked if request.draft_hole is None]
        self._are_models_asked = bool(able)
        chosen = self.models.choose(able, num_others + len(asked) - len(able), num_joining)
        self.lookups.probes = not any(chosen)  # else no step would be plain
        of_lookups = self.lookups.choose(asked, num_others, num_joining)
        of_models = chosen
        if len(able) < len(asked):
            found = {id(request): number for request, number in zip(able, chosen, strict=True)}
            of_models = [found.get(id(request), 0) for request in asked]
        self._parts = Parts(of_lookups, of_models)
        return [max(pair) for pair in zip(of_lookups, of_models, strict=True)]

    def shadows(self, chosen: Sequence[int], num_others: int) -> Sequence[int]:
        return self.lookups.shadows(self._parts.of_lookups, num_others)

    def num_repeats(self) -> int:
        if any(self._parts.of_models):
            return 0
        return min(policy.num_repeats() for policy in self._asked)

    def repeated(self, num_steps: int) -> None:
        for policy in self._asked:
            policy.repeated(num_steps)

    @property
    def _asked(self) -> Sequence[AutoPolicy]:
        """Whose choice the last one was."""
        return (self.lookups, self.models) if self._are_models_asked else (self.lookups,)

    def price(self) -> RowPrice:
        of_models = self.models.price()
        return self.lookups.price()._replace(of_draft=of_models.of_draft, of_row=of_models.of_row)

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return self.models.will_draft(request, num_others, num_lost, num_decoding)

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool) -> None:
        (self.models if is_model else self.lookups).proposed(
            request, num_asked, num_drafts, is_model=is_model
        )

    def looked_up(self, request: Progress, num_asked: int, num_given: int) -> None:
        self.lookups.looked_up(request, num_asked, num_given)

    def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
        (self.models if is_model else self.lookups).verified(request, num_drafted, num_accepted)

    def learn(self, request: Progress, rounds: Sequence[Round]) -> None:
        self.models.learn(request, rounds)

    def compared(self, request: Progress, found: Comparison) -> None:
        self.lookups.compared(request, found)

    def finished(self, step: StepOutcome) -> None:
        most = max(self._parts.of_models, default=0)
        if most:
            self.lookups.rested(self.report_every)
            num_made = min(most, step.num_drafts) if self.models.stops else most
            self.models.finished(step._replace(num_drafts=num_made))
        elif step.is_plain:
            # in a probe each step is told, which would be too many for the models
            num_steps = 0 if self.lookups.is_probing else self.plain_every
            self.lookups.finished(step)
            if num_steps:
                self.models.finished(step, num_steps)
        else:
            self.models.rested(self.report_every)
            self.lookups.finished(step)

    def prompted(self, num_rows: int, draft_seconds: float, num_asked: int = 0, num_drafts: int = 0) -> None:
        self.models.prompted(num_rows, draft_seconds, num_asked, num_drafts)

    def predict(self, num_requests: int, context: int = 0, num_tokens: float = math.inf) -> Prediction:
        """The speed-up by whichever of the two gains more: both together gain at least as much."""
        both = [policy.predict(num_requests, context, num_tokens) for policy in (self.lookups, self.models)]
        return max(both, key=lambda prediction: prediction.speedup)
