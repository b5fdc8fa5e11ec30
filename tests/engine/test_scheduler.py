from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from draftproof import SamplingParams
from draftproof.cache.pages import PageAllocator
from draftproof.cache.windows import WindowPages
from draftproof.engine.interface import Item, RequestSpec
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import Scheduler, SchedulerOutput

PARAMS = SamplingParams(max_tokens=100, detokenize=False)


def request(num_tokens: int, arrival: int = 0, limit: int = 64, start: int = 0) -> Progress:
    ids = list(range(start, start + num_tokens))
    spec = RequestSpec(token_ids=ids, params=PARAMS, row_seed=0, limit=limit)
    return Progress(id=f"r{arrival}", spec=spec, arrival=arrival, tokens=list(ids))


def scheduler(num_blocks: int = 65, *, slots: int = 4, budget: int = 32, lookahead: int = 0) -> Scheduler:
    pages = PageAllocator(num_blocks, 4, sharing=True, lookahead=0)
    return Scheduler(pages, num_slots=slots, max_num_batched_tokens=budget, num_lookahead=lookahead)


def shape(plan: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(w.request.id, w.num_rows, w.num_sampled) for w in plan.rows]


def finish_pass(plan: SchedulerOutput, num_emitted: int = 1) -> None:
    for w in plan.rows:
        s = w.request
        if w.num_sampled:
            s.tokens += [7] * num_emitted
            s.num_computed = len(s.tokens) - 1
        else:
            s.num_computed += w.num_rows


def test_a_long_prompt_is_cut_to_the_budget_and_only_its_end_is_sampled() -> None:
    s = scheduler(budget=10)
    s.add(request(25, limit=40))
    rows = []
    for _ in range(4):
        plan = s.schedule()
        rows += shape(plan)
        finish_pass(plan)
    assert rows == [("r0", 10, 0), ("r0", 10, 0), ("r0", 5, 1), ("r0", 1, 1)]


def test_decoding_comes_before_prompts_and_drafts_ride_on_it() -> None:
    s = scheduler(budget=12)
    first = request(5, 0)
    s.add(first)
    finish_pass(s.schedule())
    first.num_drafts = 3
    s.add(request(20, 1, start=100))
    assert shape(s.schedule()) == [("r0", 4, 4), ("r1", 8, 0)]


def test_drafts_are_cut_by_the_budget() -> None:
    s = scheduler(budget=3)
    first = request(2, 0)
    s.add(first)
    finish_pass(s.schedule())
    first.num_drafts = 5
    assert shape(s.schedule()) == [("r0", 3, 3)]


def test_no_admission_without_a_free_slot() -> None:
    s = scheduler(slots=1)
    s.add(request(4, 0))
    s.add(request(4, 1, start=50))
    assert shape(s.schedule()) == [("r0", 4, 1)]
    assert len(s.waiting) == 1


def test_the_latest_is_preempted_and_computed_again_from_its_tokens() -> None:
    s = scheduler(num_blocks=5)  # four usable pages of four tokens
    first, second = request(7, 0, limit=16), request(7, 1, limit=16, start=50)
    s.add(first)
    s.add(second)
    finish_pass(s.schedule())
    finish_pass(s.schedule())  # nine tokens each: the ninth needs a third page
    plan = s.schedule()
    assert shape(plan) == [("r0", 1, 1)] and plan.num_preempted == 1 and list(s.waiting) == [second]
    assert second.num_preemptions == 1 and second.slot == -1 and second.num_computed == 0
    assert len(second.tokens) == 9
    finish_pass(plan)
    s.finish(first, is_over=False)
    assert first.slot == -1 and len(s.released) == 2
    assert shape(s.schedule()) == [("r1", 9, 1)] or second.num_cached > 0
    s.pages.check_integrity()


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    s = scheduler(num_blocks=5)
    first, second = request(7, 0, limit=16), request(6, 1, limit=16, start=50)
    s.add(first)
    s.add(second)
    finish_pass(s.schedule())
    first.num_drafts = 4
    plan = s.schedule()
    assert shape(plan) == [("r0", 1, 1), ("r1", 1, 1)] and not plan.num_preempted


def test_pages_cover_what_drafting_may_write_but_not_past_the_limit() -> None:
    s = scheduler(lookahead=5)
    first = request(4, 0, limit=64)
    second = request(4, 1, limit=6, start=50)
    s.add(first)
    s.add(second)
    s.schedule()
    assert (len(first.blocks), len(second.blocks)) == (3, 2)


def test_a_finished_request_gives_everything_back() -> None:
    s = scheduler()
    one, waiting = request(9, 0), request(3, 1)
    s.add(one)
    s.schedule()
    s.add(waiting)
    s.finish(waiting, is_over=False)
    s.finish(one, is_over=False)
    assert not s.running and not s.waiting and s.pages.num_free == 64
    s.pages.check_integrity()


