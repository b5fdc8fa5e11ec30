"""The profile at an engine's start: what is measured, in which order, and what is kept on disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import assets
from draftproof.engine import profile
from draftproof.engine.costs import GUESSED_DRAFT, ROW_SIZES, Curve, DraftCosts, StepCosts, levels_of
from draftproof.engine.interface import StepSize
from draftproof.engine.profile import IN_A_ROW, IN_A_ROW_BETWEEN, ROUNDS, SETTLING
from draftproof.runtime.graphs import OFTEN

LEVELS = (0, 1, 3, 5)


class FakeRunner:
    """Steps of 1 ms plus 0.1 ms per row, and 0.2 ms per draft; each run advances a fake clock, `now`."""

    on_device, costs_alike, max_model_len = True, False, 1000

    def __init__(self, buckets: tuple[int, ...] = (), max_num_seqs: int = 16, slowness: float = 1.0) -> None:
        self.buckets, self.max_num_seqs, self.slowness = buckets, max_num_seqs, slowness
        self.runs: list[StepSize] = []
        self.prepared: list[int] = []
        self.most_prepared = 1000
        self.now = 0.0
        self.disturbed = 0.0  # two runs in three take this share longer

    def measure(self, size: StepSize) -> tuple[float, float]:
        num_requests, num_verified, num_drafts, context = size
        self.runs.append(size)
        is_first = self.runs.count(self.runs[-1]) < OFTEN
        target = 1e-3 + 1e-4 * num_requests * (1 + num_verified)
        target += (1e-6 + 1e-7 * num_verified) * context * num_requests
        draft = 2e-4 * num_drafts if self.on_device else 0.0
        target, draft = (target * self.slowness, draft * self.slowness) if not is_first else (9.0, 9.0)
        if len(self.runs) % 3:
            target, draft = target * (1.0 + self.disturbed), draft * (1.0 + self.disturbed)
        self.now += 0.001
        return (target + draft, 0.0) if self.buckets else (target, draft)

    def prompt_seconds(self, num_rows: int) -> float:
        return 3e-5 * num_rows * self.slowness

    def prepare_rows(self, num_rows: int) -> bool:
        self.prepared.append(num_rows)
        return num_rows < self.most_prepared


@pytest.mark.parametrize("buckets", [(), (1, 2, 4)])
def test_many_drafts_take_a_lookup_as_long_as_few(buckets: tuple[int, ...]) -> None:
    """What follows a pass in which all are verified may take longer. Captured steps are measured as they are."""
    runner, costs = FakeRunner(buckets), StepCosts(LEVELS, buckets)
    runner.costs_alike = True
    profile.measure(runner, costs, clock=lambda: runner.now)
    for num_requests in (1, 4):
        assert costs.draft.at(num_requests, 1) == pytest.approx(2e-4)
        assert costs.draft.at(num_requests, 5) == pytest.approx(1e-3 if buckets else 2e-4)


@pytest.mark.parametrize("buckets", [(), (1, 2, 4, 8, 16)])
def test_what_was_measured_is_what_is_expected(buckets: tuple[int, ...]) -> None:
    runner = FakeRunner(buckets)
    costs = StepCosts(LEVELS, buckets)
    profile.measure(runner, costs, clock=lambda: runner.now)
    for num_requests in (1, 4, 16):
        for k in LEVELS:
            seconds = 1e-3 + 1e-4 * num_requests * (1 + k) + 2e-4 * k
            for context in (0, 700, 20000):
                keys = (1e-6 + 1e-7 * k) * context
                found = costs.step(num_requests, num_requests * (1 + k), k, context)
                assert found == pytest.approx(seconds + keys)
    assert costs.prompt_row_seconds == pytest.approx(3e-5)


@pytest.mark.parametrize("slowness", [1.0, 0.7, 1.5])
def test_the_largest_passes_take_what_others_do_whenever_they_are_measured(
    slowness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`slowness`: of the machine from then on, when all other sizes were measured."""
    runner, costs = FakeRunner(max_num_seqs=64), StepCosts(LEVELS)
    larger = profile._larger

    def slowed(*given: Any) -> list[StepSize]:
        runner.slowness = slowness
        return larger(*given)

    monkeypatch.setattr(profile, "_larger", slowed)
    profile.measure(runner, costs, clock=lambda: runner.now)
    most = 64 * (1 + LEVELS[-1])
    assert most in costs.target.points and most > profile.MOST_ROWS
    assert costs.target.at(most) == pytest.approx(1e-3 + 1e-4 * most)


