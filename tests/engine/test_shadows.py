"""Shadow drafts: compared with the output instead of being verified. No clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, assets
from draftproof.engine.acceptance import Acceptance, AcceptanceRecord
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.costs import DraftCosts, StepCosts, StepOutcome
from draftproof.engine.drafting import COMPARED_EVERY
from draftproof.engine.keeping import OBSERVED_EVERY
from draftproof.engine.kept_choice import PLAIN_EVERY, ROUNDS_KEPT
from draftproof.engine.ledger import ALLOWANCE, MOST_SAVED, STAKE
from draftproof.engine.policy import FixedPolicy
from draftproof.engine.progress import Progress
from draftproof.engine.shadow_turns import (
    LEAST_APART,
    MOST_SHADOWS,
    NUM_SOON,
    SHADOW_SHARE,
    SHADOWS_EVERY,
    ShadowTurns,
)
from draftproof.engine.shadows import Comparison, Shadow
from tests.engine.test_core import FakeRunner, Pending, core, finish, ids, spec
from tests.engine.test_policy import policy
from tests.engine.test_scheduler import request


def test_a_comparison_says_what_is_new() -> None:
    shadow = Shadow(2, [5, 6, 7], 8)
    assert shadow.compare([0, 0]) is None
    assert shadow.compare([0, 0, 5]) == Comparison(8, 3, 0, 1, False)
    assert shadow.compare([0, 0, 5]) is None
    found = shadow.compare([0, 0, 5, 6, 9, 9])
    assert found == Comparison(8, 3, 1, 2, True) and found.is_last


def test_all_right_is_an_end_too() -> None:
    found = Shadow(1, [5, 6], 2).compare([0, 5, 6, 7, 8])
    assert found == Comparison(2, 2, 0, 2, False) and found.is_last


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
def test_it_counts_alike_in_parts_and_at_once(accepted: int) -> None:
    at_once, in_parts = Acceptance(8), Acceptance(8)
    one, other = AcceptanceRecord(), AcceptanceRecord()
    for _ in range(3):
        at_once.count_given(one, 8, 5)
        at_once.count_compared(one, Comparison(8, 5, 0, accepted, accepted < 5))
        in_parts.count_given(other, 8, 5)
        shadow = Shadow(0, [1] * 5, 8)
        for length in range(1, accepted + 2):
            found = shadow.compare([*[1] * accepted, 0][:length])
            if found is not None:
                in_parts.count_compared(other, found)
    assert in_parts.survival() == pytest.approx(at_once.survival(), rel=0.05)
    assert in_parts.followed.estimates == pytest.approx(at_once.followed.estimates)
    assert (other.hits, other.misses) == pytest.approx((one.hits, one.misses))


class Comparing(FixedPolicy):
    """Has `num_drafts` verified and `num_shadows` compared, and notes what it is told."""

    compares = True

    def __init__(self, num_drafts: int, num_shadows: Sequence[int]) -> None:
        super().__init__(num_drafts)
        self.num_shadows = num_shadows
        self.given: list[tuple[int, int]] = []
        self.found: list[Comparison] = []
        self.steps: list[StepOutcome] = []

    def shadows(self, chosen: Sequence[int], num_others: int) -> list[int]:
        return list(self.num_shadows[: len(chosen)])

    def num_repeats(self) -> int:
        return 0

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool) -> None:
        self.given.append((num_asked, num_drafts))

    def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
        raise AssertionError("it is told by comparisons")

    def compared(self, request: Progress, found: Comparison) -> None:
        self.found.append(found)

    def finished(self, step: StepOutcome) -> None:
        self.steps.append(step)


class Countdown(FakeRunner):
    """Drafts are the text that follows, but the one at each tenth position is wrong."""

    drafter_has_kv = False

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        return [0 if n % 10 == 0 else n for n in range(num_known, num_known + num_drafts)]


def run(runner: FakeRunner, policy: FixedPolicy, num_requests: int = 1) -> list[list[int]]:
    engine = core(runner)
    engine.policy = policy
    for number in range(num_requests):
        engine.add_request(str(number), spec(5 + number, 40))
    deltas = finish(engine)
    return [ids(deltas[str(number)]) for number in range(num_requests)]


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_drafts_beyond_those_verified_are_compared(num_drafts: int) -> None:
    runner, told = Countdown(7), Comparing(num_drafts, [7])
    assert run(runner, told) == [list(range(5, 45))]
    asked = [s for step in runner.steps for s in step.scheduled]
    assert {s.num_drafts for s in asked} == {7}, "asked for all"
    assert max(s.num_sampled for s in asked) == 1 + num_drafts, "but not all verified"
    assert {number for _, number in runner.kept_drafts} == {num_drafts}, "nor left for padding rows to verify"
    assert (7, 7) in told.given
    wrong = [c for c in told.found if c.is_rejected]
    right = [c for c in told.found if c.is_last and not c.is_rejected]
    assert wrong and right and all(c.num_accepted == 7 for c in right)
    assert {step.is_shadow for step in told.steps} == {num_drafts == 0}


def test_what_is_wrong_is_told_no_earlier_than_what_is_right() -> None:
    engine, told = core(Countdown(7)), Comparing(1, [7])
    steps = list[int]()
    told.compared = lambda request, found: steps.append(engine.stats.num_steps)  # type: ignore[method-assign]
    engine.policy = told
    engine.add_request("a", spec(5, 40))
    finish(engine)
    assert len(steps) > len(set(steps)) > 3 and {number % COMPARED_EVERY for number in steps[:-8]} == {0}


def test_the_end_of_an_output_is_compared_at_once() -> None:
    """An output of three tokens ends before comparisons are due."""
    engine, told = core(Countdown(7)), Comparing(0, [7])
    engine.policy = told
    engine.add_request("a", spec(5, 3))
    finish(engine)
    assert told.found and engine.stats.num_steps <= COMPARED_EVERY


def test_drafts_of_a_request_that_is_not_compared_are_all_verified() -> None:
    runner, told = Countdown(7), Comparing(3, [0, 7])
    assert run(runner, told, 2) == [list(range(5, 45)), list(range(6, 46))]
    by_slot: dict[int, set[int]] = {}
    for step in runner.steps:
        if len(step.scheduled) == 2:
            for s in step.scheduled:
                by_slot.setdefault(s.slot, set()).add(s.num_drafts)
    assert sorted(map(sorted, by_slot.values())) == [[3], [7]]


NOT_COMPARED = {
    "drafter_has_kv": True,
    "drafter_may_rest": False,
    "lookups": frozenset(),
    "async_depth": 1,
}


class Following(Comparing):
    """Has no drafts compared, and notes what it is told of some that are verified."""

    def __init__(self, num_drafts: int, every: int) -> None:
        super().__init__(num_drafts, [])
        self.report_every = every
        self.rounds: list[tuple[str, int, int]] = []
        self.places: list[tuple[str, int]] = []  # request and its length, of proposals that are followed
        self.num_asked = self.num_given = 0

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool = True) -> None:
        super().proposed(request, num_asked, num_drafts, is_model=is_model)
        self.places.append((request.id, len(request.tokens)))

    def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
        assert not is_model
        self.rounds.append((request.id, num_drafted, num_accepted))

    def looked_up(self, request: Progress, num_asked: int, num_given: int) -> None:
        self.num_asked += num_asked
        self.num_given += num_given


@pytest.mark.parametrize("every", [1, 2])
def test_some_drafts_are_followed_until_they_are_verified(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Those made in steps that are told of, by their true ends; whether there are drafts is counted in each step."""
    monkeypatch.setattr("draftproof.engine.drafting.FOLLOWED_EVERY", every)
    runner, told = Countdown(7), Following(7, every)
    assert run(runner, told) == [list(range(5, 45))]
    asked = [s.num_drafts for step in runner.steps for s in step.scheduled if s.num_drafts]
    assert told.num_asked >= len(asked) - every and told.num_given == told.num_asked
    assert set(told.given[:4]) == {(7, 7)} and len(told.given) >= len(asked) // every - 1
    assert len(told.rounds) == len(told.given) and not told.found
    assert {accepted for _, _, accepted in told.rounds} == {3}, "as FakeRunner has it"


