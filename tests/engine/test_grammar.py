"""Grammars in the host half: a toy grammar, and a fake runner that samples by masks and drafts right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from draftproof.engine.core import EngineCore
from draftproof.engine.interface import NONE_LEFT, RequestSpec, RowResult, ScheduledRequest, StepInput
from tests.engine.test_core import FakeRunner, Pending, core, finish, ids, nothing_left, spec

END = 999
WORDS = 32  # 32-bit words of a mask


def allowed_after(output: Sequence[int]) -> set[int]:
    """The toy grammar: the tokens allowed after `tokens`. Only one if their sum is a multiple of 3; only the end after
    12 tokens."""
    if len(output) >= 12:
        return {END}
    first = (7 * sum(output) + len(output)) % 90 + 1
    return {first} if sum(output) % 3 == 0 else {first, first + 1, first + 5}


class ToyMatcher:
    def __init__(self) -> None:
        self.output: list[int] = []
        self.error = ""

    @property
    def is_complete(self) -> bool:
        return len(self.output) >= 12

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            assert token in allowed_after(self.output), f"{token} after {self.output}"
            self.output.append(token)

    def masks(self, drafts: Sequence[int], num_rows: int) -> bytes:
        rows, seen, is_open = b"", list(self.output), True
        for j in range(num_rows):
            bits = sum(1 << i for i in allowed_after(seen)) if is_open else 0
            rows += bits.to_bytes(4 * WORDS, "little")
            if j < len(drafts):
                is_open = is_open and drafts[j] in allowed_after(seen)
                seen.append(drafts[j])
        return rows

    def num_allowed(self, drafts: Sequence[int]) -> int:
        seen = list(self.output)
        for number, draft in enumerate(drafts):
            if draft not in allowed_after(seen):
                return number
            seen.append(draft)
        return len(drafts)

    def forced(self, most: int) -> list[int]:
        found, seen = [], list(self.output)
        while len(found) < most and len(allowed_after(seen)) == 1 and END not in allowed_after(seen):
            found += allowed_after(seen)
            seen += found[-1:]
        return found


class ToyGrammar:
    def __init__(self) -> None:
        self.matchers: list[ToyMatcher] = []

    def matcher(self) -> ToyMatcher:
        self.matchers.append(ToyMatcher())
        return self.matchers[-1]


class MaskedRunner(FakeRunner):
    """Samples the highest id that a row's mask allows (with `no_end`, never the end). Every third draft is wrong."""

    def __init__(self, num_drafts: int = 0, async_depth: int = 0, most_forced: int = 0) -> None:
        super().__init__(num_drafts, async_depth)
        self.most_forced = most_forced
        self.texts: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}
        self.prompt: dict[int, int] = {}
        self.no_end = False
        self.num_wrong = 0

    def run(self, step: StepInput) -> Pending:
        self.steps.append(step)
        for a in step.admitted:
            self.texts[a.slot], self.drafts[a.slot], self.prompt[a.slot] = list(a.token_ids), [], a.num_prompt
            assert a.is_masked
        for slot, position, drafts in step.forced:
            assert position == len(self.texts[slot])
            self.drafts[slot] = list(drafts)
        masks = step.masks or [b""] * len(step.scheduled)
        return Pending([self.sampled(s, mask) for s, mask in zip(step.scheduled, masks, strict=True)])

    def sampled(self, s: ScheduledRequest, mask: bytes) -> RowResult:
        text, drafts = self.texts[s.slot], self.drafts[s.slot][: max(0, s.num_sampled - 1)]
        assert len(mask) == 4 * WORDS * s.num_sampled
        rows = [mask[at : at + 4 * WORDS] for at in range(4 * WORDS, len(mask), 4 * WORDS)]
        assert all(map(any, rows)), "a draft that the grammar refuses has no row behind it"
        emitted: list[int] = []
        for j in range(s.num_sampled):
            bits = int.from_bytes(mask[4 * WORDS * j : 4 * WORDS * (j + 1)], "little")
            choice = [i for i in range(32 * WORDS) if bits >> i & 1 and not (self.no_end and i == END)]
            if not choice:
                assert j == len(emitted), "a row that is reached has a token, or none is left"
                return RowResult(emitted, len(drafts), 0, failure=NONE_LEFT)
            emitted.append(max(choice))
            if j >= len(drafts) or drafts[j] != emitted[-1]:
                break
        text += emitted
        self.drafts[s.slot] = (
            self.proposal(text[self.prompt[s.slot] :], s.num_drafts) if s.num_sampled else []
        )
        return RowResult(emitted, len(drafts), len(self.drafts[s.slot]))

    def proposal(self, output: list[int], number: int) -> list[int]:
        seen = list(output)
        for j in range(number):
            self.num_wrong += (len(seen) + j) % 3 == 0
            seen.append(max(allowed_after(seen)) if (len(seen) + j) % 3 else 95)
        return seen[len(output) :]

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        assert num_known == len(self.texts[slot]), "the host speaks of another text"
        return self.drafts[slot][:num_drafts]