def test_what_a_row_reads_is_measured_with_few_tokens_and_with_many() -> None:
    """With many they are in no cache."""
    runner, costs = FakeRunner(), StepCosts(LEVELS)
    measure = runner.measure

    def cold(size: StepSize) -> tuple[float, float]:
        target, draft = measure(size)
        return target, draft + 1e-6 * size.num_drafts * max(0, size.num_requests * size.context - 2000)

    runner.measure = cold  # type: ignore[method-assign]
    profile.measure(runner, costs, clock=lambda: runner.now)
    each = {r: costs.ragged(r, r * 256)(r * 2, 1) - costs.ragged(r, 0)(r * 2, 1) for r in (4, 16)}
    assert each[4] == pytest.approx(1.1e-6 * 1024)
    assert each[16] == pytest.approx(1.1e-6 * 4096 + 1e-6 * 2096)


def test_what_many_requests_read_may_seem_to_take_no_time() -> None:
    """Then a row takes what it takes with few."""
    runner, costs = FakeRunner(), StepCosts(LEVELS)
    measure = runner.measure

    def warm(size: StepSize) -> tuple[float, float]:
        is_warm = size.num_requests == 16 and size.num_verified > 0
        return measure(size._replace(context=0)) if is_warm else measure(size)

    runner.measure = warm  # type: ignore[method-assign]
    profile.measure(runner, costs, clock=lambda: runner.now)
    few = costs.context_rows.at(1024)
    assert few == pytest.approx(1e-7 * 1024) and costs.context_rows.at(4096) == few


def test_a_slow_machine_measures_what_it_cannot_do_without() -> None:
    runner = FakeRunner(slowness=100)
    clock = iter(range(1000))
    costs = StepCosts(LEVELS)
    profile.measure(runner, costs, clock=lambda: float(next(clock)))
    assert costs.prompt_row_seconds == pytest.approx(3e-3)
    assert {size.num_requests for size in runner.runs[3:]} == {1, 4, 16} and len(runner.runs) <= 97
    assert StepSize(1, 0, 0, profile.EACH_CONTEXT) in runner.runs, (
        "four with as many tokens in all take longer"
    )
    assert {size.num_drafts for size in runner.runs if size.num_requests == 16} == {0, LEVELS[1]}
    assert {size.num_drafts for size in runner.runs} == set(LEVELS)


def test_a_slow_machine_measures_all_captured_steps_of_the_most_requests() -> None:
    runner = FakeRunner((1, 2, 4, 8, 16))
    clock = iter(range(1000))
    profile.measure(runner, StepCosts(LEVELS, runner.buckets), clock=lambda: float(next(clock)))
    assert {size.num_drafts for size in runner.runs if size.num_requests == 16} == set(LEVELS)
    assert not {2, 8} & {size.num_requests for size in runner.runs}


def slow_down(runner: FakeRunner, is_slow: Callable[[StepSize], bool], seconds: float) -> None:
    """Have each run advance the clock by so much more, and some seem to take twice as long."""
    measure = runner.measure

    def slowed(size: StepSize) -> tuple[float, float]:
        target, draft = measure(size)
        runner.now += seconds
        return (2 * target, 2 * draft) if is_slow(size) else (target, draft)

    runner.measure = slowed  # type: ignore[method-assign]


def test_one_requests_steps_are_measured_again_at_the_end() -> None:
    """They come first, before the machine has settled: here each run of the first 0.5 s takes twice as long."""
    runner = FakeRunner()
    slow_down(runner, lambda size: runner.now <= 0.5, seconds=0.03)
    costs = StepCosts(LEVELS)
    profile.measure(runner, costs, clock=lambda: runner.now)
    assert costs.step(1, 1, 0) == pytest.approx(1.1e-3)