def test_drafts_after_a_prompt_are_followed_no_oftener_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step with a prompt is told of, and the first drafts of a text are not like the later ones."""
    monkeypatch.setattr("draftproof.engine.drafting.FOLLOWED_EVERY", 1)
    told = Following(7, 4)
    engine = core(Countdown(7))
    engine.policy = told
    lengths = {str(number): 5 + number % 20 for number in range(60)}
    for name, length in lengths.items():
        engine.add_request(name, spec(length, 40))
    finish(engine)
    firsts = [name for name, position in told.places if position == 1 + lengths[name]]
    assert len(told.places) > 40 and len(firsts) / len(told.places) < 0.15


def test_few_requests_of_a_step_are_followed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.engine.drafting.FOLLOWED_EVERY", 1)
    told = Following(7, 1)
    run(Countdown(7), told, num_requests=5)
    names = [name for name, _, _ in told.rounds]
    assert names[:16] == ["0", "1", "2", "3"] * 4, "four decode at a time, two of a step are followed"
    assert "4" in names[16:]


@pytest.mark.parametrize(("name", "value"), NOT_COMPARED.items())
def test_only_drafts_that_the_host_knows_in_time_and_that_cost_no_rows_are_compared(
    name: str, value: Any
) -> None:
    class Told(Comparing):
        def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
            self.rounds += 1

        rounds = 0

    runner, told = Countdown(7), Told(3, [7])
    setattr(runner, name, value)
    run(runner, told)
    assert told.rounds and not told.found


def test_nothing_is_compared_where_steps_are_padded_to_the_most_drafts() -> None:
    assert policy(0.6).compares and not policy(0.6, buckets=(1, 2, 4)).compares


def shown(its: AutoPolicy, one: Progress, number: int, accepted: int) -> None:
    for _ in range(number):
        its.proposed(one, 8, 8)
        its.compared(one, Comparison(8, 8, 0, accepted, accepted < 8))


def test_comparisons_show_what_drafts_are_worth_that_nobody_verified() -> None:
    """Four requests: drafts right at the expected rate do not pay, and all right they do."""
    its, four = policy(0.6, row=0.5), [request(4) for _ in range(4)]
    for _ in range(40):
        assert its.choose(four, 0) == [0] * 4 or its.acceptance.survival()[0] > 0.8
        for one in four:
            shown(its, one, 1, 8)
        its.finished(StepOutcome(4, 4, 8, 4, 100, 3.0, is_shadow=True))
        its.choose(four, 0)
        its.finished(StepOutcome(4, 4, 0, 4, 100, 3.0))
    assert its.choose(four, 0) == [8] * 4
    assert its.savings >= ALLOWANCE, "comparing costs no savings"


def test_late_drafts_are_known_although_only_early_ones_are_verified() -> None:
    its, one = policy(0.6), request(4)
    shown(its, one, 30, 1)
    assert its.acceptance.survival()[0] > 0.8 > 0.3 > its.acceptance.survival()[1]


def test_comparing_takes_turns_and_little_time() -> None:
    its = policy(0.6, row=0.5)
    num_requests = MOST_SHADOWS + 4
    seen = [its.shadows([0] * num_requests, 0) for _ in range(20 * PLAIN_EVERY)]
    times = [number for number, found in enumerate(seen) if any(found)]
    assert times[0] == 0 and min(b - a for a, b in itertools.pairwise(times)) >= PLAIN_EVERY
    assert all(sum(map(bool, seen[number])) == MOST_SHADOWS for number in times)
    assert all(any(seen[number][i] for number in times) for i in range(num_requests)), "each has its turn"
    its = policy(0.6, step=10.0)  # a draft takes the drafter as long as ten steps
    assert sum(any(its.shadows([0], 0)) for _ in range(500)) == 1


def turns_of_shadows(its: AutoPolicy, longer: float, num_steps: int = 400) -> list[int]:
    """The steps with shadow drafts of one request that gets no others. They take so many plain steps longer."""
    one, found = request(4), []
    plain = its.costs.plain(1, 4)
    for number in range(num_steps):
        is_shadow = any(its.shadows(its.choose([one], 0), 0))
        seconds = plain * (1.0 + longer * is_shadow)
        its.finished(StepOutcome(1, 1, 8 * is_shadow, 1, 4, seconds, is_shadow=is_shadow))
        found += [number] * is_shadow
    return found


def test_drafts_are_compared_less_often_where_making_them_takes_longer() -> None:
    cheap, dear = policy(0.1, row=0.5, step=0.0), policy(0.1, row=0.5, step=0.0)
    known = dear.costs.step(1, 2, 1, 4), dear.costs.step(1, 1, 8, 4)
    often, seldom = turns_of_shadows(cheap, 0.0), turns_of_shadows(dear, 0.5)
    assert {b - a for a, b in itertools.pairwise(often)} == {LEAST_APART}
    assert seldom[-1] - seldom[-2] > 3 * LEAST_APART
    assert len(seldom) - 1 < 400 * SHADOW_SHARE / 0.5 * 2
    assert (dear.costs.step(1, 2, 1, 4), dear.costs.step(1, 1, 8, 4)) == known, "no other step takes so long"


@pytest.mark.parametrize("longer", [0.0, 0.2, 0.3, 0.45, 3.0])
def test_no_reported_plain_step_is_always_one_with_shadow_drafts(longer: float) -> None:
    its = ShadowTurns()
    seen = [any(its.next([0], 8, lambda _: longer, is_known=True)) for _ in range(500)]
    first, second = [number for number, is_shadow in enumerate(seen) if is_shadow][:2]
    assert first == 0 and math.gcd(second, PLAIN_EVERY) == 1


@pytest.mark.parametrize("gained", [0.0, 0.3])
def test_drafts_are_compared_often_again_once_they_would_have_paid(gained: float) -> None:
    its, longer = policy(0.1, row=0.5, step=0.0), 0.5
    turns_of_shadows(its, longer)
    its.compared(request(4), Comparison(8, 8, 0, 0, True))
    its._shadow_turns.hit(gained)
    before = turns_of_shadows(its, longer, 200)
    assert min(b - a for a, b in itertools.pairwise(before)) > 2 * LEAST_APART
    its.compared(request(4), Comparison(8, 8, 0, 1, True))
    soon = turns_of_shadows(its, longer, 200)
    apart = [b - a for a, b in itertools.pairwise(soon)]
    assert soon[0] < LEAST_APART and apart[: NUM_SOON - 1] == [LEAST_APART] * (NUM_SOON - 1)
    assert apart[NUM_SOON] > 2 * LEAST_APART


def test_what_comparisons_tell_fades_the_slower_the_fewer_there_are() -> None:
    left = []
    for longer in (0.0, 0.5):
        its = policy(0.3, row=0.5, step=0.0)
        turns_of_shadows(its, longer)
        shown(its, request(4), 30, 0)
        its._settle()
        turns_of_shadows(its, longer, 80)
        left.append(its.acceptance.survival()[0])
    assert left[1] < 0.7 * left[0]


def seen_of(requests: list[Progress], num_steps: int, number: int) -> list[Sequence[int]]:
    """The shadow drafts of so many steps, each request always with so many drafts to verify."""
    its, found = policy(0.9), []
    its.savings = 30.0
    for _ in range(num_steps):
        its.choose(requests, 0)
        found.append(its.shadows([number] * len(requests), 0))
        its.finished(StepOutcome(len(requests), 9 * len(requests), number, 9 * len(requests), 100, 1.0))
    return found


def test_a_request_that_drafts_alone_is_not_compared_twice_as_often() -> None:
    """There is nobody whose drafts are not verified."""
    seen = [any(found) for found in seen_of([request(4)], 1000, 5)]
    assert sum(seen[-10 * SHADOWS_EVERY :]) == 10


@pytest.mark.parametrize("number", [5, 8])
def test_those_that_draft_are_compared_in_each_step_at_first_and_later_in_some(number: int) -> None:
    """Later none of those that have the most drafts anyway: verifying them tells as much."""
    seen = seen_of([request(4), request(5)], 200, number)
    assert all(found == [8, 8] for found in seen[:5])
    later = sum(any(found) for found in seen[-80:])
    if number == 8:
        assert later == 0
    else:
        assert 80 // SHADOWS_EVERY <= later <= 80 // SHADOWS_EVERY + 80 // PLAIN_EVERY


@pytest.mark.parametrize("is_known", [False, True])
def test_nobody_waits_for_comparisons_that_do_not_come(is_known: bool) -> None:
    its = ShadowTurns()
    its.next([8], 8, lambda _: 0.0, is_known=is_known)
    soon = its.num_until([8], 8, is_known=is_known)
    assert (soon > 1000 * SHADOWS_EVERY) == is_known
    assert its.num_until([5], 8, is_known=is_known) < SHADOWS_EVERY


@pytest.mark.parametrize("buckets", [(), (1, 2, 4)])
def test_a_step_may_take_long_if_counts_vouch_for_its_tokens(buckets: tuple[int, ...]) -> None:
    """Eight drafts take three plain steps longer, more than the savings allow."""
    its, one = policy(0.95, row=0.3, step=0.05, base=1.0, buckets=buckets), request(4)
    its.savings = 2.0

    def drafts() -> int:
        choice = its.chooser.best({its.acceptance.class_of(one.records[0]): 1}, stake=STAKE * its.savings)
        return max(choice.num_drafts.values(), default=0)

    assert 0 <= drafts() < 8, "by what is expected alone"
    for _ in range(60):
        its.proposed(one, 8, 8)
        its.verified(one, 8, 8)
    assert drafts() == 8
    choice = its.chooser.best({its.acceptance.class_of(one.records[0]): 1}, stake=STAKE * its.savings)
    assert choice.risk == 0.0


def test_what_counts_vouch_for_is_less_than_what_is_expected() -> None:
    acceptance, record = Acceptance(2, expected=0.9), AcceptanceRecord()
    assert acceptance.vouched(0) == [0.0, 0.0]
    for _ in range(500):
        acceptance.count(record, 2, 2)
        assert acceptance.vouched(0)[0] < acceptance.survival(0)[0]
    assert acceptance.vouched(0)[1] > 0.9


def test_few_steps_with_drafts_correct_the_costs_once_savings_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its, heard = policy(0.9), list[StepOutcome]()
    monkeypatch.setattr(StepCosts, "observe", lambda costs, step: heard.append(step))
    for savings, every in ((0.0, 1), (20.0, OBSERVED_EVERY)):
        heard.clear()
        for _ in range(40):
            its.savings = savings
            its.finished(StepOutcome(1, 9, 8, 5, 100, 1.0))
        assert len(heard) == 40 // every


@pytest.mark.parametrize(
    ("config", "is_cut"),
    [
        ({"method": "ngram"}, True),
        ({"method": "suffix"}, False),
        ({"model": str(assets.path("tiny-eagle3"))}, False),
    ],
)
def test_the_policy_knows_whether_the_drafter_ends_proposals(config: dict[str, Any], is_cut: bool) -> None:
    its = LLM(assets.path("tiny"), max_num_seqs=1, speculative_config=config).core.policy
    assert isinstance(its, AutoPolicy) and its.is_cut == is_cut


@pytest.mark.parametrize("is_lookup", [False, True])
def test_a_drafters_time_is_reported_if_it_is_a_lookup(
    monkeypatch: pytest.MonkeyPatch, is_lookup: bool
) -> None:
    """A chain's time depends on which member drafts."""
    heard = list[StepOutcome]()
    runner = FakeRunner(3)
    runner.lookups, runner.drafter_has_kv = frozenset({0} if is_lookup else ()), False
    monkeypatch.setattr(Pending, "draft_seconds", 0.5)
    engine = core(runner)
    told = FixedPolicy(3)
    told.report_every, told.compares = 1, True
    told.finished = heard.append  # type: ignore[method-assign]
    engine.policy = told
    engine.add_request("a", spec(5, 12))
    finish(engine)
    assert {step.draft_seconds for step in heard} == {0.5 * is_lookup}


