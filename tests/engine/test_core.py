"""The host half alone, against a fake runner without weights."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from draftproof import SamplingParams
from draftproof.cache.pages import PageAllocator
from draftproof.engine.core import EngineCore
from draftproof.engine.costs import StepOutcome
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.drafting import (
    AFTER_PROMPTS,
    LONG_AFTER,
    MOST_LEFT_OUT,
    NUM_AVERAGED,
    ROUNDS_TOGETHER,
    SLOWED_SECONDS,
    Repeat,
    StepRun,
    Wanted,
)
from draftproof.engine.in_flight import InFlightStep
from draftproof.engine.interface import (
    NO_NUMBER,
    DeviceFaultError,
    DrafterHealth,
    LogprobRow,
    RequestSpec,
    RowResult,
    ScheduledRequest,
    StepInput,
)
from draftproof.engine.kept_choice import PLAIN_EVERY
from draftproof.engine.policy import FixedPolicy
from draftproof.engine.progress import Progress
from draftproof.engine.scheduler import PlannedRows, Scheduler
from tests.engine.poison import poison


class Pending:
    target_seconds = draft_seconds = 0.0
    draft_state_lost = is_warming = False
    undrafted_slots = ()

    def __init__(self, results: list[RowResult]) -> None:
        self.results = results
        self.failure: Exception | None = None

    def wait(self) -> list[RowResult]:
        if self.failure is not None:
            raise self.failure
        return self.results


class FakeRunner:
    """Its next token is the length of the text so far; half of its drafts are right. `before` sees each step first."""

    vocab_size = max_model_len = 1000
    drafter_has_kv = drafter_may_rest = True
    lookups, is_divided = frozenset({0}), False
    drafter_estimates = drafter_stops = False
    most_forced = 0
    drafter_names = ("first", "second")

    def __init__(self, num_drafts: int = 0, async_depth: int = 0) -> None:
        self.num_drafts, self.async_depth, self.known = num_drafts, async_depth, dict[int, int]()
        self.steps: list[StepInput] = []
        self.before: Callable[[StepInput], Any] = lambda step: None
        self.kept_drafts: list[tuple[int, int]] = []
        self.is_open = True

    def run(self, step: StepInput) -> Pending:
        self.steps.append(step)
        self.known |= {a.slot: len(a.token_ids) for a in step.admitted}
        self.before(step)
        return Pending([self.row(s) for s in step.scheduled])

    def row(self, s: ScheduledRequest) -> RowResult:
        num = (s.num_sampled + 1) // 2
        first, self.known[s.slot] = self.known[s.slot], self.known[s.slot] + num
        return RowResult(list(range(first, first + num)), max(0, s.num_sampled - 1), s.num_drafts)

    def drafter_health(self) -> DrafterHealth:
        return DrafterHealth()

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        return list(range(num_drafts))

    def keep_drafts(self, slot: int, num_drafts: int) -> None:
        self.kept_drafts.append((slot, num_drafts))

    def shutdown(self) -> None:
        self.is_open = False


def core(runner: FakeRunner, *, slots: int = 8, blocks: int = 200) -> EngineCore:
    pages = PageAllocator(blocks, 4, sharing=True, lookahead=0)
    scheduler = Scheduler(pages, num_slots=slots, max_num_batched_tokens=32, num_lookahead=runner.num_drafts)
    return EngineCore(runner, scheduler, FixedPolicy(runner.num_drafts))


def spec(num_prompt: int = 5, max_tokens: int = 8, **params: Any) -> RequestSpec:
    given = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return RequestSpec(
        token_ids=[900 + num_prompt] * num_prompt,
        params=given,
        row_seed=0,
        limit=num_prompt + max_tokens,
        stop_ids=frozenset(given.stop_token_ids or ()),
    )


def finish(engine: EngineCore) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    for _ in range(500):
        if not engine.has_work:
            return deltas
        for delta in engine.step():
            deltas.setdefault(delta.id, []).append(delta)
    raise AssertionError("the engine does not come to an end")


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def nothing_left(engine: EngineCore) -> bool:
    pages = engine.scheduler.pages
    return engine.scheduler.is_idle and pages.num_free == pages.num_blocks - 1


def test_the_core_needs_no_torch() -> None:
    code = (
        "import draftproof.engine.core, draftproof.engine.step_vector, sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_requests_run_to_their_ends(num_drafts: int, async_depth: int) -> None:
    runner = FakeRunner(num_drafts, async_depth)
    engine = core(runner, slots=3)
    for number in range(7):
        engine.add_request(f"r{number}", spec(5 + 9 * number, 4 + number))
    deltas = finish(engine)
    for number in range(7):
        first = 5 + 9 * number
        assert ids(deltas[f"r{number}"]) == list(range(first, first + 4 + number))
        assert deltas[f"r{number}"][-1].finish_reason == "length"
    assert nothing_left(engine) and not runner.steps[-1].scheduled, "an idle engine takes its slots back"
    assert (engine.stats.speculation.num_accepted_tokens > 0) == (num_drafts > 0)


def test_preempted_requests_come_back_with_their_tokens() -> None:
    engine = core(FakeRunner(), blocks=12)
    for number in range(3):
        engine.add_request(str(number), spec(8 + number, 20))
    deltas = finish(engine)
    assert engine.stats.num_preemptions > 0
    assert all(ids(deltas[str(n)]) == list(range(8 + n, 28 + n)) for n in range(3))
    assert any(delta.num_preemptions for delta in deltas["2"]) and nothing_left(engine)


def test_a_stop_id_ends_an_output_with_its_id_and_an_end_of_text_without() -> None:
    engine = core(FakeRunner(num_drafts=5))
    engine.add_request("stop", spec(stop_token_ids=[7]))
    engine.add_request("late", spec(stop_token_ids=[7], min_tokens=4))
    ends = finish(engine)
    assert (ids(ends["stop"]), ends["stop"][-1].stop_reason) == ([5, 6, 7], 7)
    assert ids(ends["late"]) == list(range(5, 13)), "7 came before min_tokens"


def test_an_id_may_be_used_again_but_not_twice_at_once() -> None:
    engine = core(FakeRunner())
    engine.add_request("a", spec())
    with pytest.raises(ValueError, match="request_id='a': is running already"):
        engine.add_request("a", spec())
    finish(engine)
    engine.add_request("a", spec())
    assert ids(finish(engine)["a"]) == list(range(5, 13))


def test_an_aborted_request_gives_everything_back_and_says_no_more() -> None:
    runner = FakeRunner(async_depth=1)
    engine = core(runner)
    engine.add_request("a", spec(max_tokens=50))
    engine.add_request("b", spec(6, 50))
    engine.step()
    engine.step()
    engine.abort("a")
    engine.abort("nobody")
    later = finish(engine)
    assert "a" not in later and nothing_left(engine)


ROUNDS: list[list[int]] = [[-1], [5, -1], [5, 6, -1], [6, -1], [5, 6, 7]]


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": [6]}, {"min_tokens": 3}], ids=str)
@pytest.mark.parametrize("tokens", ROUNDS, ids=str)
def test_tokens_that_come_at_once_count_as_those_that_come_one_by_one(
    tokens: list[int], params: dict[str, Any]
) -> None:
    """-1 stands for a row of logits without numbers, which ends the output."""

    class Scripted(FakeRunner):
        def __init__(self, rounds: list[list[int]]) -> None:
            super().__init__(num_drafts=2)
            self.rounds = [[4], *rounds]

        def row(self, s: ScheduledRequest) -> RowResult:
            given = self.rounds.pop(0)
            found = [t for t in given if t >= 0]
            logprobs = [LogprobRow(t, float(t), 1, []) for t in found]
            failure = "" if len(found) == len(given) else NO_NUMBER
            return RowResult(found, len(given) - 1, 2, failure=failure, logprobs=logprobs)

    def after(rounds: list[list[int]]) -> Any:
        engine = core(Scripted(rounds))
        engine.add_request("r", spec(2, 9, logprobs=1, **params))
        deltas: list[TokenDelta] = []
        for _ in range(1 + len(rounds)):
            deltas += engine.step()
        logprobs = [row.logprob for delta in deltas for row in delta.logprobs]
        return ids(deltas), deltas[-1].finish_reason, deltas[-1].error, logprobs

    at_once, one_by_one = after([tokens]), after([[t] for t in tokens])
    assert at_once == one_by_one
    assert len(at_once[3]) == len(at_once[0]) and at_once[1] in (None, "stop", "error")


@pytest.mark.parametrize("async_depth", [0, 1])
def test_a_round_counts_for_the_drafter_whose_drafts_it_verified(async_depth: int) -> None:
    """Drafters take turns, and the second fails whenever the first drafts. The last drafts are never verified."""

    class TakesTurns(FakeRunner):
        num_passes = 0

        def row(self, s: ScheduledRequest) -> RowResult:
            result = super().row(s)
            result.drafter = self.num_passes % 2
            result.drafter_faults = () if result.drafter else (1,)
            result.num_drafted = 1 + result.drafter  # verified in this pass, made by the other drafter
            self.num_passes += 1
            return result

        def drafter_health(self) -> DrafterHealth:
            return DrafterHealth(faults_each=(0, 7))

    engine = core(TakesTurns(num_drafts=3, async_depth=async_depth))
    engine.add_request("r", spec(max_tokens=9))
    deltas = finish(engine)["r"]
    rounds = [d for d in deltas if d.is_round]
    assert len(rounds) > 2 and {d.drafter for d in rounds} == {0, 1}
    assert all(d.num_drafted == 2 - d.drafter for d in rounds)
    assert all(f == 1 for d in deltas for f in d.drafter_faults)
    assert sum(len(d.drafter_faults) for d in deltas) == (len(deltas) + 1) // 2
    first, second = engine.stats.drafters
    for number, counted in enumerate((first, second)):
        own = [d for d in rounds if d.drafter == number]
        assert counted.speculation.num_rounds == len(own) > 0
        assert counted.speculation.num_draft_tokens == sum(d.num_drafted for d in own)
        assert counted.speculation.num_accepted_tokens == sum(d.num_accepted for d in own)
    assert (first.name, first.num_faults, second.name, second.num_faults) == ("first", 0, "second", 7)


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("at", [0, 10])
def test_a_request_that_makes_steps_fail_pays_alone(at: int, async_depth: int) -> None:
    runner = FakeRunner(async_depth=async_depth)
    engine = core(runner)
    for number in range(6):
        engine.add_request(str(number), spec(5 + number))
    runner.before = poison(8, at)
    deltas = finish(engine)
    last = deltas["3"][-1]
    assert last.finish_reason == "error" and "ZeroDivisionError: poisonous" in (last.error or "")
    for number in (0, 1, 2, 4, 5):
        assert ids(deltas[str(number)]) == list(range(5 + number, 13 + number))
    assert nothing_left(engine) and len(runner.steps) < 80


def test_two_that_fail_are_both_found_and_those_who_come_meanwhile_are_served() -> None:
    runner = FakeRunner()
    engine = core(runner)
    first, second = poison(6), poison(9, at=11)
    runner.before = lambda step: (first(step), second(step))
    for number in range(5):
        engine.add_request(str(number), spec(5 + number))
    engine.step()
    engine.add_request("late", spec(30))
    deltas = finish(engine)
    failed = {name for name, found in deltas.items() if found[-1].finish_reason == "error"}
    assert failed == {"1", "4"} and ids(deltas["late"]) == list(range(30, 38)) and nothing_left(engine)


class FailsLater(FakeRunner):
    """Steps for which `before` raises fail only when their results are awaited."""

    def run(self, step: StepInput) -> Pending:
        before, self.before = self.before, lambda step: None
        pending = super().run(step)
        self.before = before
        try:
            before(step)
        except Exception as error:
            pending.failure = error
        return pending


RUNNERS = {"run": FakeRunner, "wait": FailsLater}


@pytest.mark.parametrize("where", RUNNERS)
@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("number", [1, 4])
def test_a_fault_that_does_not_come_again_costs_nobody_anything(
    number: int, async_depth: int, where: str
) -> None:
    runner = RUNNERS[where](num_drafts=2, async_depth=async_depth)
    engine = core(runner)
    for n in range(number):
        engine.add_request(str(n), spec(5 + n))
    faults = [True]

    def before(step: StepInput) -> None:
        if len(step.scheduled) == number and faults:
            faults.pop()
            raise MemoryError("once")

    runner.before = before
    deltas = finish(engine)
    assert all(ids(deltas[str(n)]) == list(range(5 + n, 13 + n)) for n in range(number)) and not faults


@pytest.mark.parametrize("where", RUNNERS)
@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_wherever_faults_surface_those_who_are_to_blame_pay(
    num_drafts: int, async_depth: int, where: str
) -> None:
    """Outputs have several lengths, so that requests end in the failing step, or in the one before it."""
    for poisoned, at in itertools.product(([5], [6, 7], [5, 8]), range(0, 14, 3)):
        runner = RUNNERS[where](num_drafts, async_depth)
        engine = core(runner, slots=3)
        for number in range(4):
            engine.add_request(str(5 + number), spec(5 + number, 1 + number))
        poisons = [poison(num_prompt, at) for num_prompt in poisoned]
        runner.before = lambda step, poisons=poisons: [before(step) for before in poisons]  # type: ignore[misc]
        deltas = finish(engine)
        for number in range(5, 9):
            last = deltas[str(number)][-1]
            assert last.finish_reason == "length" or number in poisoned, (poisoned, at)
            if last.finish_reason == "length":
                assert ids(deltas[str(number)]) == list(range(number, 2 * number - 4))
        assert nothing_left(engine)


@pytest.mark.parametrize("where", RUNNERS)
@pytest.mark.parametrize("async_depth", [0, 1])
def test_pages_of_a_step_that_failed_enter_no_prefix_cache(async_depth: int, where: str) -> None:
    runner = RUNNERS[where](async_depth=async_depth)
    engine = core(runner)
    engine.add_request("a", spec(12))
    runner.before = poison(12)
    assert finish(engine)["a"][-1].finish_reason == "error"
    runner.before = lambda step: None
    engine.add_request("b", spec(12))
    finish(engine)
    assert engine.stats.num_cached_tokens == 0
    engine.add_request("c", spec(12))
    finish(engine)
    assert engine.stats.num_cached_tokens == 8, "while those of a step that went well do"


@pytest.mark.parametrize("where", ["run", "wait"])
def test_a_device_that_fails_ends_the_engine_once_for_everybody(where: str) -> None:
    runner = FakeRunner(async_depth=1)
    engine = core(runner)
    engine.add_request("a", spec())
    engine.add_request("b", spec(6))
    engine.step()

    def dies(*_: object) -> Any:
        raise DeviceFaultError("the GPU failed; start a new process")

    if where == "run":
        runner.before = dies
    else:
        runner.run = lambda step: type("Dead", (Pending,), {"wait": dies})([])  # type: ignore[method-assign]
    deltas = [delta for _ in range(3) for delta in engine.step()]
    assert sorted(d.id for d in deltas if d.finish_reason == "error") == ["a", "b"]
    assert {d.error for d in deltas if d.error} == {
        "the engine has ended: the GPU failed; start a new process"
    }
    with pytest.raises(RuntimeError, match="the engine has ended: the GPU failed"):
        engine.add_request("c", spec())
    assert engine.step() == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "prompt: is empty; give at least one token"),
    ({"token_ids": [7, 1000]}, "prompt: token id 1000 at position 1: ids go from 0 to 999"),
    ({"token_ids": [-1]}, "prompt: token id -1 at position 0"),
    ({"token_ids": [7, True]}, "prompt: token id True at position 1"),
    ({"token_ids": [7.0]}, "prompt: token id 7.0 at position 0"),
    ({"token_ids": "text"}, "prompt='text': must be a list of token ids"),
    ({"token_ids": [7] * 1000}, "prompt: 1000 tokens leave no room for an answer in max_model_len=1000"),
    ({"limit": 0}, "limit=0: must be an integer from 6 to 1000"),
    ({"limit": 5}, "limit=5: must be an integer from 6 to 1000"),
    ({"limit": 1001}, "limit=1001"),
    ({"params": None}, "params=None: must be a SamplingParams"),
    ({"row_seed": None}, "row_seed=None"),
    ({"row_seed": 1 << 63}, "row_seed=9223372036854775808"),
    ({"stop_ids": [7]}, "stop_ids=.*must be a frozenset of token ids"),
    ({"eos_ids": frozenset(["7"])}, "eos_ids=.*must be a frozenset of token ids"),
    ({"bad_words_ids": [[7], [1000]]}, r"bad_words: \[1000\]: must be token ids from 0 to 999"),
    ({"bad_words_ids": [[]]}, "bad_words:"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    ({"prompt_logprobs": 1}, "reads_prefix_cache=True: .*set it to False"),
    ({"params": SamplingParams(allowed_token_ids=[])}, "allowed_token_ids=.*must name at least one id"),
    ({"params": SamplingParams(allowed_token_ids=[0, 1000])}, "allowed_token_ids: id 1000 is not in the voc"),
    ({"params": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias: id -1 is not in the vocabulary"),
    ({"params": SamplingParams(allowed_token_ids=[7]), "bad_words_ids": [[7]]}, "no token is left"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_request_that_cannot_be_computed_is_refused(fields: dict[str, Any], message: str) -> None:
    """Refused by `add_request`, before it is queued."""
    engine, wrong = core(FakeRunner(num_drafts=2)), replace(spec(), **fields)
    engine.add_request("a", spec())
    with pytest.raises(ValueError, match=message):
        engine.add_request("b", wrong)
    assert ids(finish(engine)["a"]) == list(range(5, 13)) and nothing_left(engine)
    with pytest.raises(ValueError, match=message):
        engine.draft(wrong, 2)


def test_after_shutdown_nothing_is_taken() -> None:
    runner = FakeRunner()
    engine = core(runner)
    engine.add_request("a", spec())
    engine.step()
    engine.shutdown()
    assert not runner.is_open and nothing_left(engine) and not engine.has_work
    with pytest.raises(RuntimeError, match="has been shut down"):
        engine.add_request("b", spec())
    with pytest.raises(RuntimeError, match="has been shut down"):
        engine.draft(spec(), 2)
    engine.shutdown()
    engine.drain()
    assert engine.step() == []


def test_a_device_that_fails_while_results_are_drained_ends_the_engine() -> None:
    runner = FailsLater(async_depth=1)
    engine = core(runner)
    engine.add_request("a", spec())

    def dies(step: StepInput) -> None:
        raise DeviceFaultError("the GPU failed; start a new process")

    runner.before = dies
    engine.step()
    engine.drain()
    assert [d.error for d in engine.step()] == ["the engine has ended: the GPU failed; start a new process"]
    assert not engine.has_work


def test_a_device_that_fails_under_draft_ends_the_engine_and_tells_the_caller() -> None:
    runner = FailsLater(num_drafts=2)
    engine = core(runner)

    def dies(step: StepInput) -> None:
        raise DeviceFaultError("the GPU failed; start a new process")

    runner.before = dies
    with pytest.raises(DeviceFaultError, match="the GPU failed"):
        engine.draft(spec(), 2)
    assert engine.error and not engine.has_work


def test_a_fault_while_slots_are_taken_back_hurts_nobody() -> None:
    runner = FakeRunner()
    engine = core(runner)
    engine.add_request("a", spec())

    def before(step: StepInput) -> None:
        if not step.scheduled:
            raise MemoryError("nobody's")

    runner.before = before
    assert ids(finish(engine)["a"]) == list(range(5, 13))
    runner.before = lambda step: None
    engine.add_request("b", spec(6))
    assert ids(finish(engine)["b"]) == list(range(6, 14)) and nothing_left(engine)


class Chosen(FixedPolicy):
    """Asks for `by_length(num_outputs)` drafts for a request with that many output tokens."""

    report_every = 1

    def __init__(self, by_length: Callable[[int], int], drafts_at_start: bool = True) -> None:
        super().__init__(0)
        self.by_length, self.drafts_at_start = by_length, drafts_at_start

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        return [self.by_length(request.num_outputs) for request in asked]

    def num_repeats(self) -> int:
        return 0

    def will_draft(
        self, request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0
    ) -> bool:
        return self.drafts_at_start


def test_at_no_drafts_the_drafter_has_nothing_to_do() -> None:
    """Drafting stops after six tokens: one more step verifies the last drafts, then the drafter is skipped."""
    runner = FakeRunner(3)
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 3 if num_outputs < 6 else 0)
    engine.add_request("a", spec(5, 20))
    (found,) = finish(engine).values()
    assert ids(found) == list(range(5, 25))
    steps = [s for s in runner.steps if s.scheduled]
    without = [s.without_drafter for s in steps]
    assert without == sorted(without) and without.count(True) > 5
    assert all(
        s.num_rows == 1 and not s.num_drafts for step in steps if step.without_drafter for s in step.scheduled
    )
    last = [step for step in steps if not step.without_drafter][-1]
    assert last.scheduled[0].num_rows == 4, "drafts that there are are verified first"


def test_who_missed_the_drafter_is_not_asked_again() -> None:
    runner = FakeRunner(3)
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 0 if num_outputs < 4 else 3)
    engine.add_request("a", spec(5, 20))
    finish(engine)
    assert not any(s.num_drafts for step in runner.steps for s in step.scheduled)
    runner.steps.clear()
    runner.drafter_has_kv = False  # a drafter without keys and values misses nothing
    engine.add_request("b", spec(6, 20))
    finish(engine)
    assert any(s.num_drafts for step in runner.steps for s in step.scheduled)


class Probing(Chosen):
    """Asks for three drafts, but in a probe in its middle for none."""

    is_probing = False
    plain_every = 1

    def __init__(self) -> None:
        super().__init__(lambda num_outputs: 3)
        self.told: list[StepOutcome] = []

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self.is_probing = 6 <= asked[0].num_outputs < 12
        return [0 if self.is_probing else 3] * len(asked)

    def finished(self, step: StepOutcome) -> None:
        if self.is_probing:
            self.told.append(step)


@pytest.mark.parametrize("has_kv", [False, True])
def test_a_drafter_with_keys_and_values_sees_a_probe_and_drafts_on(
    monkeypatch: pytest.MonkeyPatch, has_kv: bool
) -> None:
    """Its time in these steps is not reported; a drafter that misses nothing does not see them."""
    draft_seconds = 1000.0 if has_kv else 0.0
    monkeypatch.setattr(Pending, "draft_seconds", draft_seconds)
    runner = FakeRunner(3)
    runner.drafter_has_kv = has_kv
    engine = core(runner)
    engine.policy = probing = Probing()
    engine.add_request("a", spec(5, 24))
    assert ids(finish(engine)["a"]) == list(range(5, 29))
    steps = [step for step in runner.steps if step.scheduled]
    probes = [step for step in steps if step.scheduled[0].num_rows == 1 and not step.scheduled[0].num_drafts]
    assert len(probes) >= 3 and {step.without_drafter for step in probes} == {not has_kv}
    assert steps[-1].scheduled[0].num_rows > 1, "it drafts on"
    assert all(step.seconds + draft_seconds < 100 for step in probing.told), "the fake takes no time itself"
    assert any(step.is_plain for step in probing.told)


@pytest.mark.parametrize("will_draft", [False, True])
def test_a_prompt_is_shown_to_the_drafter_if_drafts_are_to_follow(will_draft: bool) -> None:
    runner = FakeRunner(3)
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 3 if will_draft else 0, drafts_at_start=will_draft)
    engine.add_request("a", spec(40, 6))  # two chunks
    finish(engine)
    assert [s.without_drafter for s in runner.steps[:2]] == [not will_draft] * 2


@pytest.mark.parametrize("has_kv", [False, True])
def test_whose_prompt_is_not_shown_is_not_asked_for_drafts(has_kv: bool) -> None:
    """A drafter without keys and values misses nothing, so it may be asked although it did not see the prompt."""
    runner = FakeRunner(3)
    runner.drafter_has_kv = has_kv
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 3, drafts_at_start=False)
    engine.add_request("a", spec(5, 20))
    finish(engine)
    assert any(s.num_drafts for step in runner.steps for s in step.scheduled) != has_kv


def test_a_drafter_that_may_not_rest_sees_every_pass() -> None:
    runner = FakeRunner(3)
    runner.drafter_may_rest = False
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 0, drafts_at_start=False)
    engine.add_request("a", spec(80, 6))
    finish(engine)
    assert not any(step.without_drafter for step in runner.steps)


def test_what_would_be_drafted_follows_from_the_whole_prompt() -> None:
    """`draft` shows the drafter the whole prompt, even if the policy would not draft."""
    runner = FakeRunner(4)
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 0, drafts_at_start=False)
    engine.draft(spec(80), 4)
    rows = [s.num_rows for step in runner.steps if not step.without_drafter for s in step.scheduled]
    assert sum(rows) == 79


def test_a_hole_begins_where_the_first_row_was_lost() -> None:
    """The start of a step that was launched ahead is an upper bound: fewer drafts were accepted than it assumed."""
    runner = FakeRunner(7, async_depth=1)
    results = iter(range(100))
    answer = runner.row

    def row(s: ScheduledRequest) -> RowResult:
        result = answer(s)
        if s.num_sampled > 1:  # no draft is right
            runner.known[s.slot] = result.token_ids[0] + 1
            result.token_ids = result.token_ids[:1]
        result.draft_state_lost = next(results) == 3
        return result

    runner.row = row  # type: ignore[method-assign]
    engine = core(runner)
    engine.add_request("a", spec(5, 60))
    for _ in range(6):
        engine.step()
    (request,) = engine.scheduler.running
    lost = [step.scheduled[0] for step in runner.steps if step.scheduled][3]
    assert request.draft_hole == 5 + 3 - 1 < lost.start, "5 tokens, and one more with each step before"


class Told(FixedPolicy):
    """Records what the policy is told about rounds."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self.rounds: list[tuple[int, int]] = []
        self.given: list[tuple[int, int]] = []

    def proposed(self, request: Progress, num_asked: int, num_drafts: int, *, is_model: bool) -> None:
        self.given.append((num_asked, num_drafts))

    def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
        self.rounds.append((num_drafted, num_accepted))


