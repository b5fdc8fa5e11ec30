"""Policies: costs, and the numbers of drafts chosen by them. No engine, no clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from draftproof.engine import keeping
from draftproof.engine.acceptance import (
    ODDS_STEP,
    OWN_FADING,
    POOL_FADING,
    POOL_MEMORY,
    Acceptance,
    AcceptanceRecord,
    RequestClass,
    Whole,
)
from draftproof.engine.auto_policy import (
    MORE_OFTEN,
    MOST_NEW,
    MOST_STEPS,
    MOST_STEPS_KEPT,
    MOST_TAKEN,
    MOST_TAKEN_PLAIN,
    MOST_WAITING,
    RENEWED_EVERY,
    SURELY_WORTH,
    TOGETHER,
    WORTH_SHOWING,
    AutoPolicy,
    _began_together,
)
from draftproof.engine.costs import (
    GUESSED_DRAFT,
    PROMPT_RATE,
    ROW_SIZES,
    TRUSTED_HOST,
    WELL_KNOWN,
    Curve,
    DraftCosts,
    StepCosts,
    StepOutcome,
    rounded_rows,
)
from draftproof.engine.draft_choice import DOUBTED, WORTH_IT, Chooser, DraftChoice, DraftRows, Part
from draftproof.engine.exploring import Exploring
from draftproof.engine.host_costs import LEAST_HOST, HostCosts
from draftproof.engine.interface import RowPrice
from draftproof.engine.keeping import LEARNED_EVERY, LOOKUPS_EVERY, MANY, MOST_OFTEN, OBSERVED_EVERY
from draftproof.engine.kept_choice import (
    FEWEST_HURRIED,
    FIRST_KEPT,
    MOST_KEPT,
    PLAIN_EVERY,
    RESTING_EVERY,
    ROUNDS_KEPT,
    TOLD_KEPT,
    Kept,
    ReadyChoice,
)
from draftproof.engine.ledger import ALLOWANCE, EARNED, INCOME, MOST_SAVED, STAKE, Ledger
from draftproof.engine.opening import NUM_OPENING
from draftproof.engine.policy import FixedPolicy
from draftproof.engine.probes import (
    FEWEST_APART,
    LOOKUPS_SHARE,
    MOST_SETTLING,
    NUM_COUNTED,
    NUM_SETTLING,
    PROBED_STEPS,
    SOONER,
    Probes,
)
from draftproof.engine.progress import Progress, Round
from draftproof.engine.row_price import LOOKED_AT, PATIENCE, row_prices
from draftproof.engine.shadows import Comparison
from tests.engine.test_scheduler import request

LEVELS = (0, 1, 2, 3, 5, 8)
RESTED = RESTING_EVERY // PLAIN_EVERY


@dataclass
class Observing:
    """Costs that note the steps by which they are corrected."""

    costs: StepCosts
    seen: list[StepOutcome]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.costs, name)

    def observe(self, step: StepOutcome) -> None:
        self.seen.append(step)


def costs(
    row: float = 0.02,
    step: float = 0.05,
    base: float = 1.0,
    buckets: tuple[int, ...] = (),
    levels: tuple[int, ...] = LEVELS,
) -> StepCosts:
    """Costs with a target pass of `base` + `row` per row, and a draft pass of `step` per draft."""
    found = StepCosts(levels, buckets, Curve({n: base + row * n for n in (1, 8, 64, 512)}))
    for k in levels[1:]:
        for num_requests in (1, 64):
            found.draft.set(num_requests, k, step * k)
    return found


def policy(rate: float = 0.6, **given: Any) -> AutoPolicy:
    return AutoPolicy(costs(**given), Acceptance(8, expected=rate))


def plain_step(seconds: float, context: int = 0) -> StepOutcome:
    return StepOutcome(1, 1, 0, 1, context, seconds, 0.0)


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that rest are not tried, see `exploring.py`."""
    monkeypatch.setattr(Exploring, "begin", lambda *given: None)


def chosen(policy: AutoPolicy, counts: Mapping[int, int]) -> dict[int, int]:
    """Number of drafts for each class, by its odds."""
    choice = policy.chooser.best({RequestClass(odds): number for odds, number in counts.items()})
    return {odds: choice.num_drafts.get(RequestClass(odds), 0) for odds in counts}


def test_good_and_cheap_drafts_are_asked_for_in_full() -> None:
    assert chosen(policy(0.95, row=0.005, step=0.01), {0: 1}) == {0: 8}


def test_useless_drafts_are_not_asked_for() -> None:
    assert chosen(policy(0.02, row=0.05, step=0.1), {0: 1}) == {0: 0}


@pytest.mark.parametrize("buckets", [(), (1,)])
def test_drafts_that_gain_less_than_predictions_are_off_are_not_asked_for(buckets: tuple[int, ...]) -> None:
    for speedup, expected in ((1.02, 0), (1.05, 1)):
        its = policy(0.5, row=0.0, step=1.5 / speedup - 1.0, levels=(0, 1), buckets=buckets)
        assert chosen(its, {0: 1}) == {0: expected}


@pytest.mark.parametrize(("num_requests", "speedup", "expected"), [(1, 1.01, 2), (8, 1.02, 1), (8, 1.04, 2)])
def test_a_padded_step_of_several_requests_has_more_drafts_only_if_that_pays(
    num_requests: int, speedup: float, expected: int
) -> None:
    """`speedup`: of two drafts for each request over one, where tokens are 1.5 and 1.75."""
    its = policy(0.5, row=0.0, levels=(0, 1, 2), buckets=(1, 8))
    its.costs.draft.set(num_requests, 1, 0.1)
    its.costs.draft.set(num_requests, 2, 1.1 * (1.75 / 1.5) / speedup - 1.0)
    assert chosen(its, {0: num_requests}) == {0: expected}


@pytest.mark.parametrize(
    ("num_requests", "age", "speedup", "expected"),
    [
        (2, 0, 1.02, 1),
        (2, 0, 1.04, 2),
        (64, 0, 1.07, 1),
        (64, 0, 1.09, 2),
        (64, TOGETHER, 1.07, 1),
        (64, TOGETHER + 1, 1.07, 2),
        (64, TOGETHER + 1, 1.02, 1),
    ],
)
def test_many_padded_requests_that_began_together_have_more_drafts_only_for_more(
    num_requests: int, age: int, speedup: float, expected: int
) -> None:
    """`speedup`: of two drafts over one; `age`: by how many tokens the oldest output is longer than the others."""
    its = policy(0.5, row=0.0, levels=(0, 1, 2), buckets=(num_requests,))
    its.savings = MOST_SAVED
    its.costs.draft.set(num_requests, 1, 0.1)
    its.costs.draft.set(num_requests, 2, 1.1 * (1.75 / 1.5) / speedup - 1.0)
    asked = [request(4, number) for number in range(num_requests)]
    for one in asked:  # so that they are not new
        one.records[0].last_asked = 1
    asked[0].tokens += [1] * age
    assert its.choose(asked, 0) == [expected] * num_requests


@pytest.mark.parametrize(
    ("num_longest", "num_others", "together"), [(64, 0, True), (65, 0, False), (200, 101, True)]
)
def test_who_began_together(num_longest: int, num_others: int, together: bool) -> None:
    """Requests that began together drift apart: by at most half of their outputs."""
    asked = [request(4, number) for number in range(3)]
    asked[0].tokens += [1] * num_longest
    for one in asked[1:]:
        one.tokens += [1] * num_others
    assert _began_together(asked) is together


@pytest.mark.parametrize(
    ("before", "speedup", "expected"), [(2, 0.95, 1), (2, 0.98, 2), (1, 1.07, 1), (1, 1.09, 2)]
)
def test_many_padded_requests_return_to_fewer_drafts_for_less(
    before: int, speedup: float, expected: int
) -> None:
    """`speedup`: of two drafts over one, for 64 requests that began together."""
    its = policy(0.5, row=0.0, levels=(0, 1, 2), buckets=(64,))
    its.costs.draft.set(64, 1, 0.1)
    its.costs.draft.set(64, 2, 1.1 * (1.75 / 1.5) / speedup - 1.0)
    choice = its.chooser.best({RequestClass(0): 64}, before=before)
    assert list(choice.num_drafts.values()) == [expected]


@pytest.mark.parametrize(
    ("before", "speeds", "expected"),
    [
        (3, (1.0, 1.02, 0.975), 1),
        (2, (1.0, 0.985, 1.01), 2),
        (3, (1.0, 1.05, 1.03), 3),
        (0, (1.0, 1.02, 1.05), 3),
    ],
)
def test_the_drafts_of_the_step_before_are_compared_with_the_best(
    before: int, speeds: tuple[float, ...], expected: int
) -> None:
    its = policy(0.5, row=0.0, levels=(0, 1, 2, 3), buckets=(1, 8))
    for level, tokens, speed in zip((1, 2, 3), (1.5, 1.75, 1.875), speeds, strict=True):
        its.costs.draft.set(8, level, 1.1 * (tokens / 1.5) / speed - 1.0)
    choice = its.chooser.best({RequestClass(0): 8}, before=before)
    assert list(choice.num_drafts.values()) == [expected]


@pytest.mark.parametrize(
    ("before", "speedup", "expected"),
    [(0, 1.02, 1), (1, 1.02, 1), (1, 1.04, 2), (2, 1.02, 2), (2, 0.98, 2), (2, 0.96, 1)],
)
def test_a_padded_step_has_other_drafts_than_the_one_before_only_if_that_pays(
    before: int, speedup: float, expected: int
) -> None:
    """`speedup`: of two drafts over one."""
    its = policy(0.5, row=0.0, levels=(0, 1, 2), buckets=(1, 8))
    its.costs.draft.set(8, 1, 0.1)
    its.costs.draft.set(8, 2, 1.1 * (1.75 / 1.5) / speedup - 1.0)
    choice = its.chooser.best({RequestClass(0): 8}, before=before)
    assert list(choice.num_drafts.values()) == [expected]
    asked = [request(4, number) for number in range(8)]
    its.choose(asked, 0)
    its._kept.num_drafts, its._kept.is_over = [before] * 8, True
    assert its.choose(asked, 0) == [expected] * 8
    its._kept.num_drafts, its._kept.is_over = [before] * 8, True
    others = [request(4, number) for number in range(8, 16)]
    assert its.choose(others, 0) == [1 if speedup < 1.038 else 2] * 8, "others had no step before"


def test_beside_prompts_padded_requests_have_the_drafts_of_all_that_will_soon_decode() -> None:
    """Two drafts pay for one and for two requests, and one draft for four."""
    its, ragged = (policy(0.9, row=0.0, levels=(0, 1, 2), buckets=buckets) for buckets in ((1, 2, 4), ()))
    for each in (its, ragged):
        each.savings = MOST_SAVED
        for num_requests, of_one, of_two in ((2, 0.05, 0.1), (4, 0.1, 2.0)):
            each.costs.draft.set(num_requests, 1, of_one)
            each.costs.draft.set(num_requests, 2, of_two)
    one = request(4)
    assert its.will_draft(one, 3)
    assert its.choose([one], 0, 3) == [1], "three will join"
    assert its._kept.choice is its._ready.choice, "made when the drafter was to see the prompt"
    one.records[0].last_asked = 1
    two = [one, request(4, 1)]
    assert its.choose(two, 0, 2) == [1, 1], "one of which has joined"
    its._kept = None
    assert its.choose(two, 0) == [2, 2], "nobody will"
    assert ragged.choose(two, 0, 2) == [2, 2], "each row has its price with and without prompts"


def test_padded_requests_have_no_drafts_that_their_outputs_have_no_room_for() -> None:
    """Three of four requests end with the next two tokens, then all with the next. Rows for more take time all the
    same."""
    its = policy(0.9, row=0.05, step=0.0, levels=(0, 1, 5), buckets=(4,))
    its.savings = MOST_SAVED
    asked = [request(4, number, 100) for number in range(4)]
    assert its.choose(asked, 0) == [5] * 4
    for ending, room, expected in ((asked[1:], 1, 1), (asked, 0, 0)):
        for one in ending:
            one.tokens += [1] * (one.room - room)
        its._kept = None
        assert its.choose(asked, 0) == [expected] * 4


@pytest.mark.parametrize(("savings", "goes_on"), [(EARNED, True), (EARNED - 1.0, False)])
@pytest.mark.parametrize("speedup", [0.93, 0.99])
def test_a_drafter_that_has_paid_is_not_dropped_for_little(
    speedup: float, savings: float, goes_on: bool
) -> None:
    """It would miss the rows of a request without drafts, and have no more for it."""
    its, one = policy(0.5, row=0.0, step=1.5 / speedup - 1.0, levels=(0, 1)), request(4)
    its.savings = savings
    assert (its.choose([one], 0) == [1]) == (goes_on and speedup > 0.95)


def test_a_lookup_rests_as_soon_as_drafts_do_not_pay() -> None:
    its = policy(0.5, row=0.0, step=1.5 / 0.99 - 1.0, levels=(0, 1))
    its.savings, its.is_lookup = MOST_SAVED, True
    assert its.choose([request(4)], 0) == [0]


@pytest.mark.parametrize("is_lookup", [False, True])
def test_steps_that_verify_drafts_and_make_none_tell_nothing_of_others(is_lookup: bool) -> None:
    """A drafter with keys sees their rows, which takes time, and only then rests."""
    its = policy(0.9)
    its.is_lookup, its.savings, before = is_lookup, 0.0, its.costs.step(1, 9, 8)
    its.finished(StepOutcome(1, 9, 0, 1, 0, 5.0))
    its._settle()
    assert (its.costs.step(1, 9, 8) == before) == (not is_lookup)


def test_expensive_drafts_are_asked_for_sparingly() -> None:
    cheap, dear = (chosen(policy(0.7, row=r, step=s), {0: 1})[0] for r, s in ((0.01, 0.02), (0.05, 0.25)))
    assert 0 < dear < cheap


def test_a_large_batch_gets_fewer_drafts() -> None:
    numbers = [chosen(policy(0.8, row=0.04, step=0.01), {0: n})[0] for n in (1, 16, 400)]
    assert numbers[0] > numbers[1] > 0 == numbers[2]


def test_the_choice_is_the_best_there_is() -> None:
    """Compared with every number of drafts, for a batch of equal requests, by the tokens that are counted on."""
    for rate, row, step in ((0.3, 0.01, 0.02), (0.5, 0.03, 0.1), (0.8, 0.05, 0.05), (0.9, 0.1, 0.3)):
        for num_requests in (1, 4, 32):
            its = policy(rate, row=row, step=step)
            plain = num_requests / its.costs.plain(num_requests)
            speeds = {0: WORTH_IT * plain}
            for k in LEVELS[1:]:
                first, *later = its.acceptance.survival()[:k]
                tokens = num_requests * (1 + first + (1 - DOUBTED) * sum(later))
                speeds[k] = tokens / its.costs.step(num_requests, num_requests * (1 + k), k)
            best = max(speeds, key=lambda k: speeds[k])
            assert chosen(its, {0: num_requests})[0] == best
            tokens = num_requests * (1 + sum(its.acceptance.survival()[:best]))
            speed = tokens / its.costs.step(num_requests, num_requests * (1 + best), best)
            assert its.predict(num_requests).speedup == pytest.approx(speed / plain), (
                "of all that are expected"
            )