def request(grammar: Any, max_tokens: int = 40, **params: Any) -> RequestSpec:
    plain = spec(5, max_tokens, structured_outputs={"json_object": True}, **params)
    return RequestSpec(
        token_ids=plain.token_ids,
        params=plain.params,
        row_seed=0,
        limit=plain.limit,
        eos_ids=frozenset({END}),
        stop_ids=frozenset({END}),
        grammar=grammar,
    )


def output_of(runner: MaskedRunner, **asked: Any) -> tuple[list[int], str | None, EngineCore]:
    engine, grammar = core(runner), ToyGrammar()
    engine.add_request("r", request(grammar, **asked))
    deltas = finish(engine)["r"]
    found = ids(deltas)
    assert grammar.matchers[0].output == found, "the matcher follows the tokens that stand"
    assert nothing_left(engine) and engine.error is None
    return found, deltas[-1].finish_reason, engine


EXPECTED, _, _ = output_of(MaskedRunner())


def test_an_output_follows_its_grammar_to_the_end() -> None:
    for at, token in enumerate(EXPECTED):
        assert token == max(allowed_after(EXPECTED[:at]))
    assert EXPECTED[-1] == END and len(EXPECTED) == 13
    assert any(len(allowed_after(EXPECTED[:at])) == 1 for at in range(12))


@pytest.mark.parametrize("async_depth", [0, 1])
@pytest.mark.parametrize("most_forced", [0, 2, 4])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts_change_nothing(num_drafts: int, most_forced: int, async_depth: int) -> None:
    """Fails if drafts advanced the matcher: it would be out of step after the first wrong draft."""
    runner = MaskedRunner(num_drafts, async_depth, min(most_forced, num_drafts))
    found, reason, engine = output_of(runner)
    assert found == EXPECTED and reason == "stop"
    assert runner.num_wrong >= 2 and engine.stats.speculation.num_accepted_tokens > 0
    assert any(step.forced for step in runner.steps) == (most_forced > 0)
    named = engine.stats.drafters[1].speculation  # forced text is attributed to the last drafter
    assert (
        named.num_accepted_tokens == named.num_draft_tokens > 0 if most_forced else not named.num_draft_tokens
    )


def test_forced_text_takes_no_more_room_than_there_is() -> None:
    for max_tokens in range(1, 14):
        runner = MaskedRunner(4, 0, 4)
        found, reason, _ = output_of(runner, max_tokens=max_tokens)
        assert found == EXPECTED[:max_tokens] and reason == ("stop" if max_tokens == 13 else "length")
        ends = [position + len(drafts) for step in runner.steps for _, position, drafts in step.forced]
        assert all(end < 5 + max_tokens for end in ends) and (ends or max_tokens < 5)


def test_where_only_the_end_is_left_and_may_not_come_the_output_ends_all_the_same() -> None:
    runner = MaskedRunner(4, 0, 4)
    runner.no_end = True  # as min_tokens does
    found, reason, _ = output_of(runner)
    assert found == EXPECTED[:-1] and reason == "stop"


def test_a_grammar_that_gives_up_is_an_error_of_its_request_alone() -> None:
    engine, grammar = core(MaskedRunner()), ToyGrammar()
    engine.add_request("r", request(grammar))
    engine.add_request("other", request(ToyGrammar()))
    engine.step()
    broken = grammar.matchers[0]
    broken.error = "too large"
    broken.masks = lambda drafts, num_rows: bytes(4 * WORDS * num_rows)  # type: ignore[method-assign]
    deltas = finish(engine)
    assert deltas["r"][-1].finish_reason == "error" and "too large" in str(deltas["r"][-1].error)
    assert ids(deltas["other"]) == EXPECTED[1:] or ids(deltas["other"]) == EXPECTED
    assert nothing_left(engine)


def test_a_preempted_request_goes_on_where_its_tokens_end() -> None:
    runner, grammar = MaskedRunner(4, 0, 4), ToyGrammar()
    engine = core(runner)
    engine.add_request("r", request(grammar))
    found: list[int] = []
    for _ in range(60):
        if not engine.has_work:
            break
        found += ids(engine.step())
        if len(found) in (3, 7, 8):
            engine.recompute_all()
    assert found == EXPECTED and len(grammar.matchers) == 1


def test_steps_without_grammars_hand_over_nothing_and_run_ahead() -> None:
    runner = FakeRunner(2, 1)
    runner.most_forced = 2
    engine = core(runner)
    engine.add_request("plain", spec())
    engine.step()
    engine.step()
    assert engine.num_in_flight == 1
    finish(engine)
    assert all(not step.masks and not step.forced for step in runner.steps)
    ahead = MaskedRunner(2, 1)
    engine = core(ahead)
    engine.add_request("r", request(ToyGrammar()))
    for _ in range(4):
        engine.step()
        assert engine.num_in_flight <= 1
    engine.abort("r")
    assert engine._num_matched == 0


def test_a_rule_without_its_grammar_would_be_ignored_and_is_refused() -> None:
    for grammar, rule in ((None, {"json_object": True}), (ToyGrammar(), None)):
        with pytest.raises(ValueError, match="structured_outputs: goes with a grammar"):
            given = spec(structured_outputs=rule)
            core(FakeRunner()).add_request("r", replace(given, grammar=grammar))  # type: ignore[arg-type]