def test_what_lies_behind_the_end_of_an_output_is_neither_hit_nor_miss() -> None:
    """7 drafts, half of them right; the second token of the first round ends the output."""
    engine = core(FakeRunner(7))
    engine.policy = told = Told(7)
    engine.add_request("a", spec(5, 60, stop_token_ids=[7]))
    assert ids(finish(engine)["a"]) == [5, 6, 7]
    assert told.rounds == [(2, 2)]


@pytest.mark.parametrize(
    ("asked", "proposed", "made"), [((8, 8), (2, 5), 5), ((8, 0), (0, 0), 1), ((0, 0), (0, 0), 0)]
)
def test_a_step_took_the_time_of_the_drafts_that_were_made(
    asked: tuple[int, int], proposed: tuple[int, int], made: int
) -> None:
    """Where the drafter stops by itself, which makes a first draft even for a request that has no room for it."""
    scheduled = [ScheduledRequest(slot, 10, 1, 1, number) for slot, number in enumerate(asked)]
    results = [RowResult([1], 0, number) for number in proposed]
    for stops, expected in ((True, made), (False, max(asked))):
        flight = InFlightStep([], scheduled, Pending(results), 0.0, stops=stops)
        step = flight.outcome(results, 1.0, 0.1, 0.1, 1.0, is_typical=True)
        assert (step.num_drafts, step.is_plain) == (expected, not any(asked))