def test_a_slow_phase_does_not_decide_how_much_longer_many_requests_with_drafts_take() -> None:
    """Here their runs of the first round take twice as long; then they take turns with those without drafts."""
    runner = FakeRunner()

    def is_slow(size: StepSize) -> bool:
        return size.num_requests == 16 and size.num_drafts > 0 and runner.runs.count(size) <= OFTEN + 2

    slow_down(runner, is_slow, seconds=0.04)
    costs = StepCosts(LEVELS)
    profile.measure(runner, costs, clock=lambda: runner.now)
    assert runner.now > 3.0 and costs.step(16, 32, 1) == pytest.approx(1e-3 + 32e-4 + 2e-4)


@pytest.mark.parametrize("seconds", [0.004, 0.025, 0.05, 0.1])
@pytest.mark.parametrize("captured", [False, True])
def test_sizes_that_decide_whether_drafts_pay_are_measured_again(captured: bool, seconds: float) -> None:
    """`seconds`: of each run. Those between come without drafts first, so that they need not settle each; whoever takes
    too long is left out, many drafts for the most requests first."""
    few = [StepSize(2, 0, 0), StepSize(4, 0, 0), StepSize(4, 0, 0, 256), StepSize(4, 1, 1), StepSize(8, 1, 1)]
    others = [StepSize(2, 3, 3), StepSize(4, 5, 5), StepSize(4, 5, 5, 256)]
    one, most = (
        [StepSize(1, 0, 0), StepSize(1, 5, 5)],
        [StepSize(16, 0, 0), StepSize(16, 1, 1), StepSize(16, 5, 5)],
    )
    found = {size: [(seconds, 0.0)] for size in [*one, few[3], *others, *few, *most]}
    compared = [alike for alike, _ in profile._compared(found, LEVELS[1:2], captured=captured)]
    assert compared.pop(0) == one
    if seconds < 0.1:
        assert compared.pop() == (most if seconds < 0.03 else most[:2])
    assert [set(alike) for alike in compared] == ([set(few)] if not captured and seconds < 0.01 else [])
    for alike in compared:
        assert [size.num_drafts for size in alike] == [0, 0, 0, 1, 1]


def test_of_requests_measured_with_the_most_drafts_alone_only_plain_steps_take_turns() -> None:
    """Where time was up after the indispensable sizes."""
    plain, dear = StepSize(4, 0, 0), StepSize(4, 5, 5)
    found = {size: [(1e-3, 0.0)] for size in (StepSize(1, 0, 0), plain, dear, StepSize(16, 0, 0))}
    assert list(profile._compared(found, LEVELS[1:2], captured=False))[1] == ([plain], IN_A_ROW_BETWEEN)


def test_plain_steps_measured_after_others_settle_first() -> None:
    """Where sizes are measured again: those without drafts after one with drafts, and those with context."""
    runner = FakeRunner()
    alike = [StepSize(2, 0, 0), StepSize(4, 0, 0), StepSize(4, 0, 0, 256), StepSize(2, 1, 1)]
    found = {size: list[tuple[float, float]]() for size in alike}
    profile._take_turns(runner, alike, found, 2, lambda: runner.now)
    num_rounds, settled = ROUNDS * IN_A_ROW // 2, SETTLING + 2
    order = [(size, len(list(runs))) for size, runs in itertools.groupby(runner.runs)]
    assert order == list(zip(alike, [settled, 2, settled, 2], strict=True)) * num_rounds
    assert {len(runs) for runs in found.values()} == {2 * num_rounds}


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_the_largest_steps_are_measured_unless_they_take_long(slowness: float) -> None:
    runner = FakeRunner(max_num_seqs=64, slowness=slowness)
    profile.measure(runner, StepCosts(LEVELS), clock=lambda: runner.now)
    assert (StepSize(64, 5, 5) in runner.runs) == (slowness == 1.0), "384 rows: 0.04 or 0.12 s"