def test_a_prediction_for_short_outputs_knows_that_they_end_in_the_middle_of_a_step() -> None:
    """All of eight drafts right: nine tokens a step, of which the last of a request leaves four unused on average."""
    its = policy(1.0 - 1e-9, row=0.0, step=1e-6)
    for num_requests in (1, 4):
        long, short = its.predict(num_requests), its.predict(num_requests, num_tokens=100)
        num_steps = 100 / 9 + 4 / 9
        assert long.speedup == pytest.approx(9.0, rel=1e-3)
        assert short.speedup == pytest.approx(9.0 - 4 / num_steps / num_requests, rel=1e-3)
    assert its.predict(1, num_tokens=100).speedup == pytest.approx(100 / num_steps, rel=1e-3)


@pytest.mark.parametrize("gain, expected", [(0.99, 1), (1.02, 1), (1.08, 2)])
def test_of_numbers_that_gain_about_the_same_the_smallest_is_chosen(gain: float, expected: int) -> None:
    """By as much as a second draft gains over the first."""
    first, second = 1.8, 1.8 + 0.64  # tokens of drafts that are right at 0.8
    found = costs(row=0.0, step=0.0, levels=(0, 1, 2))
    found.draft.set(1, 2, second / first / gain - 1.0)
    its = AutoPolicy(found, Acceptance(8, expected=0.8))
    assert chosen(its, {0: 1}) == {0: expected}


def test_each_class_of_requests_gets_its_own_number() -> None:
    good, bad = 8, -12
    found = chosen(policy(0.6, row=0.1, step=0.01), {good: 4, bad: 4})
    assert found[good] > found[bad] == 0
    padded = AutoPolicy(costs(buckets=(8, 16)), Acceptance(8))
    assert len(set(chosen(padded, {good: 4, bad: 4}).values())) == 1, (
        "steps are filled up: nobody saves a row"
    )


@pytest.mark.parametrize(("good", "bad"), [(8, -12), (6, 0), (3, -3)])
def test_no_division_among_two_kinds_of_requests_is_sooner_done(good: int, bad: int) -> None:
    """Done: on the average over the requests, each of as many tokens."""
    its, each = policy(0.6, row=0.1, step=0.0), 4
    alive = {odds: its.acceptance.survival(odds) for odds in (good, bad)}
    speeds = []
    for k_good, k_bad in itertools.product(LEVELS, LEVELS):
        tokens = 1 + sum(alive[good][:k_good]), 1 + sum(alive[bad][:k_bad])
        rows = each * (2 + k_good + k_bad)
        speeds.append(
            2 * each * statistics.harmonic_mean(tokens) / its.costs.step(2 * each, rows, max(k_good, k_bad))
        )
    choice = its.chooser.best({RequestClass(odds): each for odds in (good, bad)})
    assert choice.speed == pytest.approx(max(speeds), rel=0.01)


def test_requests_that_cannot_draft_count_as_rows() -> None:
    its = policy(0.6, row=0.2, step=0.01)
    alone, beside = (its.chooser.best({its.acceptance.unknown: 1}, num_others=n) for n in (0, 20))
    assert alone.num_drafts and alone.seconds < beside.seconds


def run(policy: AutoPolicy, rate: float, num_tokens: int, slower: float = 1.0, seed: int = 0) -> float:
    """Seconds per token of a simulated request, beyond its beginning, whose drafts are accepted at this rate. Steps
    that draft take `slower` times as long as the policy's costs say."""
    rng, one = random.Random(seed), request(4)
    one.tokens += [0] * NUM_OPENING
    truth, seconds, tokens, verifying, num_plain = costs(), 0.0, 0, 0, 0
    while tokens < num_tokens:
        (k,) = policy.choose([one], 0)
        accepted = 0
        while accepted < verifying and rng.random() < rate:
            accepted += 1
        if verifying:
            policy.verified(one, verifying, accepted)
        took = truth.step(1, 1 + verifying, k) * (slower if k else 1.0)
        num_plain += not verifying and not k
        if verifying or k or num_plain % PLAIN_EVERY == 0:
            policy.finished(StepOutcome(1, 1 + verifying, k, 1 + accepted, 100, took, 0.0))
        if k:
            policy.proposed(one, k, k)
        seconds, tokens, verifying = seconds + took, tokens + 1 + accepted, k
    return seconds / tokens


def plain_seconds() -> float:
    return costs().plain(1)


@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_is_never_right_costs_no_more_than_the_allowance(seed: int) -> None:
    for num_tokens, most in ((100, 0.03), (1000, 0.0125)):
        lost = run(policy(), 0.0, num_tokens, seed=seed) / plain_seconds() - 1
        assert lost < most


def test_costs_that_were_measured_wrong_are_found_out() -> None:
    """Drafting does not pay, although the profile says that it does."""
    seconds = [run(policy(0.6), 0.45, 2000, slower=2.0, seed=seed) for seed in range(12)]
    assert statistics.mean(seconds) < 1.02 * plain_seconds()
    assert max(seconds) < 1.05 * plain_seconds()


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
def test_it_comes_close_to_the_best_number(rate: float) -> None:
    seconds = [plain_seconds()]
    for k in LEVELS[1:]:
        its = policy(rate, levels=(0, k))
        its.savings = 1e9
        seconds.append(run(its, rate, 4000))
    assert run(policy(0.6), rate, 4000) < 1.04 * min(seconds)


def test_a_text_that_becomes_predictable_again_is_noticed() -> None:
    its = policy()
    run(its, 0.0, 1000)
    assert run(its, 0.9, 3000) < 0.75 * plain_seconds()


def test_a_few_drafts_that_do_not_pay_are_not_preferred_to_more_that_do() -> None:
    """Eight requests: one draft gains 2 %, which is too little, and three gain 5 %."""
    its = policy(0.5, row=0.0, levels=(0, 1, 3), buckets=(1, 8))
    its.costs.draft.set(8, 1, 1.5 / 1.02 - 1.0)
    its.costs.draft.set(8, 3, 1.875 / 1.05 - 1.0)
    assert chosen(its, {0: 8}) == {0: 3}


@pytest.mark.parametrize("buckets", [(), (1, 2)])
def test_savings_limit_what_a_step_may_lose(buckets: tuple[int, ...]) -> None:
    poor, rich = (policy(0.95, buckets=buckets) for _ in range(2))
    poor.savings, rich.savings = 0.0, 10.0
    assert poor.choose([request(4)], 0) == [0] and not poor.will_draft(request(4), 0)
    assert rich.choose([request(4)], 0) == [8] and rich.will_draft(request(4), 0)


def test_a_prompt_that_takes_the_drafter_longer_than_drafts_save_is_not_shown() -> None:
    its = policy(0.9)
    assert its.will_draft(request(20, limit=40), 0)
    its.prompted(10, 0.1)
    assert its.will_draft(request(20, limit=40), 0) and not its.will_draft(request(2000, limit=2020), 0)
    for _ in range(30):
        its.prompted(10, 100.0)
    assert not its.will_draft(request(20, limit=40), 0)


def test_a_prompt_that_was_disturbed_does_not_end_drafting() -> None:
    """Its time counts twofold at most, and what is not shown for its price is shown again one day."""
    its = policy(0.9)
    its.prompted(10, 0.1)
    its.prompted(10, 100.0)
    assert its.costs.prompt_row_seconds == pytest.approx(0.0125)
    its.costs.prompt_row_seconds = 1.0
    refused = [its.will_draft(request(20, limit=40), 0) for _ in range(2000)]
    assert not any(refused[:200]) and refused[-1]


def test_drafts_made_beside_a_prompt_are_not_its_price() -> None:
    its = policy(0.9, step=0.1)
    its.prompted(10, 0.3 + 0.1, 2, 3)
    assert its.costs.prompt_row_seconds == pytest.approx(0.01)
    its.prompted(10, 0.1, 2, 3)
    assert its.costs.prompt_row_seconds == pytest.approx(0.01), "it took no longer than the drafts"


def test_what_is_left_of_a_prompt_is_its_price() -> None:
    its, one = policy(0.9), request(2000, limit=2020)
    its.prompted(10, 0.1)
    assert not its.will_draft(one, 0)
    one.num_computed = 1990
    assert its.will_draft(one, 0)


@pytest.mark.usefixtures("no_trials")
def test_what_a_prompt_takes_is_paid_from_the_savings() -> None:
    """At the start only a prompt is shown whose drafts are expected to save `SURELY_WORTH` times that. `times`: of what
    it takes, in the savings."""
    its, one = policy(0.9, row=0.005, step=0.01), request(20, limit=40)
    assert its.will_draft(one, 0)
    choice, plain = its._ready.choice, its.costs.plain(1)
    saved = 20 * (plain - choice.seconds / choice.tokens)
    for gain, times, expected in (
        (SURELY_WORTH + 0.1, 0.0, True),
        (SURELY_WORTH - 0.1, 0.0, False),
        (SURELY_WORTH - 0.1, 0.9, False),
        (SURELY_WORTH - 0.1, 1.2, True),
        (WORTH_SHOWING - 0.1, 5.0, False),
    ):
        price = saved / gain
        its.costs.prompt_row_seconds, its.savings = price / 20, ALLOWANCE + times * price / plain
        assert its.will_draft(one, 0) == expected
    its.savings = ALLOWANCE + 3.0
    its.prompted(20, 2.0 * plain)
    assert its.savings == pytest.approx(ALLOWANCE + 1.0)
    its.prompted(20, 2.0 * plain)
    assert its.savings == ALLOWANCE, "the first drafts of the next request may still cost something"


def test_a_prompt_need_not_save_so_much_once_acceptance_is_known() -> None:
    its, one = policy(0.9, row=0.005, step=0.01), request(20, limit=40)
    assert its.will_draft(one, 0)
    choice, plain = its._ready.choice, its.costs.plain(1)
    its.costs.prompt_row_seconds = (plain - choice.seconds / choice.tokens) / 2.0
    assert not its.will_draft(one, 0), "20 tokens save twice what 20 rows take"
    other, draws = request(4), random.Random(0)
    for _ in range(200):
        accepted = next((n for n in range(8) if draws.random() > 0.9), 8)
        its.acceptance.count_given(other.records[0], 8, 8)
        its.acceptance.count(other.records[0], 8, accepted)
    its._ready = None
    assert its.will_draft(one, 0)


def test_what_a_prompt_must_save_is_told_by_steps_with_the_same_context() -> None:
    """A choice that was made before anything was known of contexts is compared with a plain step of then."""
    its = policy(0.01, row=0.5, step=1.0)
    its.costs.context = Curve({0: 0.0, 1000: 10.0})
    its._ready = ReadyChoice(1, DraftChoice({its.acceptance.unknown: 1}, 1.5, 1.6, 1.5, worst=0.5), 0)
    its._length, its.costs.prompt_row_seconds = 400.0, 0.1
    assert not its.will_draft(request(40, limit=60), 0), "20 tokens save 0.05 each, and 40 rows take 4"


def test_cached_tokens_that_are_computed_again_count() -> None:
    its = policy(0.9)
    assert its.will_draft(request(400, limit=440), 0, num_lost=0)
    assert not its.will_draft(request(400, limit=440), 0, num_lost=4000)


def test_short_proposals_are_not_taken_for_long_ones() -> None:
    """Eight drafts are asked for; two are proposed, and always accepted."""
    its, one = policy(0.6), request(4)
    for _ in range(300):
        its.proposed(one, 8, 2)
        its.verified(one, 2, 2)
    assert its.acceptance.longer[1] > 0.9 and its.acceptance.longer[2] < 0.05
    choice = its.chooser.best({its.acceptance.unknown: 1})
    assert 2.7 < choice.tokens < 3.1
    assert choice.seconds < its.costs.step(1, 4, max(choice.num_drafts.values()))


def test_drafts_go_first_to_requests_with_fewer_tokens() -> None:
    """A good request's second draft is likelier to survive than the other's first, and yet comes later: the good one
    would only end earlier."""
    parts = policy(0.9).chooser._parts([RequestClass(2), RequestClass(-2)], 2)
    second, other = (next(p for p in parts if (p.its_class.odds, p.level) == at) for at in ((2, 2), (-2, 1)))
    assert second.num_tokens > other.num_tokens and parts.index(second) > parts.index(other)


def long_when_right(its: AutoPolicy, num_rounds: int = 400, every: int = 2) -> None:
    """A drafter that proposes one draft, always wrong, or all eight, always right: in one of so many rounds."""
    one = request(4)
    for number in range(num_rounds):
        is_right = number % every == every - 1
        its.proposed(one, 8, 8 if is_right else 1)
        its.verified(one, 8 if is_right else 1, 8 if is_right else 0)


def test_long_proposals_that_are_right_are_asked_for_beside_short_ones_that_are_not() -> None:
    """Four tokens of eight drafts in every other round. A single draft would be right half as often as not, which here
    costs more than it brings."""
    its = policy(0.6, row=0.4, base=0.6, step=0.0)
    long_when_right(its)
    choice = its.chooser.best({its.acceptance.unknown: 1})
    assert set(choice.num_drafts.values()) == {8} and choice.tokens == pytest.approx(5.0, rel=0.1)


def test_a_part_that_is_worth_more_than_the_one_before_it_is_joined_to_it() -> None:
    """The first draft takes a row in each round and is right in one of five; the others take rows only then."""
    its = policy(0.6)
    long_when_right(its, every=5)
    parts = its.chooser._parts([its.acceptance.unknown], 1)
    assert [part.level for part in parts] == [5, 8]
    assert sum(part.num_rows for part in parts) == pytest.approx(sum(its.acceptance.longer))
    num_tokens = sum(its.acceptance.survival())
    assert sum(part.num_tokens for part in parts) == pytest.approx(num_tokens)
    counted_on = its.acceptance.survival()[0] + (1 - DOUBTED) * sum(its.acceptance.survival()[1:])
    assert sum(part.worth for part in parts) == pytest.approx(1 - 1 / (1 + counted_on))


def test_the_share_of_rounds_with_drafts_is_each_requests_own() -> None:
    its, often, seldom = policy(0.9, step=0.0), request(4), request(4, 1)
    for number in range(100):
        its.proposed(often, 4, 4)
        its.proposed(seldom, 4, 4 if number % 10 == 0 else 0)
    shares = [its.acceptance.class_of(r.records[0]).share for r in (often, seldom)]
    assert shares[0] > 0.8 and 0.1 < shares[1] < 0.3
    for _ in range(2000):
        seldom.records[0].fade()
        its.acceptance.fade()
    assert its.acceptance.class_of(seldom.records[0]).share == 1.0, "what was long ago says nothing"


def test_a_lookup_that_finds_next_to_nothing_does_not_pay() -> None:
    """A long draft in 1 of 100 rounds brings 8 % of a token; asking takes 10 % of a step."""
    its, hardly, now_and_then = policy(0.9, row=0.0, step=0.01), request(4), request(4, 1)
    for number in range(2000):
        its.proposed(hardly, 8, 8 if number % 100 == 0 else 0)
    found = its.acceptance.class_of(hardly.records[0])
    assert 1 / 128 <= found.share < 1 / 30
    assert not its.chooser.best({found: 1}).num_drafts
    for number in range(200):
        its.proposed(now_and_then, 8, 8 if number % 4 == 0 else 0)
    assert its.chooser.best({its.acceptance.class_of(now_and_then.records[0]): 1}).num_drafts