@pytest.mark.parametrize("every", [1, 8])
def test_rounds_are_told_of_together_where_steps_are(every: int) -> None:
    """All of them, in their order, some at the request's end; none waits where each step is told of."""
    heard = list[int]()

    class Hearing(Told):
        report_every = every

        def verified(self, request: Progress, num_drafted: int, num_accepted: int, *, is_model: bool) -> None:
            heard.append(engine.stats.num_steps)
            super().verified(request, num_drafted, num_accepted, is_model=is_model)

    engine = core(FakeRunner(3))
    engine.policy = told = Hearing(3)
    engine.add_request("a", spec(5, 31))
    finish(engine)
    assert len(told.rounds) > 2 * ROUNDS_TOGETHER + 1 and len(told.given) >= len(told.rounds)
    sizes = [len(list(same)) for _, same in itertools.groupby(heard)]
    assert sizes == [1] * len(sizes) if every == 1 else set(sizes[1:-1]) == {ROUNDS_TOGETHER}


def test_rounds_that_the_limit_leaves_no_drafts_say_nothing_of_the_drafter() -> None:
    engine = core(FakeRunner(7))
    engine.policy = told = Told(7)
    engine.add_request("a", spec(5, 6))
    finish(engine)
    assert told.given == [(4, 7), (0, 7)][:1], "one token is out, one follows from the round itself"


