"""From the engine's token ids to the user's output: text, stop strings, log-probabilities, metrics."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftproof import Delta, Logprob, SamplingParams, TokenDelta, assets
from draftproof.engine.interface import LogprobRow
from draftproof.frontend.input_processor import PreparedRequest
from draftproof.frontend.output_processor import OutputProcessor, Request
from draftproof.frontend.text import Tokenizer

PROMPT = "def add"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(assets.path(assets.TARGET))


def begin(tokenizer: Tokenizer, params: SamplingParams) -> tuple[OutputProcessor, Request]:
    outputs = OutputProcessor(tokenizer, ["ngram"])
    return outputs, outputs.request("r", PreparedRequest(PROMPT, tokenizer.encode(PROMPT), params))


def rows(token_ids: Sequence[int]) -> list[LogprobRow]:
    """A row of log-probabilities per token, with its id as the logprob, so that it can be recognised."""
    return [LogprobRow(token, -float(token), 1, [(token, -float(token))]) for token in token_ids]


def taken(request: Request) -> Delta:
    (delta,) = request.take_pending()
    return delta


def test_pieces_of_text_are_the_text_and_ids_stay_with_their_scores(tokenizer: Tokenizer) -> None:
    outputs, request = begin(tokenizer, SamplingParams(logprobs=0))
    ids = tokenizer.encode("(a, b): 🎉 done")
    text, seen, scores = "", list[int](), list[dict[int, Logprob]]()
    for at in range(0, len(ids), 2):
        new, is_last = ids[at : at + 2], at + 2 >= len(ids)
        ended = outputs.process(
            request,
            request.choices[0],
            TokenDelta("r.0", new, logprobs=rows(new), finish_reason="length" if is_last else None),
        )
        assert not ended, "the engine ends it itself"
        delta = taken(request)
        text, seen, scores = text + delta.text, seen + delta.token_ids, scores + (delta.logprobs or [])
    output = outputs.output(request)
    (choice,) = output.outputs
    assert text == choice.text == "(a, b): 🎉 done" and seen == choice.token_ids == ids
    assert scores == choice.logprobs and [s[t].logprob for s, t in zip(scores, ids, strict=True)] == [
        -float(t) for t in ids
    ]
    assert choice.cumulative_logprob == -float(sum(ids)) and output.finished


def test_metrics_count_each_drafter_over_all_choices(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer, ["ngram", "eagle3"])
    params = SamplingParams(n=2)
    request = outputs.request("r", PreparedRequest(PROMPT, tokenizer.encode(PROMPT), params))
    token = tokenizer.encode("a")[0]
    for number, choice in enumerate(request.choices):
        outputs.process(request, choice, TokenDelta(choice.id, [token], drafter_faults=[0]))
        for drafted, accepted in ((2, 1), (3, 2), (0, 0)):
            new = TokenDelta(
                choice.id,
                [token] * (accepted + 1),
                num_drafted=drafted,
                num_accepted=accepted,
                is_round=True,
                drafter=number,
            )
            outputs.process(request, choice, new)
    first, second = outputs.output(request).metrics.drafters
    assert (first.name, first.num_faults, second.name, second.num_faults) == ("ngram", 2, "eagle3", 0)
    for counted in (first.speculation, second.speculation):
        assert (counted.num_rounds, counted.num_draft_tokens, counted.num_accepted_tokens) == (2, 5, 3)
    assert outputs.output(request).metrics.speculation.num_rounds == 6, "a round without drafts is nobody's"


def test_a_stop_string_ends_an_output_within_the_tokens_of_a_step(tokenizer: Tokenizer) -> None:
    """Tokens after it in the same step are removed with their scores and accepted flags."""
    outputs, request = begin(tokenizer, SamplingParams(stop=["\n\n"], logprobs=0))
    ids = [tokenizer.encode(piece)[0] for piece in ("a", "\n", "\n", "b")]
    before = TokenDelta("r.0", ids[:2], logprobs=rows(ids[:2]))
    assert not outputs.process(request, request.choices[0], before)
    assert taken(request).text == "a", "a line's end may be the start of the stop string"
    after = TokenDelta(
        "r.0", ids[2:], num_drafted=2, num_accepted=2, is_round=True, logprobs=rows(ids[2:]), error=None
    )
    assert outputs.process(request, request.choices[0], after), "the engine does not know and must abort it"
    delta = taken(request)
    assert (delta.token_ids, delta.text, delta.accepted) == (ids[2:3], "", [True])
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "\n\n")
    output = outputs.output(request)
    assert output.outputs[0].text == "a" and len(output.outputs[0].logprobs or ()) == 3
    assert output.metrics.speculation.num_accepted_tokens == 1


def test_a_stop_string_wins_over_what_came_behind_it(tokenizer: Tokenizer) -> None:
    outputs, request = begin(tokenizer, SamplingParams(stop=["b"]))
    ids = [tokenizer.encode(piece)[0] for piece in ("a", "b", "c")]
    ended = TokenDelta("r.0", ids, finish_reason="error", error="no token is possible")
    assert not outputs.process(request, request.choices[0], ended), "the engine has ended it already"
    delta, output = taken(request), outputs.output(request)
    assert (delta.finish_reason, delta.error, delta.text) == ("stop", None, "a")
    assert output.error is None and output.outputs[0].token_ids == ids[:2]


def test_why_a_choice_failed_is_the_requests_error(tokenizer: Tokenizer) -> None:
    outputs, request = begin(tokenizer, SamplingParams(n=2))
    failed = TokenDelta("r.1", finish_reason="error", error="poisonous")
    assert not outputs.process(request, request.choices[1], failed)
    delta = taken(request)
    assert (delta.index, delta.token_ids, delta.finish_reason, delta.error) == (1, [], "error", "poisonous")
    output = outputs.output(request)
    assert output.error == "poisonous" and not output.finished, "the other choice runs on"
    assert [choice.finish_reason for choice in output.outputs] == [None, "error"]


def test_a_token_among_the_likeliest_is_named_once_and_another_beside_them(tokenizer: Tokenizer) -> None:
    outputs, request = begin(tokenizer, SamplingParams(logprobs=2, prompt_logprobs=2))
    first, second, unlikely = (tokenizer.encode(piece)[0] for piece in ("a", "b", "c"))
    top = [(first, -0.5), (second, -1.0)]
    scored = [LogprobRow(second, -1.0, 2, top), LogprobRow(unlikely, -9.0, 77, top)]
    prompt_only = TokenDelta("r.0", prompt_logprobs=scored[1:], num_cached_tokens=16)
    assert not outputs.process(request, request.choices[0], prompt_only)
    assert request.take_pending() == [], "nothing was generated"
    outputs.process(request, request.choices[0], TokenDelta("r.0", [second, unlikely], logprobs=scored))
    likeliest = {first: Logprob(-0.5, 1, "a"), second: Logprob(-1.0, 2, "b")}
    expected = [likeliest, {**likeliest, unlikely: Logprob(-9.0, 77, "c")}]
    output = outputs.output(request)
    assert taken(request).logprobs == output.outputs[0].logprobs == expected
    assert output.prompt_logprobs == [None, expected[1]]
    assert output.metrics.num_cached_tokens == 16 and output.metrics.first_token_latency > 0


def test_an_aborted_choice_keeps_what_it_has_and_gives_held_text(tokenizer: Tokenizer) -> None:
    outputs, request = begin(tokenizer, SamplingParams(stop=["xyz"]))
    ids = tokenizer.encode("a xy")
    outputs.process(request, request.choices[0], TokenDelta("r.0", ids))
    assert taken(request).text == "a "
    outputs.abort(request, request.choices[0])
    delta = taken(request)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("xy", [], "abort")
    assert outputs.output(request).outputs[0].text == "a xy"
