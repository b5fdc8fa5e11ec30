from __future__ import annotations

from draftproof import SamplingParams
from draftproof.cache.pages import PageAllocator
from draftproof.engine.scheduler import Plan, Scheduler
from draftproof.engine.sequence import Sequence
from draftproof.engine.text import StopChecker
from tests.helpers import check_pages

PARAMS = SamplingParams(max_tokens=100, detokenize=False)


def sequence(num_tokens: int, arrival: int = 0, limit: int = 64, start: int = 0) -> Sequence:
    return Sequence(
        request_id=f"r{arrival}",
        index=0,
        arrival=arrival,
        tokens=list(range(start, start + num_tokens)),
        num_prompt=num_tokens,
        params=PARAMS,
        row_seed=0,
        limit=limit,
        stop_ids=frozenset(),
        checker=StopChecker(PARAMS, eos_ids=(), max_tokens=100, detokenizer=None),
    )


def scheduler(num_blocks: int = 65, *, slots: int = 4, budget: int = 32, lookahead: int = 0) -> Scheduler:
    pages = PageAllocator(num_blocks, 4, sharing=True, lookahead=0)
    return Scheduler(pages, num_slots=slots, max_num_batched_tokens=budget, num_lookahead=lookahead)


def shape(plan: Plan) -> list[tuple[str, int, int]]:
    return [(w.sequence.request_id, w.num_rows, w.num_sampled) for w in plan.work]


def finish_pass(plan: Plan, num_emitted: int = 1) -> None:
    for w in plan.work:
        s = w.sequence
        if w.num_sampled:
            s.tokens += [7] * num_emitted
            s.num_computed = len(s.tokens) - 1
        else:
            s.num_computed += w.num_rows


def test_a_long_prompt_is_cut_to_the_budget_and_only_its_end_is_sampled() -> None:
    s = scheduler(budget=10)
    s.add(sequence(25, limit=40))
    rows = []
    for _ in range(4):
        plan = s.plan()
        rows += shape(plan)
        finish_pass(plan)
    assert rows == [("r0", 10, 0), ("r0", 10, 0), ("r0", 5, 1), ("r0", 1, 1)]


def test_decoding_comes_before_prompts_and_drafts_ride_on_it() -> None:
    s = scheduler(budget=12)
    first = sequence(5, 0)
    s.add(first)
    finish_pass(s.plan())
    first.num_drafts = 3
    s.add(sequence(20, 1, start=100))
    assert shape(s.plan()) == [("r0", 4, 4), ("r1", 8, 0)]


def test_drafts_are_cut_by_the_budget() -> None:
    s = scheduler(budget=3)
    first = sequence(2, 0)
    s.add(first)
    finish_pass(s.plan())
    first.num_drafts = 5
    assert shape(s.plan()) == [("r0", 3, 3)]


def test_nobody_waits_in_front_of_a_full_house() -> None:
    s = scheduler(slots=1)
    s.add(sequence(4, 0))
    s.add(sequence(4, 1, start=50))
    assert shape(s.plan()) == [("r0", 4, 1)]
    assert len(s.waiting) == 1


def test_the_latest_is_preempted_and_computed_again_from_its_tokens() -> None:
    s = scheduler(num_blocks=5)  # four usable pages of four tokens
    first, second = sequence(7, 0, limit=16), sequence(7, 1, limit=16, start=50)
    s.add(first)
    s.add(second)
    finish_pass(s.plan())
    finish_pass(s.plan())  # nine tokens each: the ninth needs a third page
    plan = s.plan()
    assert shape(plan) == [("r0", 1, 1)] and [v for _, v in plan.preempted] == [second]
    assert second.num_preemptions == 1 and second.slot == -1 and second.num_computed == 0
    assert len(second.tokens) == 9
    finish_pass(plan)
    slot = s.finish(first)
    assert slot >= 0
    assert shape(s.plan()) == [("r1", 9, 1)] or second.num_cached > 0
    check_pages(s.pages)


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    s = scheduler(num_blocks=5)
    first, second = sequence(7, 0, limit=16), sequence(6, 1, limit=16, start=50)
    s.add(first)
    s.add(second)
    finish_pass(s.plan())
    first.num_drafts = 4
    plan = s.plan()
    assert shape(plan) == [("r0", 1, 1), ("r1", 1, 1)] and not plan.preempted


def test_pages_cover_what_drafting_may_write_but_not_past_the_limit() -> None:
    s = scheduler(lookahead=5)
    first = sequence(4, 0, limit=64)
    second = sequence(4, 1, limit=6, start=50)
    s.add(first)
    s.add(second)
    s.plan()
    assert (len(first.blocks), len(second.blocks)) == (3, 2)


def test_a_finished_sequence_gives_everything_back() -> None:
    s = scheduler()
    one, waiting = sequence(9, 0), sequence(3, 1)
    s.add(one)
    s.plan()
    s.add(waiting)
    s.finish(waiting)
    s.finish(one)
    assert not s.running and not s.waiting and s.pages.num_free == 64
    check_pages(s.pages)


def test_a_broken_draft_keeps_pages_out_of_the_cache() -> None:
    for broken, cached in ((False, 8), (True, 0)):
        s = scheduler()
        one = sequence(9, 0)
        s.add(one)
        finish_pass(s.plan())
        one.draft_broken = broken
        finish_pass(s.plan())
        s.finish(one)
        other = sequence(9, 1)
        s.add(other)
        s.plan()
        assert other.num_cached == cached