def test_who_waits_counts_among_those_who_will_decode_soon() -> None:
    engine, told = core(FakeRunner(3), slots=4), []

    def will_draft(request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0) -> bool:
        told.append(num_others)
        return True

    engine.policy.will_draft = will_draft  # type: ignore[method-assign]
    for number in range(3):
        engine.add_request(str(number), spec(30 + number))  # a pass has room for one
    engine.step()
    assert set(told) == {2}
    for number in range(3, 9):
        engine.add_request(str(number), spec(30 + number))
    told.clear()
    while not told:
        engine.step()
    assert set(told) == {3}


def test_a_policy_is_told_how_many_decode_beside_a_new_prompt() -> None:
    engine, told = core(FakeRunner(3), slots=4), []

    def will_draft(request: Progress, num_others: int, num_lost: int = 0, num_decoding: int = 0) -> bool:
        told.append((request.id, num_others, num_decoding))
        return True

    engine.policy.will_draft = will_draft  # type: ignore[method-assign]
    engine.add_request("a", spec(4, 60))
    while not any(request.num_outputs for request in engine.scheduler.running):
        engine.step()
    assert set(told) == {("a", 0, 0)}
    told.clear()
    engine.add_request("b", spec(4, 60))
    while not told:
        engine.step()
    assert set(told) == {("b", 1, 1)}


