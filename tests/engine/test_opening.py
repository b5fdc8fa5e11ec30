"""The beginning of an output, where drafts are accepted less often. No engine, no clock."""

from __future__ import annotations

import random

import pytest

from draftproof.engine.acceptance import (
    MODEL_OPENING,
    ODDS_STEP,
    Acceptance,
    AcceptanceRecord,
    RequestClass,
    acceptance_of,
)
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.draft_choice import WORTH_GOING_ON, Chooser
from draftproof.engine.ledger import ALLOWANCE, EARNED, MOST_SAVED
from draftproof.engine.opening import NUM_OPENING, SHORT, Opening, is_early, raised
from draftproof.engine.progress import Progress, Round
from tests.engine.test_policy import costs, request

EARLY, LATE = 0.45, 0.7  # acceptance
RATIO = EARLY / (1 - EARLY) * (1 - LATE) / LATE


def counted(early: float, late: float, num_texts: int = 400, num_drafts: int = 1) -> Acceptance:
    """What is known after texts whose first ten rounds are accepted at `early` and the next thirty at `late`."""
    acceptance, rng = acceptance_of(num_drafts, has_kv=True), random.Random(0)
    for _ in range(num_texts):
        record = AcceptanceRecord()
        for number in range(40):
            acceptance.class_of(record, is_early=number < 10)
            acceptance.survival()  # as a choice does
            rate = early if number < 10 else late
            num_accepted = next((n for n in range(num_drafts) if rng.random() >= rate), num_drafts)
            acceptance.count(record, num_drafts, num_accepted, is_early=number < 10)
    return acceptance


def at(one: Progress, num_outputs: int) -> Progress:
    one.tokens += [0] * (num_outputs - one.num_outputs)
    return one


def test_odds_are_multiplied() -> None:
    assert raised(0.5, 2.0) == pytest.approx(2 / 3) and raised(0.3, 1.0) == 0.3


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_later_rounds_are_told_from_those_of_the_beginning(num_drafts: int) -> None:
    """Without that the last estimate of all rounds would be 0.70 at a text's end and 0.66 after the beginning."""
    acceptance = counted(EARLY, LATE, num_drafts=num_drafts)
    assert acceptance.accepted.estimates == pytest.approx([LATE] * num_drafts, abs=0.05)
    assert acceptance.opening is not None
    assert acceptance.opening.ratio == pytest.approx(RATIO, rel=0.15)
    early = acceptance.class_of(AcceptanceRecord(), is_early=True)
    assert acceptance.chances(early.odds + early.opening)[0] == pytest.approx(EARLY, abs=0.06)
    assert acceptance.class_of(AcceptanceRecord()).opening == 0


def test_where_all_rounds_are_alike_so_is_the_beginning() -> None:
    acceptance = counted(LATE, LATE)
    assert acceptance.opening is not None and acceptance.opening.odds(ODDS_STEP) == 0


def test_a_first_text_s_beginning_is_compared_with_later_drafts_once_there_are_some() -> None:
    """64 requests begin together, and drafts are right at 0.8 throughout, where 0.6 was expected. Their first rounds
    tell what the first drafts are like, and hardly what later ones are like."""
    acceptance = acceptance_of(1, has_kv=True)
    acceptance.decode_together(64)
    opening = acceptance.opening
    assert opening is not None

    def tell(num_rounds: int, *, is_early: bool) -> None:
        for number in range(num_rounds):
            acceptance.count(AcceptanceRecord(), 1, int(number % 5 > 0), is_early=is_early)
            if number % 64 == 0:
                acceptance.survival()

    tell(200, is_early=True)
    assert opening.ratio == MODEL_OPENING, "there are no later ones"
    first = acceptance.unknown.odds + acceptance.unknown.opening
    assert acceptance.chances(first)[0] == pytest.approx(0.8, abs=0.06), "what was seen"
    tell(300, is_early=False)
    assert acceptance.accepted.estimates[0] == pytest.approx(0.8, abs=0.03)
    for _ in range(2):
        tell(200, is_early=True)
        tell(300, is_early=False)
    assert opening.ratio == pytest.approx(1.0, abs=0.15) and acceptance.unknown.opening == 0
    assert acceptance.accepted.estimates[0] == pytest.approx(0.8, abs=0.03)


def test_a_request_s_own_odds_are_no_matter_of_its_beginning() -> None:
    """Its first rounds are as expected of all requests, so they say nothing of its next ones."""
    acceptance, rng, odds = counted(EARLY, LATE), random.Random(1), list[int]()
    for _ in range(40):
        record = AcceptanceRecord()
        for _ in range(10):
            acceptance.count(record, 1, int(rng.random() < EARLY), is_early=True)
        odds.append(acceptance.class_of(record).odds)
    assert abs(sum(odds)) < len(odds) / 3
    rounds = [AcceptanceRecord() for _ in range(40)]
    for record in rounds:
        for _ in range(10):
            acceptance.count(record, 1, int(rng.random() < EARLY))
    assert sum(acceptance.class_of(record).odds for record in rounds) < -len(odds) / 2, "later ones would"


def test_what_a_new_engine_expects() -> None:
    acceptance = acceptance_of(3, has_kv=True)
    assert acceptance.unknown == RequestClass(0, 0, round(Opening(MODEL_OPENING).odds(ODDS_STEP)))
    assert acceptance.unknown.opening == -2 and acceptance.average.opening == 0
    assert acceptance_of(3, has_kv=False).unknown == RequestClass(0), (
        "a lookup's first drafts are like the later ones"
    )