def _told(lost: list[int], answer: bool, request: Progress, num_lost: int) -> bool:
    lost.append(num_lost)
    return answer


@pytest.mark.parametrize("is_over", [False, True])
def test_one_that_ends_with_its_prompts_pass_leaves_its_pages(is_over: bool) -> None:
    """A request that ends leaves all its full pages in the prefix cache, although it is not scheduled again. One that
    is removed leaves only those registered before."""
    s = scheduler()
    one = request(9, 0)
    s.add(one)
    finish_pass(s.schedule())
    s.finish(one, is_over=is_over)
    other = request(9, 1)
    s.add(other)
    s.schedule()
    assert other.num_cached == (8 if is_over else 0)
    s.pages.check_integrity()


@pytest.mark.parametrize("will_draft", [False, True])
def test_pages_with_a_hole_in_the_draft_layers_are_shared_as_such(will_draft: bool) -> None:
    """A request that finds them either uses them all and gets no drafts, or uses only those before the hole."""
    for hole, found in ((None, None), (0, 0), (4, 4), (5, 4), (8, None)):
        s, lost = scheduler(), list[int]()
        s.will_draft = partial(_told, lost, will_draft)
        one = request(9, 0)
        s.add(one)
        finish_pass(s.schedule())
        if hole is not None:
            one.miss_drafter(hole)
        finish_pass(s.schedule())
        s.finish(one, is_over=False)
        other = request(9, 1)
        s.add(other)
        s.schedule()
        assert other.num_cached == (8 if found is None or not will_draft else found)
        assert other.draft_hole == (None if will_draft else found)
        assert lost == ([] if found is None else [8 - found])


def test_rows_before_a_hole_that_hold_guesses_are_not_shared_with_drafters() -> None:
    """Three modules read three tokens ahead, so the last one's complete rows end two rows before the hole."""
    pages = PageAllocator(65, 4, sharing=True, lookahead=3)
    s = Scheduler(pages, num_slots=4, max_num_batched_tokens=32, num_lookahead=0)
    one = request(16, 0)
    s.add(one)
    finish_pass(s.schedule())
    one.miss_drafter(9)
    finish_pass(s.schedule())
    assert one.num_registered == 3
    assert s.pages.num_unseen(one.tokens) == 8, "not page 4..7, which ends at the hole but for a row"


def test_the_isolated_run_alone_and_the_others_come_back_in_order() -> None:
    s = scheduler()
    first, second, third = (request(5, i, start=20 * i) for i in range(3))
    for one in (first, second):
        s.add(one)
    finish_pass(s.schedule())
    s.isolate([second])
    s.add(third)
    assert [name for name, *_ in shape(s.schedule())] == ["r1"] and first.slot == -1
    s.rejoin()
    assert [name for name, *_ in shape(s.schedule())] == ["r1", "r0", "r2"]
    s.pages.check_integrity()


def test_recomputing_gives_all_slots_up_and_keeps_what_was_cached() -> None:
    s = scheduler()
    one = request(9)
    s.add(one)
    finish_pass(s.schedule())
    s.schedule()  # registers two pages
    s.recompute_all(keep_cache=True)
    assert sorted(s.released) == [0, 1, 2, 3] and one.num_computed == 0
    s.schedule()
    assert one.num_cached == 8
    s.recompute_all(keep_cache=False)
    s.schedule()
    assert one.num_computed == 0
    s.pages.check_integrity()


def long_prompt(window: int) -> tuple[Scheduler, Progress, list[tuple[int, int]]]:
    """Run a prompt of 32k tokens and some decoding: (scheduler, request, blocks held in full-attention and in windowed
    layers after each pass)."""
    pages = PageAllocator(2100, 16, sharing=True, lookahead=0)
    windows = [WindowPages(2100, 16, window)]
    s = Scheduler(pages, num_slots=4, max_num_batched_tokens=2048, num_lookahead=5, windows=windows)
    r = request(32768, limit=33000)
    s.add(r)
    held = []
    for _ in range(24):
        finish_pass(s.schedule())
        held.append((pages.num_blocks - 1 - pages.num_free, windows[0].num_blocks - 1 - windows[0].num_free))
    return s, r, held


def test_a_prompt_of_32k_holds_a_window_of_blocks_in_most_layers() -> None:
    """Five of six layers of Gemma 3 have a window of 1024: they hold 1/32 of the blocks, all layers together 1/5."""
    _, _, held = long_prompt(1024)
    assert max(full for full, _ in held) == 32768 // 16 + 1
    assert max(windowed for _, windowed in held) <= (1024 + 2048) // 16 + 2
    full, windowed = held[-1]
    assert windowed == 1024 // 16 + 1
    assert (full + 5 * windowed) / (6 * full) < 0.2


