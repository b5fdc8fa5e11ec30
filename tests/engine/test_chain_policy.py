"""The numbers of drafts in a chain of a lookup and a head: chosen apart, by who makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import internals
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.chain_policy import ChainPolicy
from draftproof.engine.costs import DraftCosts, StepOutcome
from draftproof.engine.interface import StepInput
from draftproof.engine.keeping import LEARNED_EVERY, MANY
from draftproof.engine.kept_choice import PLAIN_EVERY
from draftproof.engine.ledger import INCOME, MOST_SAVED
from draftproof.engine.opening import NUM_OPENING
from draftproof.engine.policy import Parts
from draftproof.engine.progress import Progress, Round
from draftproof.engine.runner import ModelRunner
from draftproof.engine.shadows import Comparison
from draftproof.metrics import Prediction
from draftproof.runtime import native
from tests.engine.test_policy import policy
from tests.engine.test_scheduler import request

CHAIN: dict[str, Any] = {
    "method": "chain",
    "drafters": [{"method": "suffix"}, {"model": str(assets.path("tiny-eagle3"))}],
}
CODE = "def add(a, b):\n    return a + b\n"


def parted(of_lookups: float = 0.9, of_models: float = 0.9) -> ChainPolicy:
    """A policy that expects these chances of acceptance."""
    models = policy(of_models, row=0.05, step=0.1)
    models.number = 1
    return ChainPolicy(policy(of_lookups, row=0.05, step=0.1), models)


def a_step(num_rows: int, num_drafts: int, num_tokens: int = 1) -> StepOutcome:
    return StepOutcome(1, num_rows, num_drafts, num_tokens, 100, 1.0)


def test_each_kind_gets_its_own_number() -> None:
    its, one = parted(0.97, 0.5), request(4)
    its.lookups.savings = its.models.savings = 30.0
    (most,) = its.choose([one], 0)
    (of_lookups,), (of_models,) = its.parts
    assert most == of_lookups > of_models > 0


def test_a_model_does_not_draft_for_a_request_whose_rows_it_missed() -> None:
    its, one, other = parted(), request(4), request(4, 1)
    one.miss_drafter(2, is_partial=True)
    its.choose([one, other], 0)
    assert its.parts.of_models[0] == 0 < its.parts.of_models[1] and all(its.parts.of_lookups)


def test_what_is_told_goes_to_those_it_tells_of() -> None:
    its, one = parted(), request(4)
    its.proposed(one, 8, 0, is_model=False)
    its.proposed(one, 4, 3, is_model=True)
    its.verified(one, 3, 1, is_model=True)
    its.looked_up(one, 2, 1)
    for part in (its.lookups, its.models):
        part._settle()
    assert [record.asked for record in one.records] == [2.0, 1.0]
    assert [record.given for record in one.records] == [1.0, 1.0]
    its.compared(one, Comparison(8, 3, 0, 3, False))
    assert [record.hits for record in one.records] == [3.0, 1.0]


def test_a_chain_s_model_learns_as_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told which rounds are an output's first, and of a quarter where many decode and the savings last."""
    its, asked = parted(), [request(4, number, limit=100) for number in range(MANY)]
    its.models.savings = MOST_SAVED
    its.choose(asked, 0)
    told = list[bool]()
    monkeypatch.setattr(Acceptance, "count", lambda *given, is_early, **named: told.append(is_early))
    for one in asked:
        its.learn(one, [Round(1, 1, 0, 0, 0), Round(1, 1, 0, 0, NUM_OPENING)])
    its.models._settle()
    assert told == [True, False] * (MANY // LEARNED_EVERY)
    its.lookups._settle()
    assert len(told) == 2 * MANY // LEARNED_EVERY, "lookups hear of theirs otherwise"


@pytest.mark.parametrize("of_models", [0, 3])
def test_a_step_is_that_of_the_models_if_they_draft(of_models: int) -> None:
    """With the number of their drafts; the others are known to have rested."""
    its, savings = parted(), 5.0
    its.lookups.savings = its.models.savings = savings
    its._parts = Parts([8], [of_models])
    heard = list[tuple[str, StepOutcome]]()
    for name in ("lookups", "models"):
        part = getattr(its, name)
        setattr(its, name, Hearing(part.costs, part.acceptance, name=name, heard=heard))
        getattr(its, name).savings = savings
    its.finished(a_step(9, 8))
    assert heard == [("models", a_step(9, 3)) if of_models else ("lookups", a_step(9, 8))]
    rested = its.lookups if of_models else its.models
    assert rested.savings == savings + INCOME / PLAIN_EVERY, (
        "one step in so many is told of where nobody drafts"
    )
    its._parts = Parts([0], [0])
    its.finished(a_step(1, 0))
    assert heard[1:] == [("lookups", a_step(1, 0)), ("models", a_step(1, 0))]


@dataclasses.dataclass
class Hearing(type(policy())):  # type: ignore[misc]
    """Notes the steps that it is told of."""

    name: str = ""
    heard: list[tuple[str, StepOutcome]] = dataclasses.field(default_factory=list)

    def finished(self, step: StepOutcome, num_steps: int = 0) -> None:
        self.heard.append((self.name, step))


def test_a_prediction_is_that_of_the_better_kind() -> None:
    for rates in ((0.9, 0.2), (0.2, 0.9)):
        its = parted(*rates)
        found = its.predict(1), its.lookups.predict(1), its.models.predict(1)
        assert found[0] == found[1 + (rates[1] > rates[0])] and isinstance(found[0], Prediction)


class Always(ChainPolicy):
    """Lookups are asked for 16 drafts; the head for 3, until the sixteenth step."""

    num_steps = 0

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self.num_steps += 1
        can = [request.draft_hole is None for request in asked]
        self._parts = Parts([16] * len(asked), [3 * (c and self.num_steps < 16) for c in can])
        return [16] * len(asked)

    def shadows(self, chosen: list[int], num_others: int) -> list[int]:
        return [16] * len(chosen)

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return True


@pytest.fixture(name="llm")
def llm_with_a_chain() -> Iterator[LLM]:
    with LLM(max_num_seqs=2, speculative_config=CHAIN, device="cpu") as made:
        yield made


def test_a_chain_has_its_own_policy(llm: LLM) -> None:
    its = llm.core.policy
    assert isinstance(its, ChainPolicy) and (its.lookups.number, its.models.number) == (0, 1)
    assert its.levels[-1] == 16 > its.models.levels[-1]
    measured = its.lookups.costs.draft
    assert not measured.by_requests and measured != DraftCosts() and measured.at(1, 16) < 1e-3
    assert its.lookups.costs is not its.models.costs and its.models.costs.draft.by_requests
    assert llm.stats.predictions


def test_lookups_draft_on_where_the_head_does_not_see_the_rows(
    monkeypatch: pytest.MonkeyPatch, llm: LLM
) -> None:
    """Up to the sixteenth step the head has at most three drafts; then it is shown nothing and the lookup drafts on.
    The output is that without drafts."""
    its, steps = llm.core.policy, list[StepInput]()
    assert isinstance(its, ChainPolicy)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    with internals.asking_for(llm, 0):
        (expected,) = llm.generate(CODE, params, use_tqdm=False)
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda its, step: (steps.append(step), run(its, step))[1])
    before = [drafter.speculation.num_draft_tokens for drafter in llm.stats.drafters]
    with internals.using(llm, Always(its.lookups, its.models)):
        (found,) = llm.generate(CODE, params, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    shown = [step for step in steps if step.scheduled and not step.without_models]
    missed = [step for step in steps if step.scheduled and step.without_models]
    assert {step.most_model_drafts for step in shown} == {3} and len(shown) == 15 and missed
    drafted = [d.speculation.num_draft_tokens - n for d, n in zip(llm.stats.drafters, before, strict=True)]
    assert drafted[0] > 0 and 0 < drafted[1] <= 3 * 15
    assert max(s.num_rows for step in missed for s in step.scheduled) > 4, "the lookup had long drafts"


@pytest.mark.skipif(native.load() is None, reason="nothing is recorded without the compiled operators")
def test_the_pass_of_a_lookup_alone_is_soon_recorded(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Python is run for each new number of rows only: twice, the second time to record it."""
    its, called = llm.core.policy, list[int]()
    assert isinstance(its, ChainPolicy)
    propose = SuffixDrafter.propose
    monkeypatch.setattr(SuffixDrafter, "propose", lambda *given: (called.append(1), propose(*given))[1])
    params, each = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), list[int]()
    with internals.using(llm, OnlyLookups(its.lookups, its.models)):
        for _ in range(6):
            called.clear()
            llm.generate(CODE, params, use_tqdm=False)
            each.append(len(called))
    assert each[0] > 3 and each[-1] == 1, "the step after the prompt is not recorded"


@pytest.mark.parametrize(("of_lookups", "has_hole"), [(0.9, True), (0.1, True), (0.1, False)])
def test_answers_that_are_used_again_are_those_of_a_policy_that_is_asked(
    of_lookups: float, has_hole: bool
) -> None:
    """While no model drafts: since it has missed rows, or since that would not pay."""
    each, some = parted(of_lookups, 0.02), parted(of_lookups, 0.02)
    one = request(4)
    if has_hole:
        one.miss_drafter(2, is_partial=True)
    for its in (each, some):
        its.lookups.is_lookup = True
        its.lookups.savings = its.models.savings = 10.0
    found, looked, num_left, num_used, num_asked = list[int](), list[int](), 0, 0, 0
    for number in range(200):
        chosen = each.choose([one], 0)
        shadows = each.shadows(chosen, 0)
        looked = []
        if num_left:
            num_left, num_used = num_left - 1, num_used + 1
        else:
            some.repeated(num_used)
            found, num_used, num_asked = list(some.choose([one], 0)), 0, num_asked + 1
            looked, num_left = list(some.shadows(found, 0)), some.num_repeats()
        assert found == list(chosen) and some.parts == each.parts and looked == list(shadows), number
        if number % PLAIN_EVERY == 0:
            some.repeated(num_used)
            step = a_step(1 + chosen[0], chosen[0], 1)
            each.finished(step)
            some.finished(step)
            num_left, num_used = some.num_repeats(), 0
    assert some.lookups.savings == each.lookups.savings and num_asked < 100


def test_a_policy_is_asked_in_each_step_in_which_a_model_drafts() -> None:
    its, one = parted(0.5, 0.97), request(4)
    its.lookups.savings = its.models.savings = 30.0
    its.choose([one], 0)
    assert any(its.parts.of_models) and not its.num_repeats()


class OnlyLookups(Always):
    """The head never drafts, and sees no prompt."""

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self._parts = Parts([16] * len(asked), [0] * len(asked))
        return [16] * len(asked)

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return False


def test_lookups_draft_after_a_cached_prefix_that_the_head_has_not_seen(llm: LLM) -> None:
    its, prompt = llm.core.policy, CODE * 12
    assert isinstance(its, ChainPolicy)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with internals.using(llm, OnlyLookups(its.lookups, its.models)):
        (first,) = llm.generate(prompt, params, use_tqdm=False)
        (again,) = llm.generate(prompt, params, use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids and again.metrics.num_cached_tokens
    for found in (first, again):
        suffix, head = (drafter.speculation for drafter in found.metrics.drafters)
        assert suffix.num_accepted_tokens > 5 and not head.num_draft_tokens


class NotForAll(Always):
    """Only the first request is to have the head's drafts, and nobody a lookup's."""

    first: Progress | None = None

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        if asked and self.first is None:
            self.first = asked[0]
        of_models = [3 * (request is self.first) for request in asked]
        self._parts = Parts([0] * len(asked), of_models)
        return of_models

    def shadows(self, chosen: list[int], num_others: int) -> list[int]:
        return [16] * len(chosen)

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool) -> None:
        assert not is_model or (request is self.first and num_asked and num_drafts <= num_asked)
        super().proposed(request, num_asked, num_drafts, is_model=is_model)


def test_the_heads_drafts_for_a_request_that_wants_none_are_dropped(llm: LLM) -> None:
    """It makes them beside those of another. They are neither verified nor reported."""
    its, prompts = llm.core.policy, ["class A", "import os"]
    assert isinstance(its, ChainPolicy)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with internals.asking_for(llm, 0):
        expected = llm.generate(prompts, params, use_tqdm=False)
    with internals.using(llm, NotForAll(its.lookups, its.models)):
        found = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    drafted = [output.metrics.drafters[1].speculation.num_draft_tokens for output in found]
    assert drafted[0] > 0 == drafted[1]