def test_only_longer_outputs_have_a_beginning() -> None:
    """Else nothing comes of the drafts that are made for the sake of later ones."""
    assert is_early(0, SHORT + 1) and is_early(NUM_OPENING - 1, 100) and not is_early(NUM_OPENING, 100)
    assert not is_early(0, SHORT)


@pytest.mark.parametrize(
    ("num_outputs", "num_early", "goes_on"),
    [(0, 4, True), (NUM_OPENING - 1, 4, True), (NUM_OPENING, 4, False), (1, 3, True), (1, 2, False)],
)
@pytest.mark.parametrize("speedup", [0.93, 0.99])
def test_first_rounds_end_no_drafts_that_lose_little(
    speedup: float, num_outputs: int, num_early: int, goes_on: bool
) -> None:
    """Some of four requests are at their beginning, and a drafter that has none here expects as much of all tokens."""
    its = AutoPolicy(costs(row=0.0, step=1.5 / speedup - 1.0, levels=(0, 1)), Acceptance(1, expected=0.5))
    asked = [
        at(request(4, number, limit=100), num_outputs if number < num_early else 2 * NUM_OPENING)
        for number in range(4)
    ]
    its.savings = EARNED - 1.0
    assert its.choose(asked, 0) == [0] * 4, "none is begun with"
    its._let_go()
    its.savings = EARNED
    assert its.choose(asked, 0) == [speedup > 0.95] * 4
    assert its._kept is not None
    its.savings, its._kept.is_over = EARNED - 1.0, True
    assert its.choose(asked, 0) == [goes_on and speedup > 0.95] * 4


def test_what_drafts_may_lose_is_their_requests_share_of_a_step() -> None:
    """One of forty requests can draft: a loss of half a per cent of the step is a fifth of its own part."""
    its = AutoPolicy(costs(levels=(0, 1)), Acceptance(1))
    its.savings = MOST_SAVED
    assert its._least_speedup([request(4)], 0, 0, 0) == WORTH_GOING_ON
    assert its._least_speedup([request(4)], 39, 0, 0) == pytest.approx(1.0 - 0.05 / 40)


def test_what_counts_vouch_for_at_the_beginning_is_what_comes_then() -> None:
    """They bring less than they cost there, which a low stake cannot pay for."""
    chooser = Chooser(costs(row=0.0, step=0.6, levels=(0, 1)), counted(0.3, 0.8))
    early, late = RequestClass(0, 0, -4), RequestClass(0)
    assert chooser.best({late: 1}, stake=0.1).num_drafts == {late: 1}
    assert (
        not chooser.best({early: 1}, stake=0.1).num_drafts and chooser.best({early: 1}, stake=0.7).num_drafts
    )


def test_a_drafter_that_stops_by_itself_is_asked_for_as_many_drafts_at_the_beginning() -> None:
    """The number is but a limit, and kept for long."""
    for stops in (False, True):
        its = AutoPolicy(costs(row=0.01, step=0.01), acceptance_of(8, has_kv=True), stops=stops)
        its.savings = MOST_SAVED
        its.choose([request(4, limit=100)], 0)
        assert its._kept is not None
        assert [its_class.opening for its_class in its._kept.choice.num_drafts] == [0 if stops else -2]
        assert its._unknown(1).opening == (0 if stops else -2) and its._unknown(2).opening == -2


@pytest.mark.parametrize("buckets", [(), (1,)])
def test_first_drafts_at_the_beginning_count_for_what_they_bring_later(buckets: tuple[int, ...]) -> None:
    """One draft would lose there and gains later, where a drafter that has missed rows could make none; the second does
    not even pay later."""
    acceptance = Acceptance(2, expected=LATE)
    found = {}
    for step in (0.6, 0.75):
        chooser = Chooser(costs(row=0.0, step=step, levels=(0, 1, 2), buckets=buckets), acceptance)
        early = RequestClass(0, 0, -3)
        assert 1.0 + acceptance.survival(-3)[0] < 1.6 < 1.0 + LATE
        found[step] = chooser.best({early: 1}).num_drafts.get(early, 0)
    assert found[0.6] > 0 and not found[0.75]
    tokens, lasting = (chooser.class_tokens(RequestClass(0, 0, shift), 1) for shift in (-3, 0))
    assert tokens[:2] == pytest.approx(lasting[:2]) and tokens[2] < lasting[2]
    survival = acceptance.survival(-3)
    assert tokens[2] - tokens[1] == pytest.approx(survival[1]), "the second draft is as likely as it is now"


def test_a_policy_knows_who_is_at_the_beginning() -> None:
    its = AutoPolicy(costs(), acceptance_of(8, has_kv=True))
    its.savings = MOST_SAVED
    asked = [
        at(request(4, number, limit=100), num) for number, num in enumerate((0, NUM_OPENING - 1, NUM_OPENING))
    ]
    its.choose(asked, 0)
    assert its._kept is not None
    assert sorted(its_class.opening for its_class in its._kept.choice.num_drafts) == [-2, 0]


def test_each_round_is_counted_for_the_place_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are told of together, too."""
    its, one = AutoPolicy(costs(), acceptance_of(8, has_kv=True)), request(4, limit=100)
    its.savings = ALLOWANCE
    its.choose([one], 0)
    told = list[bool]()
    monkeypatch.setattr(Acceptance, "count", lambda *given, is_early, **named: told.append(is_early))
    its.learn(one, [Round(1, 1, 0, 0, num) for num in (NUM_OPENING - 2, NUM_OPENING - 1, NUM_OPENING)])
    its._settle()
    assert told == [True, True, False]