def test_blocks_given_back_are_cleared_in_the_table_and_those_held_are_in_it() -> None:
    """The device's table, built from its entries, equals the blocks that the request holds."""
    pages = PageAllocator(300, 4, sharing=True, lookahead=0)
    window = WindowPages(300, 4, 10)
    s = Scheduler(pages, num_slots=1, max_num_batched_tokens=32, num_lookahead=2, windows=[window])
    r = request(200, limit=400)
    s.add(r)
    table: dict[tuple[int, int], int] = {}
    for _ in range(60):
        plan = s.schedule()
        for number, _, page, block in r.new_entries():
            table[number, page] = block
        lowest = max(0, r.num_computed - 9) // 4
        for page, block in enumerate(r.windows[0].blocks):
            assert table.get((1, page), 0) == block
            assert block or page < lowest, "a row of this pass sees it"
        assert all(table[0, page] == block for page, block in enumerate(r.blocks))
        finish_pass(plan)
    s.finish(r, is_over=False)
    assert window.num_free == 299 and pages.num_free == 299
    window.check_integrity()


def prioritised(arrival: int, priority: int, num_tokens: int = 5) -> Progress:
    ids = list(range(100 * arrival, 100 * arrival + num_tokens))
    spec = RequestSpec(token_ids=ids, params=PARAMS, row_seed=0, limit=64, priority=priority)
    return Progress(id=f"r{arrival}", spec=spec, arrival=arrival, tokens=list(ids))


def test_priority_orders_those_that_wait_and_costs_nobody_a_place() -> None:
    s = scheduler(slots=1)
    running = prioritised(0, 9)
    s.add(running)
    finish_pass(s.schedule())
    for arrival, priority in ((1, 0), (2, 5), (3, -1), (4, 0), (5, 5)):
        s.add(prioritised(arrival, priority))
    assert shape(s.schedule()) == [("r0", 1, 1)], "who runs stays"
    order = []
    for _ in range(5):
        s.finish(s.running[0], is_over=False)
        plan = s.schedule()
        order += [rows.request.id for rows in plan.rows]
        finish_pass(plan)
    assert order == ["r3", "r1", "r4", "r2", "r5"]


def test_priority_holds_after_everybody_was_computed_again() -> None:
    s = scheduler(slots=4)
    for arrival, priority in ((0, 3), (1, 1), (2, 2)):
        s.add(prioritised(arrival, priority))
    finish_pass(s.schedule())
    s.recompute_all(keep_cache=False)
    assert [r.id for r in s.waiting] == ["r1", "r2", "r0"]
    s.isolate([s.waiting[2]])
    s.add(prioritised(3, 0))
    s.rejoin()
    assert [r.id for r in s.waiting] == ["r3", "r1", "r2", "r0"]


def test_choices_of_a_prompt_wait_for_its_pages() -> None:
    """Requests queued after them do not wait, and neither do they if the prompt has no full page."""
    s = scheduler(budget=32)
    first, other = request(9, 0), request(9, 3, start=100)
    choices = [Progress(id=f"r{i}", spec=first.spec, arrival=i, tokens=list(first.tokens)) for i in (1, 2)]
    for one in (first, *choices, other):
        s.add(one)
    plan = s.schedule()
    assert shape(plan) == [("r0", 9, 1), ("r3", 9, 1)]
    finish_pass(plan)
    assert shape(s.schedule()) == [("r0", 1, 1), ("r3", 1, 1), ("r1", 1, 1), ("r2", 1, 1)]
    assert [one.num_cached for one in choices] == [8, 8]
    s = scheduler(budget=32)
    first = request(4, 0)
    s.add(first)
    s.add(Progress(id="r1", spec=first.spec, arrival=1, tokens=list(first.tokens)))
    assert shape(s.schedule()) == [("r0", 4, 1), ("r1", 4, 1)], "it has no page that another could take"


def test_choices_do_not_wait_for_one_that_has_left() -> None:
    s = scheduler(budget=8)
    first = request(20, 0)
    second = Progress(id="r1", spec=first.spec, arrival=1, tokens=list(first.tokens))
    s.add(first)
    s.add(second)
    finish_pass(s.schedule())
    s.finish(first, is_over=False)
    assert shape(s.schedule()) == [("r1", 8, 0)]


def test_an_item_that_is_computed_whole_ends_a_pass_that_it_overfills() -> None:
    """No request is admitted after it: the rest of the budget is negative."""
    s = scheduler(budget=8)
    for arrival in range(3):
        one = request(30, arrival, start=100 * arrival)
        items = (Item(bytes([arrival]) * 32, 4, 20, is_whole=True),)
        s.add(replace(one, spec=replace(one.spec, items=items)))
    passes = []
    for _ in range(7):
        plan = s.schedule()
        passes.append(shape(plan))
        finish_pass(plan)
    assert all(num_rows > 0 for plan in passes for _, num_rows, _ in plan)
    assert passes[:2] == [[("r0", 4, 0), ("r1", 4, 0)], [("r0", 20, 0)]]
    assert sum(num_rows for plan in passes for _, num_rows, _ in plan) >= 90