def test_without_savings_nothing_is_drafted_and_no_choice_is_made_for_some_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even drafts that counts vouch for: they would be chosen anew in each step, and choosing takes time."""
    its, one = policy(0.9, row=0.0, step=0.01), request(4)
    for _ in range(100):
        its.compared(one, Comparison(8, 8, 0, 8, False))
    its.savings = 0.0
    chosen = list[Kept]()
    choice_for = AutoPolicy._choice_for

    def counted(self: AutoPolicy, *given: Any) -> Kept:
        chosen.append(choice_for(self, *given))
        return chosen[-1]

    monkeypatch.setattr(AutoPolicy, "_choice_for", counted)
    for _ in range(TOLD_KEPT):
        assert its.choose([one], 0) == [0]
        its.finished(StepOutcome(1, 1, 0, 1, 0, its.costs.plain(1)))
    assert len(chosen) == 1
    assert its.choose([one], 0) == [8], "steps without drafts have brought savings"


@pytest.mark.parametrize("buckets", [(), (1,)])
def test_rounds_without_drafts_bring_no_tokens(buckets: tuple[int, ...]) -> None:
    its = policy(0.95, row=0.001, step=0.001, buckets=buckets)
    assert RequestClass(0, 4).share == pytest.approx(0.5)
    seldom, always = (its.chooser.best({RequestClass(0, rarity): 1}) for rarity in (4, 0))
    assert seldom.num_drafts and seldom.tokens - 1 == pytest.approx((always.tokens - 1) / 2)


def test_a_drafter_that_the_profile_cannot_run_is_measured_in_service() -> None:
    its = StepCosts(LEVELS, (), Curve({1: 1.0, 64: 2.0}))
    assert its.draft.at(2, 8) == pytest.approx(2 * GUESSED_DRAFT)
    for _ in range(50):
        its.observe(StepOutcome(1, 9, 8, 5, 100, 2.0, draft_seconds=0.5, num_asked=1))
        its.observe(StepOutcome(1, 1, 0, 1, 100, 1.0, draft_seconds=0.1))  # asked for none
        its.observe(StepOutcome(64, 64, 8, 64, 100, 2.0, draft_seconds=6.4, num_asked=64))
    assert its.draft.at(1, 8) == pytest.approx(0.5) and its.draft.at(60, 8) == pytest.approx(6.0)
    assert its.draft.at(5, 8) == pytest.approx(2.5), "as with the most similar number of requests"
    assert its.draft.at(1, 0) == 0.0
    profiled = costs(step=0.05)
    profiled.observe(StepOutcome(1, 9, 8, 5, 100, 2.0, draft_seconds=0.9, num_asked=1))
    assert profiled.draft.at(1, 8) == pytest.approx(0.4)


def test_a_drafter_that_always_has_one_draft_is_no_fault() -> None:
    """The chance of 12 drafts becomes too small for a float."""
    its, one = policy(0.9, row=0.0, step=0.001, levels=(0, 1, 2, 3, 5, 8, 12, 16)), request(4)
    its = AutoPolicy(its.costs, Acceptance(16, expected=0.9))
    for _ in range(3000):
        its.proposed(one, 16, 1)
        its.verified(one, 1, 1)
    assert its.choose([one], 0)[0] > 0


def test_shadow_steps_correct_the_costs_between_plain_ones() -> None:
    """Nothing else would, while nothing is drafted. Few are asked, but most of the time is what all rows take."""
    its = AutoPolicy(StepCosts(LEVELS, (), Curve({1: 1.0, 64: 2.0})), Acceptance(8))
    its.savings = MOST_SAVED
    for _ in range(20):
        its.finished(StepOutcome(64, 64, 0, 64, 100, 2.0))
        its.finished(StepOutcome(64, 64, 8, 64, 100, 2.0, 0.0, True, 4e-5, 8))
    its._settle()
    assert its.costs.draft.at(64, 8) == pytest.approx(4e-5)


def test_a_choice_holds_for_few_rounds_and_for_its_requests_only() -> None:
    """A choice with drafts is renewed by the number of steps, since steps with prompts are not reported."""
    its = policy(0.9, row=0.005, step=0.01)
    one, other = request(4), request(4, 1)
    assert its.choose([one], 0) == [8]
    for _ in range(30):
        its.acceptance.count(one.records[0], 8, 0)
    *kept, new = (its.choose([one], 0)[0] for _ in range(ROUNDS_KEPT))
    assert kept == [8] * (ROUNDS_KEPT - 1) and new < 8
    for _ in range(30):
        its.acceptance.count(one.records[0], 8, 8)
    assert its.choose([one, other], 0)[0] > new


def test_a_choice_of_no_drafts_holds_until_enough_steps_were_told_of() -> None:
    its, one = policy(0.02), request(4)
    assert its.choose([one], 0) == [0]
    its.acceptance = Acceptance(8, expected=0.95)
    its.chooser = Chooser(its.costs, its.acceptance)
    for _ in range(TOLD_KEPT - 1):
        its.finished(plain_step(1.0))
        assert its.choose([one], 0) == [0]
    its.finished(plain_step(1.0))
    assert its.choose([one], 0)[0] > 0


def test_costs_are_not_corrected_by_steps_that_are_not_typical() -> None:
    its = policy(0.5)
    for is_typical in (False, True):
        before = its.costs.step(1, 1, 0), its.costs.step(1, 9, 8)
        for _ in range(20):
            its.finished(plain_step(2 * before[0])._replace(is_typical=is_typical))
            its.choose([request(4)], 0)
        after = its.costs.step(1, 1, 0), its.costs.step(1, 9, 8)
        assert (after == before) != is_typical


def test_a_choice_with_drafts_ends_when_the_savings_do() -> None:
    its, one = policy(0.95), request(4)
    its.savings = 3.0
    assert its.choose([one], 0) == [8]
    its.savings = 0.5
    its.finished(StepOutcome(1, 9, 8, 1, 0, 1.6, 0.0))
    assert its.choose([one], 0) == [0]


def test_a_choice_is_kept_for_longer_where_choosing_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to a limit, which is lower for other requests."""
    now = itertools.count(0, 1000)
    monkeypatch.setattr("draftproof.engine.auto_policy.time.perf_counter", lambda: next(now))
    its, one, other = policy(0.9, row=0.005, step=0.01), request(4), request(4, 1)
    its.savings = MOST_SAVED
    lengths = []
    for _ in range(6):
        its.choose([one], 0)
        kept, length = its._kept, 1
        while not kept.is_over:
            its.choose([one], 0)
            length += 1
        assert its._kept is kept
        lengths.append(length)
    assert lengths == [ROUNDS_KEPT, *[ROUNDS_KEPT * MOST_KEPT] * 5]
    its.choose([other], 0)
    assert its._kept.longer == FIRST_KEPT


def test_a_first_choice_without_drafts_is_kept_as_long_as_later_ones() -> None:
    its = policy(0.1, row=0.5)
    its._choosing_seconds = 1000.0
    assert its.choose([request(4)], 0) == [0]
    assert its._kept.is_first and its._kept.longer == MOST_KEPT


def test_a_choice_that_takes_no_time_is_not_kept_for_longer() -> None:
    its, one = policy(0.9, row=0.005, step=0.01), request(4)  # a step takes a second
    for _ in range(5 * ROUNDS_KEPT):
        its.choose([one], 0)
        assert its._kept.longer == 1


@pytest.mark.parametrize("savings", [ALLOWANCE, MOST_SAVED])
def test_reports_wait_for_the_next_choice_if_the_savings_last_until_then(savings: float) -> None:
    its, one = policy(0.9, row=0.005, step=0.01, buckets=(1, 2)), request(4)
    its.savings = savings
    its.choose([one], 0)
    before = its.acceptance.accepted.estimates[0]
    its.verified(one, 8, 0)
    its.finished(StepOutcome(1, 9, 8, 1, 0, 1.1, 0.0))
    waits = its.acceptance.accepted.estimates[0] == before and its.savings == savings
    assert waits == (savings == MOST_SAVED)
    for _ in range(ROUNDS_KEPT):
        its.choose([one], 0)
    assert its.acceptance.accepted.estimates[0] < before and its.savings < savings


@pytest.mark.parametrize("num_unlucky", [1, 7])
def test_savings_are_told_by_all_steps_since_the_last_report(num_unlucky: int) -> None:
    """The last step brings one token, here as one of one unlucky step in eight, there of seven."""
    its, one = policy(0.9, row=0.05, step=0.1), request(4)
    its.savings = MOST_SAVED - 10.0
    for number in range(ROUNDS_KEPT):
        its.choose([one], 0)
        its.verified(one, 8, 0 if number >= ROUNDS_KEPT - num_unlucky else 8)
    each_tokens = 1.0 + 8.0 * (ROUNDS_KEPT - num_unlucky) / ROUNDS_KEPT
    its.finished(StepOutcome(1, 9, 8, 1, 100, 2.25, each_tokens=each_tokens))
    its._settle()
    assert (its.savings > MOST_SAVED - 10.0) == (num_unlucky == 1)


@pytest.mark.parametrize("ask", ["will_draft", "predict"])
def test_questions_are_answered_by_all_reports(ask: str) -> None:
    its, one = policy(0.9, row=0.05, step=0.1), request(4)
    its.savings = MOST_SAVED
    its.choose([one], 0)
    for _ in range(MOST_NEW + 1):
        its.verified(one, 8, 0)
    assert its.predict(1).num_drafts == 0 if ask == "predict" else not its.will_draft(one, 0)


def ready_for_one() -> AutoPolicy:
    """A policy that has chosen twice for one request, so the choice for the next one is made; a report waits."""
    its, one = policy(0.9, row=0.005, step=0.01, buckets=(1, 2)), request(4)
    its.savings = MOST_SAVED
    assert its.will_draft(one, 0)
    for _ in range(ROUNDS_KEPT):
        its.choose([one], 0)
        its.proposed(one, 8, 8)
        its.verified(one, 8, 8)
    its.choose([one], 0)
    its.verified(one, 8, 8)
    assert its._reports and not its._kept.is_first
    return its