def test_the_policy_hears_of_decoding_steps() -> None:
    heard: list[StepOutcome] = []
    runner = FakeRunner(3)
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    for number in range(2):
        engine.add_request(str(number), spec(40 + number, 12))
    finish(engine)
    assert heard and all(step.num_rows <= 8 and step.seconds >= step.host_seconds >= 0 for step in heard)
    assert max(step.num_requests for step in heard) == 2 and max(step.num_tokens for step in heard) == 4


def test_the_time_that_a_policy_takes_to_choose_is_not_a_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake clock nothing takes time but choosing, which takes a second."""
    heard: list[StepOutcome] = []
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = core(FakeRunner(3))

    def slow(num_outputs: int) -> int:
        now[0] += 1.0
        return 3

    engine.policy = Chosen(slow)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    engine.add_request("a", spec(40, 12))
    finish(engine)
    assert heard and now[0] > 1.0 and all(step.seconds == 0.0 for step in heard)


@pytest.mark.parametrize("between, seconds", [(0.0, 2.0), (1.0, 3.0), (9.0, 4.0)])
def test_what_the_caller_does_between_steps_is_part_of_their_time(
    between: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake clock on which a step takes two seconds: at most as much again."""
    heard: list[StepOutcome] = []
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    runner = FakeRunner(3)
    engine = core(runner)

    def pass_time(step: StepInput) -> None:
        now[0] += 2.0

    runner.before = pass_time
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    engine.add_request("a", spec(40, 12))
    while engine.has_work:
        engine.step()
        now[0] += between
    assert heard and all(step.seconds == step.host_seconds == seconds for step in heard)