def test_a_step_stands_for_those_that_are_not_reported() -> None:
    """While reports may wait one in so many steps is reported; savings fall as if all were."""
    its, each, one = policy(0.9), policy(0.9), request(4)
    for told in (its, each):
        told.savings = MOST_SAVED
        assert told.choose([one], 0)[0]
    assert its.report_every == OBSERVED_EVERY
    for number in range(3 * OBSERVED_EVERY):
        outcome = StepOutcome(1, 9, 8, 1, 0, each.costs.step(1, 9, 8))
        if number % its.report_every == 0:
            its.finished(outcome)
        each._kept = None  # not kept: all are reported
        assert each.report_every == 1
        each.finished(outcome)
    its._settle()
    assert its.savings < MOST_SAVED - 1 and its.savings == pytest.approx(each.savings)


SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}


@pytest.mark.parametrize("config", [{"method": "ngram"}, SUFFIX])
def test_a_comparison_tells_what_verifying_would_have(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """Two runs of one text: in the first all drafts of a round are verified, in the second they are only compared."""
    # after each step, so that positions are those of tokens
    monkeypatch.setattr("draftproof.engine.drafting.COMPARED_EVERY", 1)
    llm = LLM(assets.path("tiny"), max_num_seqs=1, speculative_config=config)
    verified, compared = dict[int, int](), dict[int, int]()  # first position -> accepted drafts

    class Verifying(FixedPolicy):
        report_every = 1  # so that it hears of each round at once

        def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
            if num_accepted < num_drafted:
                verified[len(request.tokens) - num_accepted - 1] = num_accepted

    class Looking(Comparing):
        def compared(self, request: Progress, found: Comparison) -> None:
            if found.is_rejected:
                compared[len(request.tokens) - found.num_accepted - 1] = found.num_accepted

    prompt = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a"
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=200, ignore_eos=True)
    outputs = []
    for its in (Verifying(8), Looking(0, [8])):
        llm.core.policy = its
        (found,) = llm.generate([prompt], params, use_tqdm=False)
        outputs.append(found.outputs[0].token_ids)
    assert outputs[0] == outputs[1]
    assert len(verified) > 3 and verified.items() <= compared.items()