def test_the_choice_for_a_new_request_is_made_before_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows of the first request, and takes in no reports."""
    its, other = ready_for_one(), request(4, 1)
    assert its._ready.num_taken == ROUNDS_KEPT
    with monkeypatch.context() as patched:
        patched.setattr(Chooser, "best", None)
        assert its.will_draft(other, 0) and its.choose([other], 0) == [8]
        assert its._reports and its._kept.asked == [other] and its._kept.is_first
    assert its._kept.may_wait and not its._steps, "savings are those after all steps"


@pytest.mark.parametrize(
    "lasts, longer, may_wait", [(0.5, MOST_KEPT, False), (2.5, 2, True), (99, MOST_KEPT, True)]
)
def test_reports_wait_for_as_long_as_the_savings_last(lasts: float, longer: int, may_wait: bool) -> None:
    """`lasts`: for how many times `ROUNDS_KEPT` steps the savings last if no draft is accepted."""
    its, one = policy(0.9, row=0.2, step=0.1), request(4)
    unknown, its._choosing_seconds = its.acceptance.unknown, 1e3
    choice = its.chooser.best({unknown: 1})
    its.savings = ALLOWANCE + lasts * ROUNDS_KEPT * choice.worst
    kept = its._kept_for([one], 0, [unknown], choice, is_first=False)
    assert choice.worst > 0.1 and (kept.longer, kept.may_wait) == (longer, may_wait)


def kept_longer(rate: float = 0.8) -> tuple[AutoPolicy, Progress]:
    """A policy to which choosing is dear, and its request, to whose choice nothing was reported."""
    its, one = policy(rate, row=0.02, step=0.1), request(4)
    its.savings, its._choosing_seconds, its.stops = MOST_SAVED, 1e3, True
    its.choose([one], 0)
    assert its._kept.longer > 1 and its._kept.may_wait
    return its, one


def used_up(its: AutoPolicy, one: Progress, num_accepted: float) -> Kept:
    """The choice that was kept, until it is over; `num_accepted`: drafts of each round on average."""
    kept, total = its._kept, 0.0
    for number in range(1, ROUNDS_KEPT * kept.longer):
        its.choose([one], 0)
        most = kept.num_drafts[0]
        found = min(most, round(num_accepted * number - total))
        total += found
        its.verified(one, most, found)
    assert its._kept is kept and kept.is_over
    return kept


def test_late_drafts_of_a_lucky_phase_are_not_expected_of_all() -> None:
    """What is accepted of a request with higher odds than its class counts for less."""
    lucky, usual = Acceptance(8), Acceptance(8)
    for its, odds in ((lucky, 4), (usual, 0)):
        for _ in range(40):
            its.count(AcceptanceRecord(last_asked=3, last_given=3, ratio=ODDS_STEP**odds), 3, 3)
    found = [its.accepted.estimates for its in (lucky, usual)]
    assert found[0][0] == found[1][0] and found[0][1] < found[1][1] and found[0][2] < found[1][2]


def test_a_choice_that_goes_on_is_looked_at_again_once_in_a_while_where_costs_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its, _ = kept_longer()
    kept = its._kept
    for is_known in (False, True):
        num_renewed = 0
        kept.num_steps = kept.num_renewed = 0
        monkeypatch.setattr(StepCosts, "num_observed", lambda costs, number, n=WELL_KNOWN * is_known: n)
        for _ in range(4):
            kept.num_steps += RENEWED_EVERY // 2
            its.price()
            assert its._goes_on(kept)
            num_renewed += kept.stop_price is None
        assert num_renewed == (2 if is_known else 4)


@pytest.mark.parametrize("num_requests", [16, 24, 40, 64])
def test_a_row_has_a_price_whatever_steps_are_padded_to(num_requests: int) -> None:
    """Where others have drafts in every step, for few drafts as for many."""
    its = policy(0.9, row=0.02, step=0.0)
    for most in LEVELS[1:]:
        choice = DraftChoice({RequestClass(0): most}, 2.0 * num_requests, 2.0, 2.0 * num_requests)
        price = row_prices(its.costs, choice, num_requests, 10.0, 1.0, is_cut=False).at(num_requests)
        each = its.costs.step(num_requests, num_requests, most) / 0.02
        assert 0.5 * each < price.rows < 4.0 * each


def test_a_choice_is_kept_for_as_long_again() -> None:
    its, one = kept_longer()
    expected = its._kept.choice.tokens - 1
    kept = used_up(its, one, expected)
    num_steps = kept.num_steps
    its.choose([one], 0)
    assert its._kept is kept
    used_up(its, one, expected)
    assert kept.num_steps == 2 * num_steps


@pytest.mark.parametrize(("lost", "goes_on"), [(0.0, True), (0.5, True), (1.5, False)])
def test_a_lookup_s_choice_goes_on_while_its_drafts_have_not_lost(lost: float, goes_on: bool) -> None:
    """Its number of drafts does not follow the last rounds. `lost`: as much as so many steps of which none is right."""
    its, one = policy(0.8, row=0.02, step=0.1), request(4)
    its.is_lookup, its.savings, its._choosing_seconds = True, MOST_SAVED, 1e3
    its.choose([one], 0)
    kept = its._kept
    while not kept.is_over:
        its.choose([one], 0)
    assert its._kept is kept and kept.longer > 1
    its.savings = kept.saved - lost * kept.choice.worst
    its.choose([one], 0)
    assert (its._kept is kept) == goes_on


@pytest.mark.parametrize("changed", ["savings", "waiting", "old", "cheap", "none"])
def test_no_choice_is_kept_for_as_long_again(changed: str) -> None:
    """If the savings would not last after the steps that wait, it is old, or choosing takes no time; nor if the drafter
    neither stops by itself nor is a lookup."""
    its, one = kept_longer()
    kept = used_up(its, one, its._kept.choice.tokens - 1)
    assert its._goes_on(kept)
    if changed == "savings":
        its.savings = ALLOWANCE + ROUNDS_KEPT * kept.choice.worst * (kept.longer - 0.5)
    elif changed == "waiting":
        its.savings = ALLOWANCE + ROUNDS_KEPT * kept.choice.worst * (kept.longer + 0.5)
        its._steps.append((StepOutcome(1, 9, 8, 1, 100, 1.0), ROUNDS_KEPT))
    elif changed == "old":
        kept.num_steps = MOST_STEPS_KEPT
    elif changed == "cheap":
        kept.is_dear = False
    else:
        its.stops = False
    assert not its._goes_on(kept)


def test_a_choice_without_drafts_is_passed_on_for_as_long_as_at_first() -> None:
    """And what is known of the next request fades by its own steps alone."""
    its, requests = policy(0.02), [request(4, number) for number in range(3)]
    its.savings, its.is_lookup, its._num_taken = 10.0, True, 1000
    its.choose(requests[:1], 0)
    kept = its._kept
    for _ in range(2):
        its.finished(plain_step(1.0))
        its.choose(requests[:1], 0)
    its.choose(requests[1:2], 0)
    assert its._kept is kept and kept.num_told == 0 and not any(kept.num_drafts)
    its.choose(requests[1:2], 0)
    requests[1].records[0].hits = 1.0
    its._settle()
    its._let_go()
    assert requests[1].records[0].hits == pytest.approx(OWN_FADING**2)


@pytest.mark.parametrize("is_lookup, savings", [(True, MOST_SAVED), (False, MOST_SAVED), (True, ALLOWANCE)])
def test_a_choice_for_a_lookup_is_kept_for_long_from_the_first(is_lookup: bool, savings: float) -> None:
    """If it can be afforded."""
    its, four = policy(0.9, row=0.005, step=0.005), [request(4, number) for number in range(4)]
    its.savings, its.is_lookup, its._choosing_seconds = savings, is_lookup, 1e3
    kept = its._choice_for(four, 0, None)
    assert (kept.longer > FIRST_KEPT) == (is_lookup and savings > ALLOWANCE)


@pytest.mark.parametrize("changed", ["", "over", "savings", "number", "age", "ended"])
def test_the_choice_for_new_requests_is_passed_on_to_the_next(changed: str) -> None:
    """While it holds, and for as long as for the first; also once some of the first have ended."""
    its, requests = policy(0.9, row=0.005, step=0.005), [request(4, number) for number in range(6)]
    its.savings, its.is_lookup, its._num_taken = MOST_SAVED, True, MOST_NEW
    its.choose(requests[:2], 0)
    kept, asked = its._kept, requests[2:4]
    its.price()
    its.verified(requests[0], 8, 8)
    if changed == "over":
        kept.is_over = True
    elif changed == "savings":
        its.savings = ALLOWANCE + 0.5 * ROUNDS_KEPT * kept.choice.worst
        assert its._made_ready(2) is kept.choice
    elif changed == "number":
        asked = requests[2:5]
    elif changed == "age":
        its._num_taken += MOST_NEW
    elif changed == "ended":
        its.choose(requests[:1], 0)
    assert its._kept is kept
    found = its.choose(asked, 0)
    assert (its._kept is kept) == (changed in ("", "ended"))
    if its._kept is kept:
        assert found == kept.num_drafts == [*kept.choice.num_drafts.values()] * 2 and kept.asked == asked
        assert kept.prices is None, "costs and lengths are others now"
        for number in range(1, ROUNDS_KEPT * kept.longer):
            assert not kept.is_over, number
            its.choose(asked, 0)
        assert kept.is_over


def test_that_a_drafter_has_all_that_it_is_asked_for_is_not_counted() -> None:
    """Until once it has less."""
    its, one = policy(0.9), request(4)
    its.choose([one], 0)
    its.proposed(one, 8, 8)
    assert not its._reports and not one.records[0].asked
    assert one.records[0].last_asked == one.records[0].last_given == 8
    for _ in range(1000):
        its.proposed(one, 8, 8)
    its.proposed(one, 8, 3)
    its.proposed(one, 8, 8)
    assert len(its._reports) == 2
    its._settle()
    assert one.records[0].asked > 1.9 and 0.99 < its.acceptance.longer[3] < 1.0, "once in two hundred"


@pytest.mark.parametrize("is_known", [False, True])
def test_costs_are_corrected_by_fewer_steps_where_choices_are_kept_longer(is_known: bool) -> None:
    """Once many have corrected them."""
    observed = {}
    for longer in (1, 4):
        its, one = policy(0.9, row=0.05, step=0.1), request(4)
        its.savings = MOST_SAVED
        its.choose([one], 0)
        for _ in range(WELL_KNOWN if is_known else WELL_KNOWN - 9):
            its.costs.observe(StepOutcome(1, 9, 8, 9, 100, 1.0))
        for _ in range(2 * WELL_KNOWN):
            its.costs.observe(plain_step(1.0))  # say nothing of those with drafts
        its._kept.longer, seen = longer, list[StepOutcome]()
        its.ledger.costs = Observing(its.costs, seen)  # type: ignore[assignment]
        step = StepOutcome(1, 9, 8, 9, 100, 1.0)
        its.ledger.take([(step, OBSERVED_EVERY)] * 8, its._kept, is_lookup=False)
        observed[longer] = len(seen)
    assert observed == {1: 8, 4: 2 if is_known else 8}


def test_the_price_of_a_prompt_is_in_plain_steps() -> None:
    its, one = policy(0.9, row=0.05, step=0.1), request(4)
    its.savings = 20.0
    its.will_draft(one, 0)
    its.prompted(4, 3 * its.costs.plain(1))
    assert its.savings == pytest.approx(17.0)


def test_that_a_new_request_gets_no_drafts_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until anything is reported."""
    its, one = policy(0.01, row=0.5, step=1.0), request(4)
    assert not its.will_draft(one, 0)
    with monkeypatch.context() as patched:
        patched.setattr(Chooser, "best", None)
        assert not its.will_draft(one, 0)
    its.finished(StepOutcome(1, 1, 0, 1, 4, 1.0))
    made = its._ready
    assert not its.will_draft(one, 0) and its._ready is not made


@pytest.mark.parametrize("num_taken", [20, 10 * MOST_NEW])
def test_of_lookups_the_choice_for_a_new_request_is_that_for_the_one_before(num_taken: int) -> None:
    """Until there are `MOST_NEW` reports, or as many as it was made by."""
    its, requests = policy(0.9, row=0.05, step=0.1), [request(4, number) for number in range(3)]
    its.savings, its.is_lookup, its._num_taken = MOST_SAVED, True, num_taken
    first = its.choose(requests[:1], 0)
    choice = its._kept.choice
    for _ in range(min(MOST_NEW, num_taken) - 1):
        its.verified(requests[0], 8, 0)
    assert its.choose(requests[1:2], 0) == first and its._kept.choice is choice
    its.verified(requests[1], 8, 0)
    its.verified(requests[1], 8, 0)
    its.choose(requests[2:], 0)
    assert its._kept.choice is not choice


@pytest.mark.parametrize("changed", ["others", "savings", "age", "rarity"])
def test_a_choice_made_ready_holds_only_for_what_it_was_made_for(changed: str) -> None:
    its, num_others = ready_for_one(), 0
    if changed == "others":
        num_others = 1
    elif changed == "savings":
        its.savings = 0.01
    elif changed == "age":
        its._num_taken += MOST_TAKEN + 1
    else:
        for _ in range(40):
            its.acceptance.count_given(AcceptanceRecord(), 8, 0)
    made = its._ready
    its.will_draft(request(4, 1), num_others)
    assert its._ready is not made and its._ready.num_requests == 1 + num_others and not its._reports


def test_few_reports_wait_while_nothing_is_chosen() -> None:
    its, one = policy(0.9, row=0.005, step=0.01, buckets=(1, 2)), request(4)
    its.savings = MOST_SAVED
    its.choose([one], 0)
    for _ in range(5 * MOST_WAITING):
        its.verified(one, 1, 1)
        its.finished(plain_step(1.0, context=7))
        assert not its.choose([], 1)
        assert len(its._reports) < MOST_WAITING and len(its._steps) < MOST_STEPS
    assert its._length == 7


@pytest.mark.parametrize("buckets", [(), (1,)])
def test_a_step_with_many_drafts_may_risk_less(buckets: tuple[int, ...]) -> None:
    its, one = policy(0.95, row=0.0, step=0.2, buckets=buckets), request(4)
    its.savings = 0.4 / STAKE  # a step may take 0.4 longer with one draft, 0.17 with more
    assert its.choose([one], 0) == [1]
    its.savings = 10.0
    assert policy(0.95, row=0.0, step=0.2, buckets=buckets).choose([one], 0)[0] > 1


def test_a_step_in_which_nobody_has_drafts_is_as_short_as_a_plain_one() -> None:
    """One request with drafts in a quarter of its rounds: its steps have one row or all, never the mean's rows."""
    its = policy(0.9, row=0.3, step=0.0, levels=(0, 5))
    choice = its.chooser.best({RequestClass(0, 8): 1})
    without, drafted = its.costs.step(1, 1, 5), its.costs.step(1, 6, 5)
    assert choice.num_drafts and choice.seconds == pytest.approx(0.75 * without + 0.25 * drafted)
    its = policy(0.9, row=0.01, step=0.0, levels=(0, 5))
    many = its.chooser.best({RequestClass(0, 8): 64})
    assert many.num_drafts and many.seconds == pytest.approx(its.costs.step(64, 64 + 80, 5), rel=0.02)


def test_what_the_first_steps_with_drafts_took_is_not_believed_for_ever() -> None:
    """They were disturbed, so that no others follow. Nine rows are guessed to take 2.2 times as long as one."""
    its = costs()
    for _ in range(3):
        its.observe(StepOutcome(1, 9, 8, 1, 0, 2.0, host_seconds=0.5))
    found = []
    for _ in range(200):
        its.observe(plain_step(its.target.at(1) + 0.1)._replace(host_seconds=0.1))
        found.append(its.host.seconds)
    assert min(found[:TRUSTED_HOST]) == max(found[:TRUSTED_HOST]) > 0.4 and 0.21 < found[-1] < 0.23


def test_what_is_learnt_of_asking_in_vain_is_not_taken_for_verifying() -> None:
    """A drafter on the host that has no drafts costs hardly anything; verifying takes twice what the profile says."""
    its = costs()
    for _ in range(100):
        its.observe(plain_step(its.target.at(1)))
        its.observe(StepOutcome(1, 1, 5, 1, 0, its.target.at(1), 0.0))
        its.observe(StepOutcome(1, 6, 5, 3, 0, 2 * (its.target.at(6) + 0.25), 0.0))
    assert its.step(1, 1, 5) == pytest.approx(its.plain(1), rel=0.05)
    assert its.step(1, 6, 5) == pytest.approx(2 * (its.target.at(6) + 0.25), rel=0.05)
    ragged = its.ragged(1, 0)
    assert ragged(1, 5) == pytest.approx(its.step(1, 1, 5)) and ragged(6, 5) == pytest.approx(
        its.step(1, 6, 5)
    )


def test_the_host_takes_longer_for_steps_that_bring_more_tokens() -> None:
    """Plain steps are then not believed to take it as long as those with long drafts."""
    host, rng = HostCosts(), random.Random(0)
    for _ in range(200):
        num_rows = rng.randrange(30, 69)
        host.observe(num_rows, 0.2 + 0.01 * num_rows + rng.gauss(0.0, 0.03))
    assert host.seconds == pytest.approx(0.2 + 0.01 * 50, rel=0.1)
    assert host.at(4) == pytest.approx(0.24, abs=0.1) and host.at(68) == pytest.approx(0.88, rel=0.1)
    for _ in range(200):
        host.observe(4, 0.25)
    assert host.at(4) == pytest.approx(0.25, rel=0.02)
    assert host.at(1) >= LEAST_HOST * 0.25 and HostCosts(0.5).at(7) == 0.5
    host.observe(4, 100.0)
    assert host.at(4) < 0.3, "a disturbance counts as twice what is expected"


@pytest.mark.parametrize("is_first", [True, False])
def test_one_slow_step_with_drafts_says_little_of_what_a_row_takes(is_first: bool) -> None:
    """An engine's first step with drafts took the host four times as long as later ones."""
    host = HostCosts()
    if is_first:
        host.observe(2, 0.5)
    for _ in range(12):
        host.observe(1, 0.12)
    if not is_first:
        host.observe(2, 0.5)
    assert host.at(1) == pytest.approx(0.12, rel=0.15) and host.at(3) < 2 * host.at(1)


def test_a_single_number_of_drafts_does_not_stand_for_all() -> None:
    """For 64 requests time was left for one draft only: three take as much longer as with fewer requests."""
    found = DraftCosts()
    for num_requests in (16, 32):
        for k in (1, 3):
            found.set(num_requests, k, 0.1 * k * num_requests)
    found.set(64, 1, 6.4)
    assert found.at(64, 1) == 6.4 and found.at(64, 3) == pytest.approx(19.2)


def test_a_step_is_priced_by_the_numbers_of_rows_that_it_has_and_not_by_their_mean() -> None:
    """A drafter that has all 16 drafts in half of the rounds and else none, where the 64th row is the first to cost."""
    drafts, half = DraftRows(), RequestClass(0, 4)
    assert half.share == pytest.approx(0.5)
    drafts.add(Part(1.0, 8.0, 128.0, 1.0, 16, half), 4)
    deviation = math.sqrt(4 * 64)
    assert (drafts.mean, drafts.variance, drafts.most) == (32.0, pytest.approx(4 * 64), 64)
    assert drafts.usual(nobody=0.0) == (round(32 - deviation), round(32 + deviation))
    alone = DraftRows()
    alone.add(Part(1.0, 8.0, 128.0, 1.0, 16, half), 1)
    assert alone.usual(nobody=0.5) == (16, 16)
    certain = DraftRows()
    for level in (1, 3):
        parts = {1: Part(1.0, 1.0, 1.0, 0.5, 1, half), 3: Part(1.0, 2.0, 8.0, 0.5, 3, half)}
        certain.add(parts[level], 5)
        assert certain.usual(nobody=0.0) == (5 * level, 5 * level) and certain.most == 5 * level
    mostly = DraftRows()  # all 16 drafts in three of four rounds and else one: 12.25, and 6.5 to either side
    mostly.add(Part(1.0, 12.25, 192.25, 1.0, 16, half), 1)
    assert mostly.usual(nobody=0.0) == (8, 16)
    seldom = DraftRows()  # and in one of four
    seldom.add(Part(1.0, 4.75, 64.75, 1.0, 16, half), 1)
    assert seldom.usual(nobody=0.0) == (1, 8)
    its = policy(0.9, row=0.0, step=0.001, levels=(0, 16))
    its.acceptance = Acceptance(16, expected=0.9)
    its.costs.target = Curve({1: 1.0, 40: 1.0, 41: 9.0, 68: 9.0})
    for _ in range(400):
        for there in (0, 16):
            its.acceptance.count_given(AcceptanceRecord(), 16, there)
    its.__post_init__()
    counts = {its.acceptance.unknown: 4}
    choice = its.chooser.best(counts)
    step = its.costs.step(4, 4 + 32, 16)
    assert not choice.num_drafts and step < 1.1, "32 draft rows are cheap, but often there are 48"


def test_a_choice_is_for_as_many_others() -> None:
    its, one = policy(0.6, row=0.2, step=0.01), request(4)
    assert its.choose([one], 0)[0] > 0 == its.choose([one], 300)[0]