def test_a_chain_s_lookups_are_measured_alone_as_far_as_the_time_allows() -> None:
    asked = list[int]()

    class Lookups(FakeRunner):
        def lookup_seconds(self, num_requests: int) -> float:
            asked.append(num_requests)
            self.now += 1e-3 * num_requests
            return 9.0 if asked.count(num_requests) <= OFTEN else 1e-5 * num_requests

    runner, costs = Lookups(max_num_seqs=16), StepCosts(LEVELS)
    costs.target = Curve({1: 2e-3, 64: 128e-3})
    found = profile.lookup_costs(runner, costs, clock=lambda: runner.now)
    assert found.at(4, 16) == pytest.approx(4e-5) and set(asked) == {1, 2, 4, 8, 16}
    asked.clear()
    costs.target = Curve({1: 20e-3, 64: 1.28})
    found = profile.lookup_costs(runner, costs, clock=lambda: runner.now)
    assert set(asked) == {1, 2} and found.at(16, 16) == pytest.approx(16e-5), "0.14 s and 0.28 s; then 0.56"
    runner.on_device = False
    assert profile.lookup_costs(runner, costs) == DraftCosts(), "nobody can time them"


def test_what_thinks_on_the_host_is_not_measured() -> None:
    runner = FakeRunner()
    runner.on_device = False
    costs = StepCosts(LEVELS)
    profile.measure(runner, costs, clock=lambda: runner.now)
    assert not costs.draft.by_requests and costs.step(1, 4, 3) == pytest.approx(1.4e-3 + GUESSED_DRAFT)


def test_more_rows_never_seem_to_take_less() -> None:
    runner = FakeRunner()
    measure = runner.measure
    runner.measure = lambda size: (5e-3, 0.0) if size == (1, 0, 0, 0) else measure(size)  # type: ignore[method-assign]
    costs = StepCosts(LEVELS)
    profile.measure(runner, costs, clock=lambda: runner.now)
    assert costs.target.at(1) == costs.target.at(2)


def test_a_profile_is_kept_for_each_pair_and_machine(tmp_path: Path) -> None:
    first = FakeRunner()
    costs = profile.costs_of(first, LEVELS, {"pair": 1}, tmp_path)
    again = FakeRunner(slowness=3)
    assert profile.costs_of(again, LEVELS, {"pair": 1}, tmp_path).as_json() == costs.as_json()
    assert len(again.runs) == OFTEN * 6 * len(LEVELS) < len(first.runs), "steps of one request are recorded"
    assert {size.num_requests for size in again.runs} == {1}
    assert again.prepared == [n for n in ROW_SIZES if n <= 16 * 6] and not FakeRunner((1, 2)).prepared
    few = FakeRunner(max_num_seqs=3)
    profile.costs_of(few, LEVELS, {"pair": 1}, tmp_path)
    assert few.prepared == [*range(1, 17), 18], "steps of three requests have no more rows"
    few.most_prepared = 4
    profile.costs_of(few, LEVELS, {"pair": 1}, tmp_path)
    assert few.prepared[17:] == [1, 2, 3, 4], "there is no memory for more"
    for other in (lambda: ({"pair": 2}, LEVELS), lambda: ({"pair": 1}, (0, 5))):
        identity, levels = other()
        found = profile.costs_of(FakeRunner(slowness=3), levels, identity, tmp_path)
        assert found.step(1, 1, 0) == pytest.approx(3 * costs.step(1, 1, 0))


def test_what_was_measured_on_a_busy_machine_does_not_last(tmp_path: Path) -> None:
    """Each engine measures again until one profile is undisturbed; meanwhile the least disturbed one is kept."""

    def engine(slowness: float, disturbed: float) -> tuple[float, int]:
        runner = FakeRunner(slowness=slowness)
        runner.disturbed = disturbed
        return profile.costs_of(runner, LEVELS, {}, tmp_path).plain(1), len(runner.runs)

    (calm, few), (busy, many) = engine(1.0, 0.1), engine(1.0, 0.1)
    assert calm == busy and many < few, "usual noise is none"
    (tmp_path / "step-costs.json").unlink()
    (first, _), (busier, num_again), (second, _) = engine(1.4, 2.0), engine(2.0, 4.0), engine(1.2, 1.0)
    assert first > 1.3 * calm and busier == first and num_again == few
    assert calm < second < first, "less disturbed than before"
    found, _ = engine(1.0, 0.1)
    assert found == calm
    assert engine(3.0, 0.0) == (calm, many)


