"""Grammars over the embedded model's tokens: allowed next tokens, forced tokens, and how a matcher advances."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftproof import StructuredOutputsParams
from draftproof.assets import path
from draftproof.frontend.text import Tokenizer
from draftproof.grammar.matcher import Grammar, GrammarCompiler, Matcher

pytest.importorskip("llguidance")
TOKENIZER = Tokenizer(path("tiny"))
VOCAB = 8192
EOS = TOKENIZER.eos_token_id or 0
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def compiler(vocab_size: int = VOCAB, eos: tuple[int, ...] = (EOS,)) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_json, vocab_size, eos, TOKENIZER.special_texts)


COMPILER = compiler()


def grammar(**rule: Any) -> Grammar:
    return COMPILER.compile(StructuredOutputsParams(**rule))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def named(masks: bytes, row: int = 0, row_bytes: int = VOCAB // 8) -> set[int]:
    """The token ids that a row's mask allows."""
    bits = int.from_bytes(masks[row * row_bytes : (row + 1) * row_bytes], "little")
    return {i for i in range(8 * row_bytes) if bits >> i & 1}


def next_ids(matcher: Matcher) -> set[int]:
    return named(matcher.masks([], 1))


def accepts(text: str, **rule: Any) -> bool:
    """Whether `text`, in the tokenizer's own tokens, is an output of the grammar."""
    matcher = grammar(**rule).matcher()
    for token in ids(text):
        if token not in next_ids(matcher):
            return False
        matcher.advance([token])
    return matcher.is_complete and EOS in next_ids(matcher)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ({"json": OBJECT}, '{"name": "a", "n": 12}', '{"name": "a"}'),
        ({"json": json.dumps(OBJECT)}, '{"name":"a","n":-1}', '{"n":1,"name":"a"}'),
        ({"json": OBJECT, "disable_any_whitespace": True}, '{"name":"a","n":1}', '{"name": "a","n":1}'),
        ({"json": OBJECT, "whitespace_pattern": r"\n?"}, '{\n"name":"a","n":1}', '{ "name":"a","n":1}'),
        ({"json_object": True}, '{"any": [1, {"b": null}]}', "[1]"),
        ({"regex": "a+b?"}, "aaab", "ab b"),
        ({"choice": ["yes", 'a "quoted" né']}, 'a "quoted" né', "no"),
        ({"grammar": 'start: "x" start | "y"'}, "xxy", "xx"),
        ({"grammar": 'root ::= "x" root | "y"'}, "xxy", "xx"),
    ],
)
def test_an_output_is_what_its_rule_says(rule: dict[str, Any], good: str, bad: str) -> None:
    assert accepts(good, **rule) and not accepts(bad, **rule)


def test_whitespace_has_an_end() -> None:
    assert not accepts('{"name":  "a","n":1}', json=OBJECT)
    assert not accepts('{"name":\n"a","n":1}', json=OBJECT)
    assert not accepts(' {"name":"a","n":1}', json=OBJECT)


def test_objects_are_closed_where_that_is_asked_for() -> None:
    loose: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}},
    }
    more = '{"a": {"b": 1, "c": 2}}'
    assert accepts(more, json=loose)
    assert not accepts(more, json=loose, disable_additional_properties=True)
    assert accepts('{"a": {"b": 1}}', json=loose, disable_additional_properties=True)


def test_tagged_parts_follow_their_schema_and_other_text_is_free() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    part = {"begin": "<call=f>", "schema": schema, "end": "</call>"}
    rule = {"structural_tag": {"type": "structural_tag", "structures": [part], "triggers": ["<call="]}}
    assert accepts('so: <call=f>{"x": 1}</call>', **rule)
    assert accepts("no call at all", **rule)
    assert not accepts('<call=f>{"y": 1}</call>', **rule)
    assert not accepts("<call=g>", **rule)