def test_a_choice_is_kept_for_those_that_are_left() -> None:
    its, asked = policy(0.9, row=0.1, step=0.01), [request(4, n) for n in range(4)]
    first = its.choose(asked, 0)
    made = its._kept
    assert made is not None and 0 < min(first) < its.levels[-1]
    assert its.choose(asked[1:], 0) == first[1:] and its._kept is made
    assert its.choose(asked[2:], 0) == first[2:] and its._kept is made, "half of them is enough"
    its.choose(asked[3:], 0)
    assert its._kept is not made and not its._kept.is_first, "it is known already"
    its.choose([asked[3], request(4, 9)], 0)
    assert its._kept.is_first


def test_a_choice_of_a_lookup_s_most_drafts_is_kept_to_the_last_request() -> None:
    """Alone it would get no fewer."""
    for is_lookup in (True, False):
        its, asked = policy(0.9, row=0.001, step=0.01), [request(4, n) for n in range(4)]
        its.is_lookup, most = is_lookup, its.levels[-1]
        assert its.choose(asked, 0) == [most] * 4
        made = its._kept
        assert its.choose(asked[3:], 0) == [most]
        assert (its._kept is made) == is_lookup, "a model's drafts may take one request longer"


def test_reports_of_steps_that_cannot_have_lost_wait_when_a_choice_goes_on() -> None:
    def going_on(num_tokens: int) -> AutoPolicy:
        its, one = policy(0.9, row=0.02, step=0.01), request(4)
        its.is_lookup, its.savings = True, MOST_SAVED
        (k,) = its.choose([one], 0)
        assert k and its._kept is not None
        its._kept.is_dear = its._kept.is_over = True
        its.finished(StepOutcome(1, 1 + k, k, num_tokens, 0, its.costs.step(1, 1 + k, k), 0.0))
        its.choose([one], 0)
        return its

    assert len(going_on(3)._steps) == 1, "three tokens came in less than two plain steps"
    assert not going_on(1)._steps, "one did not"


def test_the_price_is_that_of_the_requests_that_are_left() -> None:
    its, asked = policy(0.9, row=0.001, step=0.01), [request(4, n) for n in range(8)]
    its.choose(asked, 0)
    whole = its.price()
    made = its._kept
    its.choose(asked[4:], 0)
    assert its._kept is made
    half = its.price()
    its._let_go()
    its.choose(asked[4:], 0)
    anew = its.price()
    assert half.others == pytest.approx(anew.others, rel=0.02) and half.rows == pytest.approx(
        anew.rows, rel=0.1
    )
    assert half.others == pytest.approx(whole.others * 3 / 7)


def until_probed(its: AutoPolicy, one: Progress) -> None:
    """Decode with drafts until a probe begins."""
    its.probes, its.savings = True, MOST_SAVED
    while not its.is_probing:
        (k,) = its.choose([one], 0)
        its.finished(StepOutcome(1, 1 + k, k, 1 + k, 0, its.costs.step(1, 1 + k, k), 0.0))


def test_a_drafter_sees_all_steps_of_a_probe_that_is_not_told_of_any() -> None:
    """New sizes are recorded first. What has missed a row could draft no more for its request."""
    its, one = policy(0.9, row=0.01, step=0.01), request(4)
    until_probed(its, one)
    num_plain = 1
    while not any(its.choose([one], 0)):
        assert its.is_probing
        num_plain += 1
    assert num_plain == 2 * PROBED_STEPS and not its.is_probing
    its._probes._num_drafted = {1: 10**6}
    while not its.is_probing:
        its.choose([one], 0)
    for left in range(2 * PROBED_STEPS - 1, -3, -1):
        assert its.num_repeats() == max(0, left), "those that are used again end it as well"
        its.repeated(1)


def test_a_probe_ends_also_if_nobody_is_asked_any_more() -> None:
    """Its requests have ended in it, and only others decode, which cannot draft."""
    its, one = policy(0.9, row=0.01, step=0.01), request(4)
    until_probed(its, one)
    its.savings = 0.0
    for _ in range(100):
        its.finished(plain_step(1.0))
    assert not its.is_probing and its.plain_every == RESTING_EVERY and len(its._probes.steps) <= PROBED_STEPS
    assert its.savings > 90 * INCOME


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_first_probe_comes_early_where_it_tells_for_sure(is_seen: bool) -> None:
    """Steps with drafts bring ten tokens, so that others lose much, and are seldom probed: once for 54 tokens, a fifth
    of a per cent of what 2,700 steps bring. A lookup's 0.3 %, of 1,800, those after the first sooner: four times,
    twice, a third. `is_seen`: see `Probes`; the drafter then takes 0.05 of a step, too."""
    choice = DraftChoice({RequestClass(0): 12}, tokens=10.0, seconds=1.0, balanced=10.0)
    its = Probes(costs(), is_seen=is_seen)
    found = []
    for number in range(6900):
        its.count(1, 1, has_drafts=True)
        if its.is_due(choice, 1):
            its.start(1)
            found.append(number + 1)
    usual = PROBED_STEPS * (10 - 1) / LOOKUPS_SHARE / 10
    of_lookup = [FEWEST_APART + times * usual for times in (0, 0.25, 0.75, 1.5, 2.5, 3.5)]
    assert found == ([2715, 5430] if is_seen else pytest.approx(of_lookup, abs=2))


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_model_s_first_probes_come_sooner_where_its_drafts_gain_little(is_seen: bool) -> None:
    """Drafts are believed to gain a tenth, which an error of the costs may make a loss: the first probe comes after a
    quarter of the steps, the second after half of them, the third after three quarters. A lookup's first comes at once,
    the next as often as may be."""
    choice = DraftChoice({RequestClass(0): 1}, tokens=1.1, seconds=1.0, balanced=1.1)
    its = Probes(costs(), is_seen=is_seen)
    found, apart = [0], list[int]()
    for number in range(1, 2000):
        its.count(1, 1, has_drafts=True)
        if its.is_due(choice, 1):
            its.start(1)
            apart.append(number - found[-1])
            found.append(number)
    if is_seen:
        usual = apart[-1]
        assert apart[:4] == pytest.approx([usual / 4, usual / 2, usual * 3 / 4, usual], abs=1)
    else:
        usual = math.ceil(PROBED_STEPS * (1.1 - 1.0) / LOOKUPS_SHARE / 1.1)
        sooner = [max(FEWEST_APART, math.ceil(usual * times)) for times in (0.25, 0.5, 0.75)]
        assert apart[0] == FEWEST_APART and apart[1:6] == [*sooner, usual, usual]


def test_a_probe_s_first_step_counts_as_what_it_is() -> None:
    """It verifies the drafts that there are, and is none of those that tell what plain steps take."""
    its, one, told = policy(0.9, row=0.01, step=0.01), request(4), list[int]()
    its.is_lookup, its.probes, its.savings = True, True, 10.0
    verifying = 0
    while len(told) < PROBED_STEPS + 1:
        (k,) = its.choose([one], 0)
        before = its.savings = 10.0
        its.finished(StepOutcome(1, 1 + verifying, k, 1 + verifying, 0, 1.0, 0.0))
        if not k:
            told.append(verifying)
            assert (its.savings > before) == (verifying > 0)
        verifying = k
    assert its.choose([one], 0)[0] > 0 and told == [told[0]] + [0] * PROBED_STEPS and told[0] > 0


@pytest.mark.parametrize(
    ("num_requests", "is_lookup", "plain", "num_settling"),
    [
        (1, True, 1e-3, NUM_SETTLING),
        (4, True, 1e-3, MOST_SETTLING),
        (4, True, 4e-3, 3),
        (4, True, 1.0, 1),
        (4, False, 1e-3, NUM_SETTLING),
    ],
)
def test_a_probe_s_steps_count_from_when_they_have_settled(
    num_requests: int, is_lookup: bool, plain: float, num_settling: int
) -> None:
    """After the many rows of several requests of a lookup that takes ten milliseconds. `plain`: seconds of a step."""
    made = policy(0.9, row=0.01 * plain, step=0.01 * plain, base=plain)
    its = AutoPolicy(made.costs, made.acceptance, is_lookup=is_lookup, probes=True)
    its.savings, asked = MOST_SAVED, [request(4, number) for number in range(num_requests)]
    its._probes._num_drafted = {num_requests.bit_length(): 10**6}
    num_told, counted = 0, list[int]()
    while not num_told or its.is_probing:
        ks = its.choose(asked, 0)
        rows, most = num_requests + sum(ks), max(ks)
        num_told += its.is_probing
        its.finished(StepOutcome(num_requests, rows, most, rows, 0, its.costs.step(num_requests, rows, most)))
        counted.append(len(its._probes.steps))
    assert num_told == num_settling + NUM_COUNTED
    assert counted[-num_told:] == [0] * num_settling + [1, 2, 3]


def test_a_choice_for_captured_steps_is_made_again_once_a_request_has_ended() -> None:
    its, asked = policy(0.9, row=0.001, step=0.01, buckets=(1, 2, 4)), [request(4, n) for n in range(4)]
    its.choose(asked, 0)
    made = its._kept
    its.choose(asked[1:], 0)
    assert its._kept is not made


def test_a_choice_is_not_kept_for_others() -> None:
    its, asked = policy(0.9, row=0.001, step=0.01), [request(4, n) for n in range(4)]
    its.choose(asked, 0)
    made = its._kept
    its.choose([*asked[:2], request(4, 9)], 0)
    assert its._kept is not made and made is not None and len(made.asked) == 4


@pytest.mark.parametrize(("rate", "least", "most"), [(0.3, 15, 17), (0.9, 6, 8)])
def test_a_lookup_that_always_drafts_measures_plain_steps_now_and_then(
    rate: float, least: int, most: int
) -> None:
    """The more often, the less they lose: 0.3 %, at first more. Each of them is reported, and none counts as
    a step whose drafts were left out."""
    its, one = policy(rate, row=0.002, step=0.001), request(4)
    its.is_lookup, its.probes, its.savings = True, True, MOST_SAVED
    its.__post_init__()
    num_plain, known = 0, its.acceptance.accepted.estimates
    for _ in range(8000):
        (k,) = its.choose([one], 0)
        num_plain += not k
        assert its.plain_every == (1 if not k else PLAIN_EVERY) and its.is_probing == (not k)
        its.finished(StepOutcome(1, 1 + k, k, 1 + k, 0, its.costs.step(1, 1 + k, k), 0.0))
    assert least <= num_plain // PROBED_STEPS <= most and num_plain % PROBED_STEPS == 0
    assert its.acceptance.accepted.estimates == known
    never = policy(rate, row=0.002, step=0.001)
    never.savings = MOST_SAVED
    assert all(never.choose([one], 0)[0] for _ in range(4000))


def test_what_plain_steps_take_is_found_out_while_lookups_draft() -> None:
    """The profile says that they take twice as long as they do, so that drafts seem to pay."""
    its, one, num_drafted = policy(0.15, row=0.01, step=0.001, base=2.0), request(4), []
    its.is_lookup, its.probes, its.savings = True, True, MOST_SAVED
    its.__post_init__()
    for _ in range(4000):
        (k,) = its.choose([one], 0)
        drafted = its.costs.target.at(1 + k) + its.costs.draft.at(1, k)
        its.finished(StepOutcome(1, 1 + k, k, 1 + (k > 0), 0, drafted if k else 1.0, 0.0))
        num_drafted.append(k > 0)
    assert num_drafted[0] and sum(num_drafted[-2000:]) < 200


@pytest.mark.parametrize(("tokens", "num_left"), [(4.0, ROUNDS_KEPT), (12.0, 3), (40.0, FEWEST_HURRIED)])
def test_a_probe_comes_early_in_texts_that_take_few_steps(tokens: float, num_left: int) -> None:
    """Four requests, and so many tokens a step: a probe in which one ends tells nothing."""
    its, asked = policy(0.9, row=0.001, step=0.01), [request(4, n) for n in range(4)]
    its._choosing_seconds = 1e3
    its.choose(asked, 0)
    kept = its._kept
    assert kept is not None and kept.num_left > ROUNDS_KEPT
    kept.choice = kept.choice._replace(tokens=tokens)
    kept.hurry()
    assert kept.num_left == num_left


@pytest.mark.parametrize(("seconds", "num_apart"), [(1.0, FEWEST_APART), (1.9, FEWEST_APART), (8.0, 16)])
def test_a_first_probe_comes_after_fewer_long_steps(seconds: float, num_apart: int) -> None:
    its = Probes(costs(), is_seen=False)
    choice = DraftChoice(
        {RequestClass(0): 8}, tokens=seconds, seconds=seconds, balanced=1.0, worst=seconds - 1.0
    )
    assert choice.plain_seconds == 1.0
    assert not its.is_due(choice, 1, num_apart - 1) and its.is_due(choice, 1, num_apart)


@pytest.mark.parametrize("gain", [0.97, 1.0, 1.1, 3.0])
def test_probes_lose_little_and_are_not_made_all_the_time(gain: float) -> None:
    """Drafts that have paid go on for a while where they do not."""
    its = Probes(costs(), is_seen=False)
    choice, num_steps = DraftChoice({RequestClass(0): 1}, gain, 1.0, gain), 0
    for _ in range(math.ceil(SOONER)):
        its.start(1)
    while not its.is_due(choice, 1):
        its.count(1, 1, has_drafts=True)
        num_steps += 1
    assert num_steps == max(FEWEST_APART, math.ceil(PROBED_STEPS * (1.0 - 1.0 / gain) / LOOKUPS_SHARE))
    its.count(1, 1, has_drafts=False)
    assert not its.is_due(choice, 1), "a step without drafts has told already"