def test_a_machine_too_busy_to_measure_twice_is_known_to_be() -> None:
    runner, costs = FakeRunner(), StepCosts(LEVELS)
    runner.disturbed = 4.0
    clock = iter(range(1000))
    profile.measure(runner, costs, clock=lambda: float(next(clock)))
    assert costs.spread > profile.MOST_SPREAD


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("where", ["target", "draft", "context_rows", "spread"])
def test_impossible_numbers_are_measured_again(tmp_path: Path, where: str, number: float) -> None:
    good = profile.costs_of(FakeRunner(), LEVELS, {}, tmp_path).as_json()
    file = tmp_path / "step-costs.json"
    content = json.loads(file.read_text())
    (key,) = content
    spoilt = {"target": {"1": number}, "draft": {"1": {"1": number}}, "context_rows": {"1": number}}
    spoilt["spread"] = number
    file.write_text(json.dumps({key: {**good, where: spoilt[where]}}))
    found = profile.costs_of(FakeRunner(), LEVELS, {}, tmp_path).as_json()
    assert found == good or (where, number) == ("draft", -1.0), (
        "one graph may seem to take less than its parts"
    )


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "\x00"])
def test_a_broken_file_is_measured_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "step-costs.json").write_text(content)
    assert profile.costs_of(FakeRunner(), LEVELS, {}, tmp_path).target.points


def test_levels_are_close_together_where_one_more_makes_a_difference() -> None:
    assert profile.levels_up_to(1) == (0, 1)
    assert profile.levels_up_to(7) == (0, 1, 2, 3, 5, 7)
    assert profile.levels_up_to(16) == (0, 1, 2, 3, 5, 8, 12, 16)
    assert profile.levels_up_to(7, "cuda") == (0, 1, 3, 5, 7)


def test_large_steps_are_captured_for_few_drafts() -> None:
    levels = profile.levels_up_to(16, "cuda")
    assert levels_of(1, levels) == levels == (0, 1, 3, 5, 8, 16)
    assert levels_of(64, levels) == (0, 1, 3) and levels_of(256, levels) == (0, 1)
    assert levels_of(256, (7,)) == (7,), "a fixed number is the user's"
    costs = StepCosts(levels, (8, 64))
    assert costs.levels_for(3) == levels and costs.levels_for(9) == (0, 1, 3)


def test_an_engine_measures_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftproof import LLM, assets
    from draftproof.engine.auto_policy import AutoPolicy

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings: dict[str, Any] = {"native": False, "max_num_seqs": 2, "max_model_len": 64}
    with LLM(speculative_config={"model": str(assets.path("tiny-eagle3"))}, **settings) as llm:
        policy = llm.engine.policy
        assert isinstance(policy, AutoPolicy)
        assert {1, 2, 6} <= policy.costs.target.points.keys()
        assert set(policy.costs.draft.by_requests[1].points) == {1, 2, 3, 5}
        assert [p.num_requests for p in llm.stats.predictions] == [1, 2]
        before = llm.generate("def f(", use_tqdm=False)[0].outputs[0].token_ids
    assert (tmp_path / "draftproof" / "step-costs.json").is_file()
    with LLM(**settings) as plain:
        assert plain.generate("def f(", use_tqdm=False)[0].outputs[0].token_ids == before