@pytest.mark.parametrize("raising", ["verified", "proposed", "finished"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_token_is_lost_where_the_policy_raises(
    raising: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After its request's tokens were taken in: it goes on from these, and ends where it would have."""
    engine, calls = core(FakeRunner(3)), [0]
    engine.policy = Chosen(lambda num_outputs: 3)

    def fail(*_: Any, **given: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise ZeroDivisionError("of the policy")

    setattr(engine.policy, raising, fail)
    engine.add_request("a", spec(5, 9))
    assert ids(finish(engine)["a"]) == list(range(5, 14))
    assert calls[0] >= number and "of the policy" in caplog.text


class Joining(FixedPolicy):
    """Notes how many requests each step has, and how many will join them."""

    def __init__(self) -> None:
        super().__init__(1)
        self.heard: list[tuple[int, int]] = []

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self.heard.append((len(asked) + num_others, num_joining))
        return super().choose(asked, num_others, num_joining)


@pytest.mark.parametrize(("slots", "heard"), [(8, [(1, 3), (2, 2), (4, 0)]), (2, [(1, 1), (2, 0)])])
def test_a_policy_hears_how_many_requests_will_join(slots: int, heard: list[tuple[int, int]]) -> None:
    """A step has 32 rows: the first prompt, then one row of that request and the second prompt, then rows of all four
    requests; with two slots the others wait until one is free."""
    engine = core(FakeRunner(1), slots=slots)
    engine.policy = joining = Joining()
    for name, num_tokens in (("a", 32), ("b", 30), ("c", 5), ("d", 6)):
        engine.add_request(name, spec(num_tokens, 30))
    for _ in heard:
        engine.step()
    assert joining.heard == heard


class Resting(Chosen):
    """No drafts; need not be asked for up to three steps. Notes the steps that it was asked for or told to rest in."""

    plain_every = 8

    def __init__(self) -> None:
        super().__init__(lambda num_outputs: 0)
        self.heard: list[str | int] = []

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self.heard.append("-".join(request.id for request in asked))
        return super().choose(asked, num_others, num_joining)

    def num_repeats(self) -> int:
        return 3

    def repeated(self, num_steps: int) -> None:
        self.heard.append(num_steps)

    def finished(self, step: StepOutcome) -> None:
        self.heard.append("told")


def test_a_policy_that_rests_is_asked_about_other_requests_and_after_reports() -> None:
    runner = FakeRunner(3)
    runner.drafter_has_kv = False  # it misses nothing
    engine = core(runner)
    engine.policy = resting = Resting()
    engine.add_request("a", spec(5, 19))
    for _ in range(10):
        engine.step()
    engine.add_request("b", spec(5, 3))
    finish(engine)
    text = " ".join(map(str, resting.heard))
    assert text.startswith("a 3 a 3 a told 1 a-b"), "its answer holds after a report, but for others"
    assert "a-b" in text and all(number <= 3 for number in resting.heard if isinstance(number, int))
    asked, rested = resting.heard.count("a"), sum(n for n in resting.heard if isinstance(n, int))
    untold = engine.drafting._repeat.num_steps  # until it is next asked or told
    assert asked + resting.heard.count("a-b") + rested + untold == engine.stats.num_steps and 0 < untold <= 3


class Counting(FixedPolicy):
    """Counts the steps that it was asked about, and those for which its answer was used again."""

    num_asked = num_repeated = 0

    def choose(self, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        self.num_asked += 1
        return super().choose(asked, num_others, num_joining)

    def repeated(self, num_steps: int) -> None:
        self.num_repeated += num_steps


@pytest.mark.parametrize(("changes", "num_asked"), [("", 1), ("fault", 2), ("request", 2)])
def test_a_policy_s_answer_is_used_again_while_nothing_changes(
    changes: str, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a drafter fails, since some requests may then no longer draft, or a request comes."""
    runner = FakeRunner(2)
    engine = core(runner)
    engine.policy = counting = Counting(2)
    engine.add_request("a", spec(5, 200))
    for number in range(12):
        if number == 6 and changes == "fault":
            monkeypatch.setattr(runner, "drafter_health", lambda: DrafterHealth(num_faults=1))
        if number == 7 and changes == "request":
            engine.add_request("b", spec(5, 200))
        engine.step()
    assert counting.num_asked == num_asked
    engine.drafting._end_repeat()
    assert counting.num_repeated == 12 - num_asked, "it hears of each"
    assert all(s.num_drafts == 2 for step in runner.steps for s in step.scheduled)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_a_policy_is_not_asked_about_requests_that_cannot_draft(async_depth: int) -> None:
    """A drafter with keys and values sees the prompts, and misses the first row after that."""
    engine = core(FakeRunner(3, async_depth=async_depth))
    engine.policy = resting = Resting()
    for name in "ab":
        engine.add_request(name, spec(5, 40))
    found = finish(engine)
    assert ids(found["a"]) == ids(found["b"]) == list(range(5, 45))
    assert resting.heard[:3] == ["a-b", "a-b", 3] and set(resting.heard[3:]) == {"told"}


def test_a_drafter_that_may_not_rest_tells_of_few_steps_without_drafts() -> None:
    """Like one that does not see them: each that is told of stands for as many."""
    told = []
    for may_rest in (True, False):
        engine, heard = core(FakeRunner(3)), list[StepOutcome]()
        engine.runner.drafter_may_rest = may_rest  # type: ignore[misc]
        engine.policy = Chosen(lambda num_outputs: 0)
        engine.policy.finished = heard.append  # type: ignore[method-assign]
        engine.add_request("a", spec(5, 60))
        finish(engine)
        told.append(len(heard))
    assert told[0] == told[1] and 60 / PLAIN_EVERY - 2 <= told[0] <= 60 / PLAIN_EVERY + 1


@pytest.mark.parametrize("has_kv", [True, False])
def test_the_policy_hears_what_prompts_take_a_drafter_that_must_see_them(
    has_kv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    monkeypatch.setattr(FakeRunner, "drafter_has_kv", has_kv)
    engine = core(FakeRunner(3))
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.prompted = lambda num_rows, *_: heard.append(num_rows)  # type: ignore[method-assign]
    engine.add_request("a", spec(40, 12))
    finish(engine)
    assert sum(heard) == (40 if has_kv else 0)


def test_where_steps_overlap_their_time_is_an_average_of_steps_of_one_size() -> None:
    run = StepRun()
    two, more = ([ScheduledRequest(slot, 9, num_rows, num_rows, 3) for slot in (0, 1)] for num_rows in (4, 5))
    run.count(two, before=10.0)
    run.count(two, before=11.5)
    assert run.taken(12.0) == (0.5, False), "of the second, whose result was seen that long after the first's"
    run.count(two, before=12.0)
    assert run.taken(14.5) == (1.5, False), "of the second and the third"
    run.count(two, before=14.5)
    run.count(more, before=15.0)
    assert run.taken(17.0) == (2.0, False), "of the larger step alone"
    run.count(more, before=17.0)
    run.count(None, before=18.0)
    run.count(more, before=21.0)
    assert run.taken(22.0) == (1.0, False), "what is not told of breaks the row"


def test_averages_of_overlapping_steps_are_typical_if_they_are_of_enough_and_leave_the_first_one_out() -> (
    None
):
    """Steps of 1 ms, where the result before the first was seen half a millisecond late."""
    run, each = StepRun(), [ScheduledRequest(0, 9, 4, 4, 3)]
    seen, found = [0.5, *map(float, range(1, 2 * NUM_AVERAGED + 2))], []
    for before, now in pairwise(seen):
        run.count(each, before)
        found.append(run.taken(now))
    assert found[0] == (0.5, False)
    assert found[1:] == [(1.0, number % NUM_AVERAGED == 0) for number in range(1, 2 * NUM_AVERAGED + 1)]


def test_the_policy_does_not_hear_of_steps_that_are_yet_to_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[StepOutcome] = []
    engine = core(FakeRunner(3))
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    monkeypatch.setattr(Pending, "is_warming", True)
    engine.add_request("a", spec(5, 12))
    finish(engine)
    assert not heard


@pytest.mark.parametrize("every", [1, 4])
def test_the_policy_hears_of_as_many_steps_as_it_wants(every: int) -> None:
    heard: list[StepOutcome] = []
    engine = core(FakeRunner(3))
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.report_every = every  # type: ignore[misc]
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    engine.add_request("a", spec(5, 60))
    finish(engine)
    num_decoding = engine.stats.num_steps - 2  # a prompt, and the last step, which drafts nothing
    assert abs(len(heard) - num_decoding / every) <= 1


@pytest.mark.parametrize("async_depth", [0, 1])
def test_steps_after_a_prompt_are_not_typical_on_a_cpu_nor_single_ones_where_they_overlap(
    async_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    heard: list[StepOutcome] = []
    engine = core(FakeRunner(3, async_depth=async_depth))
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    for number in range(2):
        engine.add_request(str(number), spec(40 + number, 60))
        for _ in range(AFTER_PROMPTS + 4):
            engine.step()
    for num_requests in (1, 2):
        typical = [step.is_typical for step in heard if step.num_requests == num_requests]
        assert len(typical) > AFTER_PROMPTS
        from_the_start = [number > 0 and number % NUM_AVERAGED == 0 for number in range(len(typical))]
        after_prompts = [number >= AFTER_PROMPTS for number in range(len(typical))]
        assert typical == (from_the_start if async_depth else after_prompts)


@pytest.mark.parametrize(("seconds", "num_slowed"), [(SLOWED_SECONDS / 2.5, 3), (LONG_AFTER, 0)])
def test_steps_that_begin_or_end_long_after_a_prompt_are_typical(
    seconds: float, num_slowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake clock. Short ones: the fourth begins after three, which take more than the time that a prompt slows."""
    heard: list[StepOutcome] = []
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    runner = FakeRunner(3)

    def pass_time(step: StepInput) -> None:
        now[0] += seconds

    runner.before = pass_time
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    for number in range(2):
        engine.add_request(str(number), spec(20 + number, 60))
        for _ in range(5):
            engine.step()
    assert [step.is_typical for step in heard] == 2 * [number >= num_slowed for number in range(4)]


def test_the_first_steps_after_many_prompts_are_not_typical_where_steps_overlap() -> None:
    """Steps of prompts are none of those that are left out."""
    heard: list[StepOutcome] = []
    engine = core(FakeRunner(3, async_depth=1))
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    for number in range(2 * MOST_LEFT_OUT):
        engine.add_request(str(number), replace(spec(5, 1), token_ids=[number] * 5))
        engine.step()
    engine.add_request("a", spec(5, 40))
    finish(engine)
    typical = [step.is_typical for step in heard]
    assert not any(typical[:NUM_AVERAGED]) and any(typical)


@pytest.mark.parametrize(("async_depth", "every"), [(0, AFTER_PROMPTS - 1), (1, NUM_AVERAGED)])
def test_where_all_steps_follow_prompts_they_are_typical_after_a_while(
    async_depth: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    heard: list[StepOutcome] = []
    engine = core(FakeRunner(3, async_depth=async_depth))
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    for number in range(AFTER_PROMPTS * MOST_LEFT_OUT):
        if number % every == 0:
            engine.add_request(str(number), spec(40, 12))
        engine.step()
    typical = [step.is_typical for step in heard]
    first = typical.index(True)
    assert 0 < first <= MOST_LEFT_OUT and all(typical[first:])


def test_the_policy_does_not_hear_of_steps_that_ran_ahead_of_everybodys_end() -> None:
    """The result of such a step is processed when the next request comes, which may be hours later."""
    heard: list[StepOutcome] = []
    runner = FakeRunner(3, async_depth=1)
    engine = core(runner)
    engine.policy = Chosen(lambda num_outputs: 3)
    engine.policy.finished = heard.append  # type: ignore[method-assign]
    engine.add_request("a", spec(5, 60, stop_token_ids=[12]))
    while not any(delta.finish_reason for delta in engine.step()):
        pass
    num_heard = len(heard)
    assert num_heard and len(engine._in_flight) == 1
    engine.add_request("b", spec(6, 1))
    finish(engine)
    assert len(heard) == num_heard


@pytest.mark.parametrize("rests", [True, False])
def test_a_step_that_verifies_a_grammar_s_drafts_may_not_skip_the_drafter(rests: bool) -> None:
    """Else its rows would have the shape of a step without drafts; then the policy is asked, which says so."""
    request = Progress(id="a", spec=spec(5, 50), arrival=0, tokens=[1, 2, 3, 4, 5])
    repeat = Repeat([request], Wanted([0 if rests else 3], without_drafter=rests), 10)
    assert repeat.holds([PlannedRows(request, 5, 1, 1)])
    assert repeat.holds([PlannedRows(request, 6, 3, 3)]) is not rests
    assert not repeat.holds([PlannedRows(request, 6, 3, 1)]), "a prompt"