def test_drafts_that_are_allowed_are_counted_and_the_matcher_stays() -> None:
    matcher, text = grammar(json=OBJECT).matcher(), ids('{"name": "abc", "n": 1}')
    wrong = ids("]")
    assert matcher.num_allowed(text) == len(text) and matcher.num_allowed([]) == 0
    for number in range(1, len(text)):
        if text[number] != wrong[0]:
            assert matcher.num_allowed([*text[:1], *wrong, *text[1:]]) == 1
    assert named(matcher.masks([], 1)) == named(grammar(json=OBJECT).matcher().masks([], 1))
    later = grammar(regex="[ab]", after_token_id=text[0]).matcher()
    a, c = ids("a")[0], ids("c")[0]
    assert later.num_allowed([c, c]) == 2, "nothing is ruled out before"
    assert later.num_allowed([c, text[0], a]) == 3 and later.num_allowed([text[0], c, a]) == 1


def test_masks_along_drafts_are_those_after_each_of_them_and_the_matcher_stays() -> None:
    text = ids('{"name": "abc", "n": 1}')
    matcher, moved = grammar(json=OBJECT).matcher(), grammar(json=OBJECT).matcher()
    first = matcher.masks([], 1)
    along = matcher.masks(text, len(text) + 1)
    for row, token in enumerate(text):
        assert named(along, row) == next_ids(moved), f"row {row}"
        moved.advance([token])
    assert named(along, len(text)) == next_ids(moved)
    assert matcher.masks([], 1) == first, "asking has moved it"
    assert matcher.masks(text, 3) == along[: 3 * VOCAB // 8], "fewer rows than drafts"


def test_behind_a_draft_that_is_ruled_out_nothing_is_allowed() -> None:
    start = ids('{"')
    wrong = ids("[")[0]
    matcher = grammar(json=OBJECT).matcher()
    masks = matcher.masks([*start, wrong, *start], 4)
    assert wrong not in named(masks, len(start))
    assert named(masks, len(start) + 1) == set()
    assert named(masks, 0) == next_ids(matcher) and not matcher.error


def test_what_is_forced_is_all_that_the_masks_allow() -> None:
    matcher = grammar(json=OBJECT).matcher()
    forced = matcher.forced(16)
    assert TOKENIZER.decode(forced) == '{"name":'
    assert matcher.forced(2) == forced[:2]
    masks = matcher.masks(forced, len(forced) + 1)
    assert [named(masks, row) for row in range(len(forced))] == [{token} for token in forced]
    assert len(named(masks, len(forced))) > 1, "a space or the value's first character"


def test_an_output_that_is_complete_may_end_and_where_nothing_can_follow_must() -> None:
    matcher = grammar(regex="ab?").matcher()
    assert not matcher.is_complete
    matcher.advance(ids("a"))
    assert matcher.is_complete and EOS in next_ids(matcher) and len(next_ids(matcher)) > 1
    matcher.advance([*ids("b"), EOS])
    assert matcher.is_complete and next_ids(matcher) == {EOS}


def test_a_grammar_that_holds_after_a_token_leaves_what_is_before_it_free() -> None:
    end = ids("}")[0]
    matcher = grammar(regex="a[bc]", after_token_id=end).matcher()
    a, b, c, free = ids("a")[0], ids("b")[0], ids("c")[0], ids("xyz")
    masks = matcher.masks([*free, end, a], len(free) + 3)
    everything = set(range(VOCAB))
    assert [named(masks, row) for row in range(len(free) + 1)] == [everything] * (len(free) + 1)
    assert a in named(masks, len(free) + 1) and free[0] not in named(masks, len(free) + 1)
    assert named(masks, len(free) + 2) == {b, c}
    assert next_ids(matcher) == everything and not matcher.forced(4) and not matcher.is_complete
    matcher.advance([*free, end, a])
    assert next_ids(matcher) == {b, c}
    matcher.advance([b, EOS])
    assert matcher.is_complete


def test_outputs_of_one_grammar_do_not_move_each_other() -> None:
    shared = grammar(json=OBJECT)
    one, other = shared.matcher(), shared.matcher()
    one.advance(ids('{"name'))
    assert next_ids(other) == next_ids(grammar(json=OBJECT).matcher()) != next_ids(one)


def test_a_token_that_no_mask_allowed_is_a_fault_of_ours() -> None:
    matcher = grammar(json=OBJECT).matcher()
    with pytest.raises(AssertionError, match="not in its grammar"):
        matcher.advance(ids("[1]"))


@pytest.mark.parametrize("vocab_size", [VOCAB + 7, VOCAB - 40])
def test_a_model_whose_vocabulary_is_not_the_tokenizers(vocab_size: int) -> None:
    """The model's vocabulary is padded or cut: masks have the model's width, and tokens beyond it are not allowed."""
    row_bytes = -(-vocab_size // 32) * 4
    matcher = compiler(vocab_size).compile(StructuredOutputsParams(regex="[a-z ]+")).matcher()
    masks = matcher.masks(ids("ab"), 3)
    assert len(masks) == 3 * row_bytes
    usual = grammar(regex="[a-z ]+").matcher().masks([], 1)
    found = named(masks, 0, row_bytes)
    assert {i for i in found if i < min(vocab_size, VOCAB)} == {i for i in named(usual) if i < vocab_size}
    assert not {i for i in found if VOCAB <= i < vocab_size}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"json": "{"}, "json: is no JSON"),
        ({"json": "[1]"}, "json: must be a JSON object"),
        ({"json": {"type": "nothing"}}, "json: cannot be followed: .*nothing"),
        ({"json": {"not": {"type": "string"}}}, 'json: cannot be followed: .*"not"'),
        ({"json": {"$ref": "http://example.com/schema"}}, "json: cannot be followed"),
        ({"json": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "json: "),
        ({"regex": "("}, "regex: cannot be followed"),
        ({"grammar": "nonsense ::: x"}, "grammar: "),
        ({"structural_tag": {"structures": []}}, "structural_tag: must have"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<"]}},
            "structural_tag: structure",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_field_and_reason(rule: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"structured_outputs: {reason}"):
        grammar(**rule)


def test_a_model_without_an_end_of_text_token_has_no_grammars() -> None:
    with pytest.raises(ValueError, match="names no end-of-text token"):
        compiler(eos=()).compile(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({}, "no rule is given"),
        ({"json_object": False}, "no rule is given"),
        ({"json_object": True, "regex": "a"}, "regex, json_object are given"),
        ({"json": 3}, "json=3"),
        ({"json": ""}, "json="),
        ({"json": {"a": object()}}, "json: cannot be written"),
        ({"regex": ""}, "regex="),
        ({"choice": []}, "choice="),
        ({"choice": "ab"}, "choice="),
        ({"choice": ["a", ""]}, "choice="),
        ({"choice": ["a"], "after_token_id": -1}, "after_token_id=-1"),
        ({"choice": ["a"], "disable_any_whitespace": 1}, "disable_any_whitespace=1"),
        ({"jsn": {}}, "did you mean"),
    ],
)
def test_rules_that_are_none(rule: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StructuredOutputsParams(**rule)


def test_a_schema_that_its_owner_changes_later_stays_what_it_was() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    rule = StructuredOutputsParams(json=schema)
    schema["type"] = "string"
    assert json.loads(str(rule.json)) == {"type": "integer"}


NUMBER = {"type": "number", "minimum": 0, "maximum": 48, "multipleOf": 0.5}
STRINGS = [{"type": "string", "minLength": 2, "maxLength": 8}, {"type": "string", "format": "ipv4"}]
UNLIKE = {
    "type": "object",
    "properties": {
        "age": {"enum": ["a, b", "green", True]},
        "a b": {"anyOf": [*STRINGS, {**NUMBER, "maximum": 27}]},
        "kind": {"enum": ["green", "a, b", True]},
        "name": NUMBER,
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}


def test_drafts_that_were_refused_leave_nothing_behind() -> None:
    """After `"name":` come numbers, after `"a b":` also strings, whichever key was drafted before."""
    start, other, taken, quote = ids('{"age": true, "'), ids('name":'), ids('a b":'), ids(' "')[0]
    matcher, fresh = grammar(json=UNLIKE).matcher(), grammar(json=UNLIKE).matcher()
    matcher.advance(start)
    assert quote not in named(matcher.masks(other, 3), row=2)
    matcher.advance(taken[:-1])
    behind = named(matcher.masks(taken[-1:], 2), row=1)
    fresh.advance(start + taken)
    assert behind == next_ids(fresh) and quote in behind
    matcher.advance(taken[-1:])
    assert next_ids(matcher) == behind