def test_requests_that_end_after_a_few_steps_are_probed_too() -> None:
    """Choosing takes so long that a first choice would outlast a request of ten steps."""
    its, num_plain = policy(0.9, row=0.01, step=0.001), 0
    its.is_lookup, its.probes, its.savings = True, True, MOST_SAVED
    for number in range(2 * FEWEST_APART // 10):
        one = request(4, number)
        if number == FEWEST_APART // 10:
            its._probes._num_drafted = {1: 10**6}
        for _ in range(10):
            its._choosing_seconds = 1e3
            (k,) = its.choose([one], 0)
            its.finished(StepOutcome(1, 1 + k, k, 1 + k, 0, 1.0))
            num_plain += not k
    assert 0 < num_plain <= PROBED_STEPS


@pytest.mark.parametrize("plain", [1.0, 0.2])
def test_a_choice_that_a_probe_has_interrupted_goes_on_if_its_drafts_pay(plain: float) -> None:
    """Passed on to a new request, it is interrupted soon. `plain`: how long plain steps turn out to be."""
    its, requests = policy(0.8, row=0.02, step=0.1), [request(4, number) for number in range(3)]
    its.is_lookup, its.probes, its.savings, its._num_taken = True, True, MOST_SAVED, MOST_NEW
    for number in range(2):
        its._choosing_seconds = 1e3
        its.choose(requests[number : number + 1], 0)
    kept, one = its._kept, requests[2]
    assert kept.num_left > 2 * ROUNDS_KEPT and not its._probes.is_due(kept.choice, 1, kept.num_unprobed)
    its._probes._num_drafted = {1: 10**6}
    its.choose([one], 0)
    assert its._kept is kept and kept.num_left == FEWEST_HURRIED - 1 and not its.is_probing
    for _ in range(FEWEST_HURRIED):
        its.choose([one], 0)
    assert its.is_probing and its._probes._num_drafted == {1: 0}
    its.finished(StepOutcome(1, 9, 0, 9, 0, 1.5))  # verifies the drafts that there are
    for _ in range(2 * PROBED_STEPS):
        if its.is_probing:
            for _ in range(20):  # as often as many probes, while steps with drafts take as long as before
                its.costs.observe(StepOutcome(1, 1, 0, 1, 0, plain))
                its.costs.observe(StepOutcome(1, 9, 8, 9, 0, 1.0 + 8 * 0.02 + 0.1))
            assert its.choose([one], 0) == [0]
            its.finished(StepOutcome(1, 1, 0, 1, 0, plain))
    found = its.choose([one], 0)
    assert (its._kept is kept) == (plain == 1.0) and (found == kept.num_drafts or plain < 1.0)
    if plain == 1.0:
        assert kept.num_unprobed == 1 and its._probing(kept) is kept


def test_a_probe_makes_no_drafts_whatever_its_first_step_verifies() -> None:
    its, one, verifying, num_probed = policy(0.8, row=0.01, step=0.01), request(4), 0, 0
    its.probes, its.savings = True, MOST_SAVED
    for number in range(FEWEST_APART + 30):
        if number == FEWEST_APART:
            its._probes._num_drafted = {1: 10**6}
        (k,) = its.choose([one], 0)
        if its.is_probing:
            num_probed += 1
            assert not k
        if verifying:
            its.verified(one, verifying, min(verifying, 3))
        seconds = its.costs.step(1, 1 + verifying, k)
        its.finished(StepOutcome(1, 1 + verifying, k, 1 + min(verifying, 3), 0, seconds))
        verifying = k
    assert num_probed == PROBED_STEPS + 1


@pytest.mark.parametrize(("plain", "is_believed"), [(1.0, True), (2.0, False), (2.5, False)])
def test_what_a_step_takes_that_a_head_sees_is_only_a_bound(plain: float, is_believed: bool) -> None:
    """It counts if it is clearly less than the profile says, which is 2.01."""
    its, one = policy(0.9, row=0.01, step=0.001, base=2.0), request(4)
    its.probes, its.savings, noise, num_plain = True, MOST_SAVED, random.Random(0), 0
    for number in range(FEWEST_APART + 40):
        if number == FEWEST_APART:
            its._probes._num_drafted = {1: 10**6}
        (k,) = its.choose([one], 0)
        seconds = its.costs.target.at(1 + k) if k else plain
        num_plain += not k
        seconds *= math.exp(noise.gauss(0.0, 0.01))
        its.finished(StepOutcome(1, 1 + k, k, 1 + k, 0, seconds, 0.0))
    assert num_plain == PROBED_STEPS and (its.costs.plain(1) < 1.5) == is_believed
    assert is_believed or its.costs.plain(1) == pytest.approx(2.01, rel=0.05)


def test_who_gets_no_drafts_is_known_less_with_each_step() -> None:
    its, one, other = policy(0.02), request(4), request(4, 1)
    drafted = policy(0.95)
    for r in (one, other):
        r.records[0].hits = r.records[0].asked = 1.0
    for _ in range(5):
        its.choose([one], 0)
        drafted.choose([other], 0)
    its.choose([], 0)
    assert its.choose([one], 1) == [0] and drafted.choose([other], 1)[0] > 0
    assert one.records[0].hits == one.records[0].asked == pytest.approx(OWN_FADING**5)
    assert other.records[0].hits == 1.0


def test_a_disturbed_step_costs_no_savings() -> None:
    """Savings change by the costs of such a step and of a plain one, not by the measured time."""
    its = policy()
    for _ in range(5):
        its.finished(StepOutcome(1, 4, 3, 3, 0, its.costs.step(1, 4, 3), 0.0))
    before = its.savings
    its.finished(StepOutcome(1, 4, 3, 3, 0, 50 * its.costs.step(1, 4, 3), 0.0))
    its._settle()
    assert its.savings > before


def test_savings_are_bounded_and_grow_in_steps_without_drafts() -> None:
    its = policy()
    its.finished(plain_step(1.0))
    its._settle()
    assert its.savings == pytest.approx(ALLOWANCE + RESTED * INCOME)
    for _ in range(100):
        its.finished(StepOutcome(1, 9, 8, 9, 0, 1.6, 0.0))
    its._settle()
    assert its.savings == MOST_SAVED
    for _ in range(1000):
        its.finished(StepOutcome(1, 9, 8, 1, 0, 1.6, 0.0))
    its._settle()
    assert its.savings == 0.0


def test_of_plain_steps_that_are_reported_together_the_median_corrects_the_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One in three; of one number of requests, and of those whose time is typical."""
    its, seen = policy(), list[tuple[int, float]]()
    monkeypatch.setattr(StepCosts, "observe", lambda _, step: seen.append((step.num_requests, step.seconds)))
    for number, seconds in [(1, 5.0), (1, 1.0), (1, 2.0), (1, 4.0), (2, 3.0)]:
        its.finished(StepOutcome(number, number, 0, number, 0, seconds))
    its.finished(StepOutcome(2, 2, 0, 2, 0, 9.0, is_typical=False))
    before = its.savings
    its._settle()
    assert seen == [(1, 2.0), (1, 4.0), (2, 3.0)]
    seen.clear()
    for seconds in (3.0, 1.0, 2.0):
        its.finished(StepOutcome(1, 1, 0, 1, 0, seconds))
    its._settle()
    assert seen == [(1, 3.0), (1, 1.0), (1, 2.0)], "where there are few all count"
    assert its.savings == pytest.approx(before + 9 * RESTED * INCOME), (
        "all of them count as steps without drafts"
    )


@pytest.mark.usefixtures("no_trials")
def test_that_nothing_pays_is_believed_for_a_while() -> None:
    """A choice without drafts for new requests is made again after some reports, not for each request."""
    its, one = policy(0.05), request(4)
    its.savings, its._num_taken = 10.0, 1000
    assert not its.will_draft(one, 0)
    ready = its._ready
    for _ in range(MOST_TAKEN_PLAIN - len(its._steps)):
        its.finished(plain_step(1.0))
        assert not its.will_draft(one, 0) and its._ready is ready
    its.finished(plain_step(1.0))
    its.will_draft(one, 0)
    assert its._ready is not ready


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize(
    ("before", "after", "is_made_again"), [(0.5, 2.0, False), (0.5, 2.6, True), (10.0, 20.0, False)]
)
def test_that_drafts_cannot_be_paid_for_is_believed_until_there_are_savings(
    before: float, after: float, is_made_again: bool
) -> None:
    its = policy(0.5, row=0.2, step=0.4)
    its.savings, its._num_taken = before, 1000
    assert not its.will_draft(request(4), 0)
    ready, its.savings = its._ready, after
    its.will_draft(request(4), 0)
    assert (its._ready is not ready) == is_made_again


def test_while_no_request_can_draft_few_steps_are_reported_and_each_stands_for_more() -> None:
    its, one = policy(0.02), request(4)
    its.choose([one], 0)
    assert its.plain_every == PLAIN_EVERY
    its.finished(plain_step(1.0))
    its._settle()
    before = its.savings
    assert its.plain_every == RESTING_EVERY, "nobody was asked"
    known = its.acceptance.accepted._weight
    its.finished(plain_step(1.0))
    its._settle()
    assert its.savings == pytest.approx(before + RESTED * INCOME)
    assert its.acceptance.accepted._weight == pytest.approx(known / POOL_FADING**RESTED)


def test_what_drafts_there_were_is_forgotten_while_there_are_none() -> None:
    its = policy(0.6)
    for _ in range(100):
        its.acceptance.count(AcceptanceRecord(), 1, 0)
    known = its.acceptance.accepted.estimates[0]
    for _ in range(1000):
        its.finished(plain_step(1.0))
    assert known < 0.1 and its.acceptance.accepted.estimates[0] == pytest.approx(0.6, abs=0.01)


def test_a_choice_counts_the_keys_that_its_requests_read() -> None:
    its, short, long = policy(0.3, row=0.2, step=0.3), request(4), request(4, 1)
    its.costs.context = Curve({0: 0.0, 1000: 10.0})
    long.tokens += [5] * 996
    assert its.choose([short], 0) == [0]
    assert its.choose([long], 0)[0] > 0, "keys are read once for all rows"
    assert its.choose([long], 1)[0] > 0, "another is expected to be as long"
    assert its.choose([short], 0) == [0], "whatever the last step read"


def test_a_fixed_policy_is_fixed() -> None:
    assert FixedPolicy(3).choose([request(4), request(4, 1)], 0) == [3, 3] and FixedPolicy(3).will_draft(
        request(4), 5
    )


def test_a_curve_goes_through_its_points_and_on_as_it_ended() -> None:
    curve = Curve({1: 0.1, 2: 1.0, 4: 2.0, 8: 2.5})
    assert [curve.at(n) for n in (2, 3, 6, 8)] == pytest.approx([1.0, 1.5, 2.25, 2.5])
    assert curve.at(16) == pytest.approx(2.5 + 8 * (1.5 / 6 + 0.5 / 4) / 2), "by the sizes 2 and 4"
    assert Curve({4: 2.0}).at(100) == 2.0
    assert Curve({2: 2.0, 4: 1.5}).at(8) == 1.5 and Curve({2: 2.0, 4: 1.5}).at(1) == 2.0, "nor down again"


def test_steps_are_charged_for_what_they_are_filled_up_to() -> None:
    ragged, padded = costs(), costs(buckets=(4, 8), levels=(0, 3))
    assert padded.step(3, 3 + 1, 1) == ragged.step(4, 16, 3) > ragged.step(3, 4, 1)


def test_steps_with_drafts_never_seem_to_take_less_than_those_without() -> None:
    """The machine was slow while steps had no drafts, and fast while they had some."""
    its = costs()
    for _ in range(30):
        its.observe(StepOutcome(1, 1, 0, 1, 0, 2 * its.plain(1), 0.0))
    plain, drafting = its.plain(1), 0.7 * its.plain(1)
    for _ in range(30):
        its.observe(StepOutcome(1, 4, 3, 1, 0, drafting, 0.0))
    assert its.plain(1) > 1.05 * drafting
    assert its.step(1, 4, 3) == its.plain(1) == its.ragged(1, 0)(4, 3) < plain


def test_what_asking_a_lookup_takes_is_known_within_its_own_part() -> None:
    """Steps that ask it and verify nothing are plain ones but for that: they tell how fast the machine is."""
    its = costs()
    its.draft.set(1, 3, 0.05 * its.target.at(1))
    asking, plain = its.step(1, 1, 3), its.plain(1)
    for number in range(200):
        its.observe(StepOutcome(1, 1, 3, 1, 0, (1.3 if number % 2 else 1.1) * asking, 0.0))
    assert its.step(1, 1, 3) == pytest.approx(1.2 * asking, rel=0.05)
    assert its.plain(1) == pytest.approx(1.2 * plain, rel=0.05)
    dear = costs()
    dear.draft.set(1, 3, 2.0 * dear.target.at(1))
    plain = dear.plain(1)
    for _ in range(200):
        dear.observe(StepOutcome(1, 1, 0, 1, 0, plain, 0.0))
        dear.observe(StepOutcome(1, 1, 3, 1, 0, 2.0 * plain, 0.0))
    assert dear.step(1, 1, 3) == pytest.approx(2.0 * plain, rel=0.05), "a large part may be far off"


def test_where_steps_are_padded_two_drafts_are_no_other_kind_than_three() -> None:
    of_two, of_three = (costs(buckets=(1, 2, 4), levels=(0, number)) for number in (2, 3))
    for its, number in ((of_two, 2), (of_three, 3)):
        its.observe(StepOutcome(1, 1 + number, number, 1, 0, 2.0 * its.step(1, 1 + number, number), 0.0))
    assert of_two._paces[1].covariances == of_three._paces[1].covariances


def test_the_host_takes_no_longer_for_plain_steps_than_for_others() -> None:
    """The first ones found nothing in the caches, and later all steps have drafts."""
    its = costs()
    for _ in range(20):
        its.observe(StepOutcome(1, 1, 0, 1, 0, 2.0, 1.0))
    for number in range(400):
        rows = 1 + 3 * (number % 2)
        its.observe(StepOutcome(1, rows, 3, 1, 0, its.target.at(rows) + 0.3, 0.2))
    assert its.plain_host.at(1) > 0.9
    assert its._host(1, is_plain=True)(1) == its.host.at(1) < 0.3


@pytest.mark.parametrize("buckets", [(), (1, 2, 4)])
def test_a_size_that_was_measured_wrong_is_told_from_a_slow_machine(buckets: tuple[int, ...]) -> None:
    its = costs(buckets=buckets)
    plain, drafting = its.plain(1), its.step(1, 4, 3)
    for _ in range(30):  # steps with drafts take twice as long as in the profile
        its.observe(StepOutcome(1, 1, 0, 1, 0, plain, 0.0))
        its.observe(StepOutcome(1, 4, 3, 2, 0, 2 * drafting, 0.0))
    for _ in range(300):
        its.observe(StepOutcome(1, 4, 3, 2, 0, 2 * drafting, 0.0))
    assert its.plain(1) == pytest.approx(plain, rel=0.15), "which says little about those without"
    assert its.step(1, 4, 3) == pytest.approx(2 * drafting, rel=0.05)
    for _ in range(300):  # now the machine becomes slower
        its.observe(StepOutcome(1, 4, 3, 2, 0, 6 * drafting, 0.0))
    assert its.step(1, 4, 3) == pytest.approx(6 * drafting, rel=0.1)
    assert its.plain(1) > 1.3 * plain


def test_the_first_steps_say_how_fast_the_machine_is() -> None:
    its = costs()
    drafting = its.step(1, 4, 3)
    for _ in range(20):
        its.observe(StepOutcome(1, 1, 0, 1, 0, 2 * costs().plain(1), 0.0))
    assert its.step(1, 4, 3) == pytest.approx(2 * drafting, rel=0.15)


def test_one_slow_step_says_little() -> None:
    its = costs()
    for _ in range(20):
        its.observe(StepOutcome(1, 1, 0, 1, 0, its.plain(1), 0.0))
    before = its.plain(1)
    its.observe(StepOutcome(1, 1, 0, 1, 0, 1000 * before, 0.0))
    assert its.plain(1) < 1.1 * before


def test_one_slow_host_says_little() -> None:
    its = costs()
    for _ in range(50):
        its.observe(StepOutcome(1, 1, 0, 1, 0, 1.3, 0.1))
    assert its.plain_host.seconds == pytest.approx(0.1)
    its.observe(StepOutcome(1, 1, 0, 1, 0, 100.0, 99.0))
    assert its.plain_host.seconds < 0.12


def test_what_the_host_takes_besides_drafts_is_not_that_of_steps_without() -> None:
    """Until both were seen, each further row is guessed to add 0.15 of what a plain step takes."""
    its, one = costs(row=0.0, step=0.0), StepOutcome(1, 9, 8, 9, 0, 1.5, 0.5)
    for _ in range(20):
        its.observe(one)
    its._paces.clear()
    assert its.plain(1) == pytest.approx(1.0 + 0.5 / 2.2)
    assert its.step(1, 9, 8) == pytest.approx(1.5) == its.ragged(1, 0)(9, 8)
    for _ in range(20):
        its.observe(StepOutcome(1, 1, 0, 1, 0, 1.1, 0.1))
    its._paces.clear()
    assert its.plain(1) == pytest.approx(1.1, rel=0.02) and its.step(1, 9, 8) == pytest.approx(1.5)
    assert its.step(1, 1, 8) == pytest.approx(1.5), "drafts were asked for"
    for _ in range(400):
        its.observe(StepOutcome(1, 1, 0, 1, 0, 1.1, 0.1))
    its._paces.clear()
    assert its.plain(1) == pytest.approx(1.1), "of the guess nothing is left"
    its = costs(row=0.0, step=0.0)
    for _ in range(20):
        its.observe(StepOutcome(2, 2, 0, 2, 0, 1.1, 0.1))
    its._paces.clear()
    assert its.step(2, 2, 0) == pytest.approx(1.1) == its.step(2, 2, 8)
    assert its.step(2, 10, 8) == pytest.approx(1.0 + 0.1 * 1.6) == its.ragged(2, 0)(10, 8)


def test_steps_that_were_never_seen_do_not_seem_to_need_no_host() -> None:
    """A drafter that rests from the start: none of its steps is told, and many plain ones."""
    its = costs()
    for _ in range(10 * TRUSTED_HOST):
        its.observe(plain_step(its.target.at(1) + 0.1)._replace(host_seconds=0.1))
    assert its._host(1, is_plain=False)(9) == pytest.approx(0.22)


def test_the_host_s_part_is_not_guessed_by_rows_that_one_request_cannot_have() -> None:
    """Sixteen requests had nine rows each, then there is one, which has nine at most."""
    its = costs()
    its.observe(StepOutcome(16, 144, 8, 144, 0, 5.0, host_seconds=1.1))
    assert its._host(1, is_plain=True)(1) == pytest.approx(0.5)
    for _ in range(400):
        its.observe(plain_step(its.target.at(1) + 0.1)._replace(host_seconds=0.1))
    assert its.host.seconds == pytest.approx(0.22, rel=0.05)


def test_the_first_step_says_what_the_host_takes_and_the_first_prompt_the_drafter() -> None:
    its = costs()
    its.observe(StepOutcome(1, 1, 0, 1, 0, 1.3, 0.2))
    its.observe_prompt(10, 1.0)
    assert its.plain_host.seconds == 0.2 and its.prompt_row_seconds == 0.1
    its.observe_prompt(10, 2.0)
    assert its.prompt_row_seconds == pytest.approx(0.1 + PROMPT_RATE * 0.1)


def test_a_machine_s_pace_holds_for_sizes_that_were_not_met() -> None:
    its = costs()
    for _ in range(30):
        its.observe(plain_step(2.0 * costs().plain(1)))
    assert its.plain(16) == pytest.approx(2.0 * costs().plain(16), rel=0.05)
    its.observe(StepOutcome(16, 16, 0, 16, 0, 3.0 * costs().plain(16), 0.0))
    assert its.plain(16) > 2.2 * costs().plain(16) > 1.1 * its.plain(1) * costs().plain(16) / costs().plain(1)


@pytest.mark.parametrize("buckets", [(), (4,)])
def test_rows_of_a_request_read_its_keys_together(buckets: tuple[int, ...]) -> None:
    its = costs(buckets=buckets)
    before = {k: its.step(4, 4 * (1 + k), k) for k in (0, 1, 3)}
    its.context, its.context_rows = Curve({0: 0.0, 1000: 1.0, 4000: 5.0}), Curve({0: 0.0, 1000: 0.01})
    for k, seconds in before.items():
        assert its.step(4, 4 * (1 + k), k, 2500) == pytest.approx(seconds + 3.0 + 0.025 * k)
        if k and not buckets:
            assert its.ragged(4, 2500)(4 * (1 + k), k) == its.step(4, 4 * (1 + k), k, 2500)


def test_draft_passes_of_many_requests_are_not_those_of_one() -> None:
    """Three drafts for 16 requests are interpolated."""
    its = DraftCosts()
    for num_requests, num_drafts, seconds in (
        (1, 1, 1.0),
        (1, 3, 2.0),
        (1, 5, 3.0),
        (16, 1, 4.0),
        (16, 5, 12.0),
    ):
        its.set(num_requests, num_drafts, seconds)
    assert its.at(16, 3) == pytest.approx(8.0) and its.at(1, 3) == 2.0 and its.at(16, 0) == 0.0
    assert its.at(8, 5) == pytest.approx(3.0 + 9.0 * 7 / 15)


def test_a_profile_comes_back_from_its_file() -> None:
    its, again = costs(), StepCosts(LEVELS)
    its.context, its.context_rows = Curve({0: 0.0, 100: 1e-4}), Curve({0: 0.0, 100: 1e-5})
    again.read_json(its.as_json())
    assert all(
        again.step(r, r * (1 + k), k, 99) == its.step(r, r * (1 + k), k, 99) for r in (1, 5) for k in LEVELS
    )
    for broken in (
        {},
        [],
        {"target": {}, "draft": {}, "context": {}, "context_rows": {}, "spread": 1.0},
        {**its.as_json(), "target": {"1": -1}},
    ):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            StepCosts(LEVELS).read_json(broken)


@pytest.mark.parametrize(("row", "buckets"), [(0.001, ()), (0.1, ()), (0.1, (1, 2, 4))])
def test_a_row_must_bring_what_its_time_is_worth(row: float, buckets: tuple[int, ...]) -> None:
    """Where steps are padded to buckets, saving a row saves no time."""
    its = policy(0.9, row=row, step=0.0, buckets=buckets)
    assert its.price() == RowPrice(), "nothing was chosen yet"
    (num_drafts,) = its.choose([request(4)], 0)
    rows = its.costs.step(1, 1, num_drafts) / row
    assert num_drafts and its.price()[:2] == pytest.approx((0.0, 0.0 if buckets else rows))
    its.is_cut, its._kept.prices = True, None
    assert its.price().rows == pytest.approx(0.0 if buckets else PATIENCE * rows)


def stopping_policy(rate: float = 0.8, goes_on: float = 0.5, **given: Any) -> AutoPolicy:
    """Its drafter goes on after a draft with this chance."""
    acceptance = Acceptance(8, expected=rate, goes_on=goes_on)
    return AutoPolicy(costs(**{"row": 0.02, "step": 0.1, **given}), acceptance, stops=True)


def test_another_draft_must_bring_what_its_time_is_worth() -> None:
    """In steps like those that were chosen: a draft takes a tenth of a plain step, a row a fiftieth."""
    its = stopping_policy()
    its.savings = MOST_SAVED
    assert its.price() == RowPrice(), "nothing was chosen yet"
    assert its.choose([request(4)], 0) == [8]
    choice = its._kept.choice
    speed = choice.tokens / choice.seconds
    price = its.price()
    assert (price.others, price.rows) == (0.0, 0.0)
    assert price.of_draft == pytest.approx(0.1 * speed) and price.of_row == pytest.approx(0.02 * speed)
    assert its.price() is price
    its._kept.num_renewed = -RENEWED_EVERY
    its._renew_if_due(its._kept)
    assert its._kept.stop_price is None
    assert any(its.choose([request(4), request(4, 1)], 0)) and not (
        its.price().of_draft or its.price().of_row
    )
    alone = stopping_policy(levels=(0, 1))
    assert alone.choose([request(4)], 0) == [1] and alone.price() == RowPrice(), "there is never another one"


def test_drafts_that_are_not_made_take_no_time() -> None:
    """For a single request eight drafts are 1 + 0.5 + 0.25 + ..., and so many rows. For several all are made."""
    its, all_made = stopping_policy(), stopping_policy()
    all_made.chooser = dataclasses.replace(all_made.chooser, stops=False)
    its_class = its.acceptance.unknown
    mean = sum(0.5**j for j in range(8))
    found = its.chooser.best({its_class: 1}, worth=0.0)
    # rows are counted at a standard deviation to either side of the mean
    assert found.num_drafts == {its_class: 8}
    assert found.seconds == pytest.approx(1.0 + 0.1 * mean + 0.02 * mean, abs=0.03)
    fewer = all_made.chooser.best({its_class: 1}, worth=0.0)
    assert max(fewer.num_drafts.values()) < 8
    whole = stopping_policy(goes_on=1.0)
    whole.chooser = dataclasses.replace(whole.chooser, stops=False)
    several = [p.chooser.best({its_class: 4}, worth=0.0) for p in (its, whole)]
    assert several[0] == several[1]


def test_rounds_of_several_requests_say_nothing_of_where_a_single_one_stops() -> None:
    """Nor the other way round."""
    its, asked = stopping_policy(), [request(4, number) for number in range(4)]
    its.savings = MOST_SAVED
    for together in (4, 1, 4):
        before = list(its.acceptance.longer), its.acceptance.followed.estimates
        its._kept = None
        (first, *_) = its.choose(asked[:together], 0)
        for _ in range(50):
            given = first if together > 1 else 2
            its.learn(asked[0], [Round(given, given, first, given, 20)])
        its._settle()
        after = its.acceptance.longer, its.acceptance.followed.estimates
        if together > 1:
            assert after == before, "all are made, whatever they are worth"
        else:
            assert after[0][2] < 0.1 and after[1][1] < 0.2 < 0.8 < after[1][0]
    assert Whole(its.acceptance).longer == [1.0] * 8
    chances = its.acceptance.chances(0)
    assert Whole(its.acceptance).survival(0)[:2] == pytest.approx([chances[0], chances[0] * chances[1]])
    assert its.chooser.tokens(1.0, 0, 4)[2] == pytest.approx(1.0 + chances[0] + chances[0] * chances[1])


def test_a_choice_for_a_much_longer_request_has_another_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one of about the same length it is kept."""
    monkeypatch.setattr(StepCosts, "num_observed", lambda costs, number: WELL_KNOWN)
    for length, is_kept in ((100, True), (1000, False)):
        its, requests = stopping_policy(), [request(4), request(length, 1, limit=2000)]
        its.savings, its._num_taken = MOST_SAVED, MOST_NEW
        its._make_ready(1)
        its.choose(requests[:1], 0)
        kept, price = its._kept, its.price()
        its.choose(requests[1:], 0)
        assert its._kept is kept and (its.price() is price) == is_kept


def test_costs_of_a_mean_number_of_drafts_lie_between_those_beside_it() -> None:
    its = DraftCosts()
    for number, seconds in ((1, 1.0), (2, 4.0), (4, 6.0)):
        its.set(1, number, seconds)
    assert [its.at(1, number) for number in (1.25, 2.5, 3.0, 3.5, 4.0)] == pytest.approx(
        [1.75, 4.5, 5.0, 5.5, 6.0]
    )


@pytest.mark.parametrize("changed", ["", "unknown costs", "two", "poor", "all made"])
def test_few_rounds_of_a_model_s_drafts_tell_enough(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in `LEARNED_EVERY` reports is taken in, while the savings last and costs are well known, of a drafter that
    stops by itself or of several requests."""
    observed = 0 if changed == "unknown costs" else WELL_KNOWN
    monkeypatch.setattr(StepCosts, "num_observed", lambda costs, number: observed)
    its, asked = stopping_policy(), [request(4), request(4, 1)][: 1 + (changed == "two")]
    its.stops = changed != "all made"
    its.savings = ALLOWANCE if changed == "poor" else MOST_SAVED
    its.choose(asked, 0)
    rounds = [Round(3, 2, 8, 4, 20), Round(4, 4, 8, 2, 23)]
    for _ in range(4 * LEARNED_EVERY):
        its.learn(asked[0], rounds)
    counted = [take for take, _ in its._reports if take is not its._note]
    taken = len(counted) / (2 * len(rounds))  # what was verified, and what was proposed
    if changed == "two":
        taken *= 2  # proposals of several requests have all drafts
    assert (asked[0].records[0].last_asked, asked[0].records[0].last_given) == (0, 0), "others wait before it"
    its._settle()
    assert taken == (4 * LEARNED_EVERY if changed not in ("", "two") else 4)
    record = asked[0].records[0]
    assert (record.last_asked, record.last_given) == (8, 2)


@pytest.mark.parametrize("changed", ["", "fewer", "poor", "lookup"])
def test_few_rounds_of_many_requests_tell_enough(changed: str) -> None:
    """One in `LEARNED_EVERY` reports of each request is taken in, while the savings last, and of each step's reports a
    quarter. A report has two rounds."""
    its, asked = policy(0.8), [request(4, number) for number in range(MANY - (changed == "fewer"))]
    its.is_lookup, its.savings = changed == "lookup", ALLOWANCE if changed == "poor" else MOST_SAVED
    assert any(its.choose(asked, 0))
    every = 1 if changed else LEARNED_EVERY
    assert its.acceptance._kept == pytest.approx(POOL_MEMORY ** math.sqrt(every / len(asked)))
    counted = Counter[int]()
    for _ in range(LEARNED_EVERY):
        its._reports.clear()
        for one in asked:
            its.learn(one, [Round(1, 1, 0, 0, 20)] * 2)
        of_step = [id(given[0]) for _, given in its._reports]
        assert len(of_step) == 2 * len(asked) / every
        counted.update(of_step)
    assert counted == {id(one.records[0]): 2 * LEARNED_EVERY / every for one in asked}


@pytest.mark.parametrize("num_requests", [1, 3])
def test_reading_keys_makes_a_pass_longer_and_not_a_draft(num_requests: int) -> None:
    its = policy(0.9, row=0.1, step=0.0)
    its.costs.context = Curve({0: 0.0, 1000: 1.0})
    asked = [request(100, number, limit=900) for number in range(num_requests)]
    assert any(its.choose(asked, 0))
    choice, context = its._kept.choice, 100 * num_requests
    fewest = its.costs.step(num_requests, num_requests, max(choice.num_drafts.values()), context)
    longer = (choice.seconds - fewest) * (num_requests - 1) / num_requests
    assert fewest > 0.1 * num_requests and its.price().rows == pytest.approx((fewest + longer) / 0.1)


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_a_draft_costs_what_few_rows_more_cost_whether_drafts_are_verified_or_compared(rate: float) -> None:
    """Not what all requests' drafts together would cost."""
    its = policy(rate, row=0.01, step=0.0, levels=(0, 1, 2))
    its.costs.target = Curve({4: 1.0, 6: 1.02, 64: 4.0})
    its.choose([request(4, number) for number in range(4)], 0)
    longer = its._kept.choice.seconds - 1.0
    assert bool(its._kept.choice.num_drafts) == (rate > 0.5)
    assert its.price().rows == pytest.approx((1.0 + 0.75 * longer) / 0.01)


@pytest.mark.parametrize(("num_requests", "is_paid"), [(1, True), (4, False)])
def test_others_pay_for_what_the_first_draft_of_a_step_takes(num_requests: int, is_paid: bool) -> None:
    """Where no drafts are made too, else none would be left to be compared."""
    its = policy(0.0, row=0.0, step=0.0)
    most = its.costs.levels[LOOKED_AT - 1]
    its.costs.target = Curve({num_requests: 1.0, num_requests + 1: 1.5, num_requests + 51: 2.0})
    asked = [request(4, number) for number in range(num_requests)]
    assert not any(its.choose(asked, 0))
    row = (0.5 + 0.01 * (most - 1)) / most if is_paid else 0.01
    assert its.price().rows == pytest.approx(1.0 / row)


def test_the_tokens_of_other_requests_wait_for_a_row_too() -> None:
    """Three of four requests are others: their tokens count, and the time without one request's drafts."""
    its = policy(0.9, row=0.1, step=0.0)
    asked = [request(4, number) for number in range(4)]
    assert any(its.choose(asked, 0))
    choice = its._kept.choice
    fewest = its.costs.step(4, 4, max(choice.num_drafts.values()))
    others, rows = its.price()[:2]
    assert others == pytest.approx(0.75 * choice.tokens)
    assert rows == pytest.approx((fewest + 0.75 * (choice.seconds - fewest)) / 0.1)
    assert choice.seconds > fewest and choice.tokens > 4


@pytest.mark.parametrize(
    ("is_cut", "num_new", "is_kept"), [(True, 1, True), (True, 2, True), (True, 3, False), (False, 1, False)]
)
def test_a_request_takes_the_place_of_one_that_has_ended(is_cut: bool, num_new: int, is_kept: bool) -> None:
    """With the most drafts of the choice, where that is but a limit: if most of the others are the same."""
    its = policy(0.9, row=0.1, step=0.0)
    its.is_cut, asked = is_cut, [request(4, number) for number in range(4)]
    assert all(its.choose(asked, 0))
    kept = its._kept
    kept.num_drafts = [1, 2, 3, 1]
    now = [*asked[num_new:], *(request(4, 4 + number) for number in range(num_new))]
    found = its.choose(now, 0)
    assert (its._kept is kept) == is_kept
    if is_kept:
        most = max(kept.choice.num_drafts.values())
        assert found == [*[1, 2, 3, 1][num_new:], *[most] * num_new]
        assert its.choose([*now, request(4, 9)], 0) and its._kept is not kept, "more than it was made for"


def test_too_few_requests_are_not_filled_up() -> None:
    its = policy(0.9, row=0.1, step=0.0)
    its.is_cut, asked = True, [request(4, number) for number in range(4)]
    assert all(its.choose(asked, 0))
    kept = its._kept
    kept.fewest = 3.0
    its.choose([asked[0], request(4, 9)], 0)
    assert its._kept is not kept


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_choice_outlasts_most_of_its_requests_where_the_price_follows_them(is_cut: bool) -> None:
    """Where the drafter does not end proposals, the last request gets a choice of its own."""
    its = policy(0.9, row=0.1, step=0.0)
    its.is_cut, asked = is_cut, [request(4, number) for number in range(4)]
    assert any(its.choose(asked, 0))
    kept = its._kept
    for left in (4, 3, 1):
        its.choose(asked[:left], 0)
        assert (its._kept is kept) == (is_cut or left > 1)
        others, rows = its.price()[:2]
        most = max(kept.choice.num_drafts.values())
        alone, longer = its.costs.step(left, left, most), kept.choice.seconds - its.costs.step(4, 4, most)
        if its._kept is kept:
            assert others == pytest.approx((left - 1) / 4 * kept.choice.tokens)
            patience = PATIENCE if is_cut else 1.0
            assert rows == pytest.approx(patience * (alone + (left - 1) / 4 * longer) / 0.1)


def test_the_last_of_many_requests_make_no_probe() -> None:
    """Steps of one tell little of the steps of four."""
    its = policy(0.9, row=0.1, step=0.0)
    its.is_lookup = its.is_cut = its.probes = True
    asked = [request(4, number) for number in range(4)]
    assert any(its.choose(asked, 0))
    kept = its._kept
    kept.num_steps = 100_000
    for left in (1, 3, 4):
        kept.asked, kept.num_drafts = asked[:left], [8] * left
        assert its._probing(kept).is_probe == (left == 4)


@pytest.mark.parametrize("num_drafts", [0, 8])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_probe_waits_while_a_request_would_end_before_it(num_drafts: int, is_new: bool) -> None:
    """Broken off it would tell nothing. Its first step verifies the drafts that there are; and before the first after
    prompts some steps with drafts come, for nothing if there is no room."""
    its = policy(0.9, row=0.1, step=0.0)
    its.probes = True
    num_tokens = (
        PROBED_STEPS + 1 + num_drafts + is_new * ROUNDS_KEPT
    )  # the last one makes no room for another
    short, long = (request(4, number, limit=limit) for number, limit in enumerate((4 + num_tokens, 400)))
    assert any(its.choose([short, long], 0))
    kept, short.num_drafts = its._kept, num_drafts
    kept.num_steps = 100_000
    left = kept.num_left
    short.tokens.append(1)
    assert its._probing(kept, is_new=is_new) is kept and its._probes.is_due(kept.choice, 2, kept.num_unprobed)
    assert kept.num_left == left, "not hurried either"
    short.tokens.pop()
    assert its._probing(kept, is_new=is_new).is_probe == (not is_new)


@pytest.mark.parametrize("num_left", [3, 4])
def test_a_probe_of_fewer_requests_tells_nothing(num_left: int) -> None:
    """One of four ends in it. Costs are kept by the bit length of the number of requests."""
    its = policy(0.9, row=0.01, step=0.01)
    its.is_lookup, its.probes, its.savings = True, True, MOST_SAVED
    its.__post_init__()
    asked = [request(4, number) for number in range(4)]
    its._probes._num_drafted = {3: 10**6}
    while not its.is_probing:
        ks = its.choose(asked, 0)
        its.finished(StepOutcome(4, 4 + sum(ks), max(ks), 4 + sum(ks), 0, 1.0))
    num_told = 0
    while its.is_probing:
        its.finished(plain_step(1.0)._replace(num_requests=num_left, num_rows=num_left))
        num_told = max(num_told, len(its._probes.steps))
        its.choose(asked[:num_left], 0)
    assert num_told == (NUM_COUNTED if num_left == 4 else 0)


def test_drafts_that_are_only_compared_have_a_price() -> None:
    """Else nobody knew whether those that pay would be accepted."""
    its = policy(0.0, row=0.1, step=0.0)
    its.savings = 0.0
    assert its.choose([request(4)], 0) == [0]
    assert its.price()[:2] == pytest.approx((0.0, its.costs.plain(1) / 0.1))


def test_rows_that_cost_nothing_have_no_price() -> None:
    its = policy(0.9, row=0.0, step=0.0)
    assert any(its.choose([request(4)], 0)) and its.price() == RowPrice()


def test_a_choice_lasts_longer_where_the_drafter_ends_proposals() -> None:
    """A second for 0.1 ms of choosing."""
    lengths = []
    for is_cut in (False, True):
        its = policy(0.9)
        its.is_cut, its._choosing_seconds = is_cut, 0.02 * its.costs.plain(1) * ROUNDS_KEPT
        asked = [request(4)]
        its._kept = Kept(asked, 0, [0], DraftChoice({}, 1.0, 1.0, 1.0), False, 1, False, 1, 1.0, 1.0)
        lengths.append(its._choice_for(asked, 0, its._kept).longer)
    assert 1 <= lengths[0] < lengths[1] <= MOST_KEPT


def looking_up(share: float, num_right: int = 8) -> AutoPolicy:
    """A policy for a lookup that had drafts in so large a share of the steps, of which so many are right."""
    its, other = policy(0.8, row=0.02, step=0.06), request(4)
    its.is_lookup, its.savings = True, MOST_SAVED
    for _ in range(100):
        its.proposed(other, 8, 8, is_model=False)
        its.verified(other, 8, num_right, is_model=False)
        its.looked_up(other, 10, round(10 * share))
    its._settle()
    assert its.acceptance.share == pytest.approx(share, abs=0.05)
    return its


def test_whether_a_lookup_has_drafts_is_known_after_one_text() -> None:
    """Three hundred steps without, of which the policy is told in groups; then it is not asked for any."""
    its, one = looking_up(0.5, num_right=1), request(4, 1)
    assert its.choose([one], 0) != [0]
    for _ in range(300 // OBSERVED_EVERY):
        its.looked_up(one, OBSERVED_EVERY, 0)
    its._settle()
    assert its.acceptance.share < 0.07 and its.acceptance.longer[-1] > 0.9
    its._let_go()
    assert its.choose([request(4, 2)], 0) == [0]


def test_steps_that_are_told_of_together_count_as_if_each_were() -> None:
    """About so: a request's past fades by groups."""
    together, each = Acceptance(8), Acceptance(8)
    one, other = AcceptanceRecord(), AcceptanceRecord()
    for _ in range(40):
        together.count_some(one, 8, 2)
        for number in range(8):
            each.count_some(other, 1, number % 4 == 0)
    assert together.share == pytest.approx(each.share, rel=0.05)
    assert one.given / one.asked == pytest.approx(other.given / other.asked, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_choice_without_drafts_is_made_again_once_there_would_be_some(share: float) -> None:
    """Where drafts that are only compared are right. `share`: of the steps in which there are some."""
    its, one = looking_up(0.0), request(4, 1)
    its._choosing_seconds = 1e3
    assert its.choose([one], 0) == [0]
    kept = its._kept
    assert kept.longer == MOST_KEPT
    for number in range(20):
        its.looked_up(one, 1, number % 2 if share else 0)
        if share and number % 2:
            its.compared(one, Comparison(8, 8, 0, 8, False))
    assert kept.is_over == (share > 0.0)
    its.choose([request(4, 2)], 0)
    assert bool(its._kept.choice.num_drafts) == (share > 0.0), "nor is it passed on"


@pytest.mark.parametrize("given", [0, 1])
def test_one_request_that_finds_repeated_text_ends_a_choice_without_drafts(given: int) -> None:
    """However many steps of others have shown that there is none."""
    its, one = looking_up(0.0), request(4, 1)
    its._choosing_seconds = 1e3
    its.acceptance.some.add(10, 1000)
    assert its.choose([one], 0) == [0]
    kept, before = its._kept, its.acceptance.share
    its.looked_up(one, 2, 2 * given)
    its.compared(one, Comparison(8, 8, 0, 8 * given, not given))
    assert kept.is_over == bool(given) and its.acceptance.share < MORE_OFTEN * before
    assert one.records[0].ratio == 1.0, "by what its rounds count is decided with the next choice"


@pytest.mark.parametrize(
    ("share", "savings", "every"), [(0.0, 2.0, 1), (0.9, 2.0, LOOKUPS_EVERY), (0.9, 30.0, 8)]
)
def test_at_low_savings_a_lookup_s_steps_are_told_of_sooner(
    share: float, savings: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drafts each that has some: they are compared, and tell whether there would be any."""
    monkeypatch.setattr(keeping, "REPORTING_SECONDS", 0.15)  # small models: a sixth of a step
    its = looking_up(share)
    its.savings = savings
    assert any(its.choose([request(4, 1)], 0)) == (share > 0)
    assert its.report_every == every


@pytest.mark.parametrize(
    ("is_known", "is_long", "lasting", "every"),
    [(True, True, 20.0, 4), (True, True, 19.0, 2), (False, True, 20.0, 2), (True, False, 20.0, 1)],
)
def test_steps_of_a_lookup_are_told_of_seldom_once_much_is_known(
    is_known: bool, is_long: bool, lasting: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while the savings last for as long again, and for the 32 steps that nobody has told of then."""
    monkeypatch.setattr(StepCosts, "num_observed", lambda costs, number: WELL_KNOWN * is_known)
    monkeypatch.setattr(Ledger, "affordable", lambda its, worst: lasting)
    monkeypatch.setattr(keeping, "REPORTING_SECONDS", 0.15)  # small models: a sixth of a step
    its = looking_up(0.9)
    its._choosing_seconds = 1e3 * is_long
    its.choose([request(4, 1)], 0)
    assert its._kept is not None and its._kept.is_long == is_long
    assert its.report_every == OBSERVED_EVERY * every


@pytest.mark.parametrize(("steps", "every"), [(1e-3, MOST_OFTEN), (0.03, 8), (0.15, 4 * OBSERVED_EVERY)])
def test_long_steps_of_a_lookup_are_told_of_more_often(
    steps: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text has few of them. `steps`: what a report takes, in plain steps; one with drafts is longer."""
    monkeypatch.setattr(StepCosts, "num_observed", lambda costs, number: WELL_KNOWN)
    monkeypatch.setattr(Ledger, "affordable", lambda its, worst: 20.0)
    monkeypatch.setattr(keeping, "REPORTING_SECONDS", steps)
    its = looking_up(0.9)
    its._choosing_seconds = 1e3
    (k,) = its.choose([request(4, 1)], 0)
    assert its.report_every == every
    monkeypatch.undo()
    before, step = its.costs.num_observed(1), StepOutcome(1, 1 + k, k, 1 + k, 0, 1.2)
    for _ in range(8):
        its.finished(step)
    its._settle()
    assert its.costs.num_observed(1) == before + 8, "each that is told corrects the costs"


def test_a_choice_holds_for_requests_almost_like_those_it_was_made_for() -> None:
    its = looking_up(0.5)
    choice = its._make_ready(1)
    (made,) = choice.num_drafts
    for share, holds in ((0.45, True), (0.2, False)):
        its.acceptance.some.forget(1e-3)
        its.acceptance.some.add(round(10_000 * share), 10_000)
        assert its.acceptance.unknown != made
        assert (its._made_ready(1) is choice) == holds, share
    its.acceptance.some.forget(1e-3)
    its.acceptance.some.add(4500, 10_000)
    assert its.choose([request(4)], 0) == [*choice.num_drafts.values()]


def test_sizes_of_steps_come_again() -> None:
    """Never fewer rows than given, at most an eighth more, and few sizes, for any numbers of requests."""
    most = ROW_SIZES[-1]
    found = {(r, n): rounded_rows(r, n, 20) for r in range(1, 17) for n in range(r, most + 1) if n <= r * 21}
    assert all(n <= rounded <= n * 9 / 8 for (_, n), rounded in found.items())
    drafting = {rounded for (r, n), rounded in found.items() if n > r}
    with_all = {21, 42, 63, 84, 105, 126, 147, 189, 210, 231, 252, 273, 294, 315}
    assert drafting - set(ROW_SIZES) == with_all and max(drafting) == most == 320, (
        "those with all drafts there are"
    )


def test_without_drafts_nothing_is_rounded() -> None:
    assert [rounded_rows(n, n, 5) for n in (17, 19, 33)] == [17, 19, 33]


def test_nobody_verifies_more_than_there_may_be_and_large_steps_stay_as_they_are() -> None:
    assert rounded_rows(1, 17, 16) == 17 < rounded_rows(1, 17, 17)
    assert rounded_rows(1, 17, 5) == 17 and rounded_rows(4, 39, 5) == 39, "lookups of a chain make more"
    assert rounded_rows(4, 61, 20) == 64 and rounded_rows(32, 64, 5) == 64
    assert rounded_rows(16, 320, 20) == 320 and rounded_rows(16, 321, 20) == 321


def test_a_probe_of_lookups_counts_as_one_step() -> None:
    """As its median: the machine may be disturbed for all of it, or in one of its steps."""
    its, other = costs(), costs()
    probes = Probes(its, is_seen=False)
    probes.steps = [plain_step(seconds * its.plain(1)) for seconds in (1.3, 9.0, 1.2)]
    other.observe(plain_step(1.3 * other.plain(1)))
    probes.settle()
    assert its.plain(1) == other.plain(1) and not probes.steps
    probes.steps = [plain_step(9.0)._replace(is_typical=False)]
    probes.settle()
    assert its.plain(1) == other.plain(1)


def test_predictions_are_by_the_share_of_rounds_with_drafts_not_by_its_class() -> None:
    """All drafts are accepted, and steps take as long with them as without. Nine rounds in ten have one: 1.9 tokens."""
    its = policy(1.0, row=0.0, step=0.0, levels=(0, 1))
    record = request(4).records[0]
    for number in range(4000):
        its.acceptance.count_given(record, 1, int(number % 10 > 0))
        if number % 10:
            its.acceptance.count(record, 1, 1)
    assert its.predict(1).speedup == pytest.approx(1.9, rel=0.01)