def test_keys_that_are_read_lie_apart_as_requests_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In unused slots and blocks, which are left as they were."""
    from draftproof import LLM, assets
    from draftproof.engine.measuring import StepMeter
    from draftproof.engine.runner import ModelRunner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tables, drafted, measured = [], list[bool](), StepMeter._measured

    def watched(self: StepMeter, scheduled: Any, *given: Any) -> tuple[float, float]:
        if scheduled[0].start:
            cache, state = self._runner.cache, self._runner.state
            slots, block = [s.slot for s in scheduled], len(cache.layers[0].k)
            num_pages = -(-scheduled[0].start // 16)
            tables.append((block, cache.layers[0].block_table_SB[slots, :num_pages].flatten().tolist()))
            assert state.slots.computed_S[slots].unique().tolist() == [scheduled[0].start]
        self._runner.draft_cache.layers[0].k.zero_()
        found = measured(self, scheduled, *given)
        if scheduled[0].start and scheduled[0].num_drafts:
            drafted.append(bool(self._runner.draft_cache.layers[0].k[1:].any()))
        return found

    monkeypatch.setattr(StepMeter, "_measured", watched)
    settings: dict[str, Any] = {"native": False, "max_num_seqs": 2, "max_model_len": 64}
    with LLM(speculative_config={"model": str(assets.path("tiny-eagle3"))}, **settings) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner) and tables
        for num_blocks, blocks in tables:
            assert len(set(blocks)) == len(blocks) and min(blocks) > 0 and max(blocks) < num_blocks
        assert drafted and all(drafted), "the drafter, too, is where keys are"
        slots = runner.state.slots
        for left in (runner.state.block_tables_GSB, slots.computed_S, slots.length_S, slots.limit_S):
            assert not left.any()
        assert not slots.draft_count_S.any()


class Writes(TorchDispatchMode):
    """The largest number of elements that an operator of torch writes into the memory of `watched`."""

    def __init__(self, watched: Tensor) -> None:
        super().__init__()
        self.memory, self.most = watched.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        is_written = target is not None and func._schema.is_mutable
        if is_written and target.untyped_storage().data_ptr() == self.memory:
            self.most = max(self.most, target.numel())
        return func(*args, **(kwargs or {}))


def test_no_table_of_all_slots_is_written_between_measurements() -> None:
    """An operator of torch on more than 32768 elements wakes threads that take a core from the next pass."""
    from draftproof import LLM
    from draftproof.engine.measuring import StepMeter

    with LLM(max_num_seqs=8, max_model_len=256) as llm:
        meter, tables_GSB = StepMeter(llm.engine.runner), llm.engine.runner.state.block_tables_GSB
        num_groups, _, num_pages = tables_GSB.shape
        with Writes(tables_GSB) as writes:
            for context in (0, 128):
                meter.measure(StepSize(8, 0, 0, context))
        assert 0 < writes.most <= num_groups * num_pages
        assert not tables_GSB[:, :8].any()


@pytest.mark.parametrize(
    ("config", "is_shown"),
    [({"method": "ngram"}, False), ({"model": str(assets.path("tiny-eagle3"))}, True)],
)
def test_only_a_drafter_with_keys_takes_time_for_a_prompt(config: dict[str, Any], is_shown: bool) -> None:
    from draftproof import LLM
    from draftproof.engine.measuring import StepMeter

    with LLM(max_num_seqs=2, max_model_len=256, speculative_config=config) as llm:
        runner = llm.engine.runner
        assert (StepMeter(runner).prompt_seconds(32) > 0) == is_shown
        assert not runner.state.slots.computed_S.any()


def test_beyond_the_largest_size_its_neighbour_s_noise_does_not_count() -> None:
    curve = Curve({64: 12.0, 128: 24.0, 136: 24.1})
    assert curve.at(128) == 24.0 and curve.at(132) == pytest.approx(24.05)
    assert curve.at(336) == pytest.approx(24.1 + 200 * (24.1 - 12.0) / (136 - 64))
    assert curve.slope_beyond == pytest.approx(12.1 / 72)
    assert Curve({64: 12.0}).at(128) == 12.0 and Curve({64: 12.0, 128: 11.0}).at(256) == 11.0


def test_one_size_that_was_disturbed_does_not_make_larger_ones_free() -> None:
    curve = Curve({1: 1.4, 32: 7.1, 36: 7.7, 48: 9.2, 52: 10.7, 64: 12.3, 68: 23.5, 128: 23.5, 136: 23.5})
    assert curve.slope_beyond == pytest.approx(0.158, abs=0.01)
    assert curve.at(1088) == pytest.approx(23.5 + 952 * curve.slope_beyond)
    assert Curve({4: 1.0}).slope_beyond == 0.0 and Curve({1: 1.0, 4: 2.5}).slope_beyond == 0.5
    curve.set(136, 30.0)
    assert curve.slope_beyond == pytest.approx(19.3 / 84), "it is made anew"