def test_the_device_keeps_no_drafts_that_are_not_to_be_verified() -> None:
    """Else a padding row would verify them, which a grammar's masks do not cover."""
    llm = LLM(assets.path("tiny"), max_num_seqs=2, speculative_config={"method": "ngram"})
    llm.core.policy = Comparing(1, [8, 0])
    seen = 0
    for number in range(2):
        llm.core.add_request(str(number), spec(40, 60))
    while llm.core.has_work:
        llm.core.step()
        for one in llm.core.scheduler.running:
            counts = llm.core.runner.state.slots.draft_count_S  # type: ignore[attr-defined]
            assert int(counts[one.slot]) == one.num_drafts <= 1 or not one.num_outputs
            seen += one.num_drafts
    assert seen > 10


def test_plain_steps_are_told_of_beside_shadow_drafts() -> None:
    """At any phase of the two: a choice of no drafts must come to an end."""
    for num_before in range(PLAIN_EVERY):
        runner, its = Countdown(8), policy(0.02)
        its.costs.draft = DraftCosts()
        its.costs.draft.set(1, 8, 1e-3)
        engine = core(runner)
        engine.policy = its
        engine.stats.num_steps = num_before
        engine.add_request("a", spec(5, 150))
        choices = []
        while engine.has_work:
            engine.step()
            if not choices or choices[-1] is not its._kept:
                choices.append(its._kept)
        assert its.savings > ALLOWANCE and len(choices) > 3


def test_a_choice_that_counts_vouched_for_ends_when_the_savings_do() -> None:
    its, one = policy(0.95, row=0.3), request(4)
    for _ in range(60):
        its.proposed(one, 8, 8)
        its.verified(one, 8, 8)
    its.finished(StepOutcome(1, 9, 8, 9, 100, 4.0))
    its.savings = ALLOWANCE
    assert its.choose([one], 0) == [8] and its._kept is not None and not its._kept.may_wait
    for number in range(ROUNDS_KEPT):
        its.finished(StepOutcome(1, 9, 8, 1, 100, 4.0))
        assert its._kept.is_over == (its.savings == 0.0), number
    assert its._kept.is_over


@pytest.mark.parametrize(("rate", "num_requests"), [(0.9, 1), (0.9, 3), (0.1, 1), (0.1, 3)])
def test_what_a_policy_says_of_several_steps_it_would_have_said_of_each(
    rate: float, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup's policy, asked about each step, and one whose answers are used again for as long as it says."""
    clock = itertools.count(0.0, 0.3)  # choosing takes a third of a step
    monkeypatch.setattr("draftproof.engine.auto_policy.time.perf_counter", lambda: next(clock))
    each, some = policy(rate, row=0.1, step=0.001), policy(rate, row=0.1, step=0.001)
    for its in (each, some):
        its.is_lookup = True
        its.__post_init__()
        its.savings = 30.0
    asked, found = [request(4, number) for number in range(num_requests)], list[int]()
    generator, num_left, num_used, num_asked = random.Random(1), 0, 0, 0
    for number in range(600):
        chosen = each.choose(asked, 0)
        shadows = each.shadows(chosen, 0)
        if num_left:
            num_left, num_used = num_left - 1, num_used + 1
            looked = ()
        else:
            some.repeated(num_used)
            num_used = 0
            found = list(some.choose(asked, 0))
            looked = some.shadows(found, 0)
            num_left, num_asked = some.num_repeats(), num_asked + 1
        assert found == list(chosen) and [*filter(None, looked)] == [*filter(None, shadows)], number
        if any(shadows) and generator.random() < 0.5:
            comparison = Comparison(8, 8, 0, 8 if rate > 0.5 else 0, rate < 0.5)
            for its in (each, some):
                its.compared(asked[0], comparison)
            some.repeated(num_used)
            num_left = num_used = 0
        if number % its.report_every == 0:
            some.repeated(num_used)
            most = max(chosen)
            step = StepOutcome(num_requests, num_requests * (1 + most), most, num_requests, 100, 1.0)
            for its in (each, some):
                its.finished(step)
            num_left, num_used = some.num_repeats(), 0
    assert some._kept.num_steps == each._kept.num_steps - num_used and num_asked < 250
