"""Parsing models' output into calls, reasoning and text gives the same result however the text is split."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof import assets
from draftproof.frontend.text import Tokenizer
from draftproof.grammar.matcher import GrammarCompiler
from draftproof.grammar.sources import grammar_text
from draftproof.server.parsers import NONE, TOOLS, Parser, Syntax
from draftproof.server.parsers.forms import Form, call_grammar
from draftproof.server.parsers.reader import CallArguments, CallStart, Content, Piece, Reasoning
from draftproof.types import StructuredOutputsParams
from tests.conformance.schemas import generated

SCHEMAS: dict[str, Any] = {
    "search": {"type": "object", "properties": {"text": {"type": "string"}, "most": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"text": 'a "b" {\\n}', "most": 3}
JSON = json.dumps(ARGUMENTS)
VOCAB = 8192
SEARCH, NOW = ("search", ARGUMENTS), ("now", {})
ONE_QUOTE = '<|"|>'
# (family, what the model writes, text, calls)
WRITTEN: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", "Just text, with < and {.", "Just text, with < and {.", []),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "search", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "Let me see.",
        [SEARCH, NOW],
    ),
    ("hermes", f'<tool_call>{{"arguments": {JSON}, "name": "search"}}</tool_call>', "", [SEARCH]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> ', "", [NOW]),
    (
        "hermes",
        f'<tool_call>{{"name": "search", "arguments": {json.dumps(JSON)}}}</tool_call>',
        "",
        [SEARCH],
    ),
    ("hermes", "<tool_call>not json</tool_call> after", "after", []),
    ("llama3", f'{{"name": "search", "parameters": {JSON}}}', "", [SEARCH]),
    (
        "llama3",
        f'<|python_tag|>{{"name": "search", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        [SEARCH, NOW],
    ),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "Text, then {", "Text, then {", []),
    ("mistral", f"Well.[TOOL_CALLS]search[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}", "Well.", [SEARCH, NOW]),
    ("mistral", f"[TOOL_CALLS]search[CALL_ID]abc[ARGS]{JSON}", "", [SEARCH]),
    ("mistral", f"[TOOL_CALLS]search{JSON}", "", [SEARCH]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "search", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [SEARCH, NOW],
    ),
    (
        "deepseek",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        [SEARCH, NOW],
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [SEARCH],
    ),
    (
        "gemma",
        f"Hm. <|tool_call>call:search{{text:{ONE_QUOTE}{ARGUMENTS['text']}{ONE_QUOTE},most:3}}<tool_call|>"
        "<|tool_call>call:now{}<tool_call|>",
        "Hm.",
        [SEARCH, NOW],
    ),
    (
        "gemma",
        "<start_function_call>call:search{text:<escape>x<escape>,deep:{a:[1,<escape>y<escape>,true],b:{}}}"
        "<end_function_call>",
        "",
        [("search", {"text": "x", "deep": {"a": [1, "y", True], "b": {}}})],
    ),
    (
        "glm",
        f"Hm.\n<tool_call>search\n<arg_key>text</arg_key>\n<arg_value>{ARGUMENTS['text']}</arg_value>\n"
        "<arg_key>most</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "Hm.",
        [SEARCH, NOW],
    ),
    (
        "glm",
        "<tool_call>search<arg_key>text</arg_key><arg_value>3</arg_value></tool_call>",
        "",
        [("search", {"text": "3"})],
    ),
]


def syntax(tools: str, reasoning: str = NONE) -> Syntax:
    return Syntax("", tools, reasoning)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Pieces, with consecutive ones of the same kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and type(last) is type(piece) and not isinstance(piece, CallStart):
            found[-1] = type(piece)(last.text + piece.text)  # type: ignore[union-attr]
        else:
            found.append(piece)
    return found


def read(parser: Parser, parts: list[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined([*pieces, *parser.push("", is_over=True)])


def told(pieces: list[Piece]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("family", "written", "text", "calls"), WRITTEN)
def test_calls_are_read_however_they_are_cut(
    family: str, written: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    whole = read(Parser(syntax(family), SCHEMAS), [written])
    assert told(whole) == (text, calls)
    for size in (1, 2, 3, 7):
        parts = [written[i : i + size] for i in range(0, len(written), size)]
        assert read(Parser(syntax(family), SCHEMAS), parts) == whole


@pytest.mark.parametrize("family", TOOLS)
@given(data=st.data())
def test_nothing_that_a_model_writes_is_too_much(family: str, data: st.DataObject) -> None:
    """Markers and parts of calls in any order, split anywhere, are read to the end, as if given in one piece."""
    bits = [
        *TOOLS[family][1],
        '{"name": "now", ',
        '"arguments": {',
        "}",
        "]",
        "[",
        '"',
        "call:f{",
        "a:",
        "x",
        " ",
    ]
    parts = data.draw(st.lists(st.sampled_from([*bits, "<", "\n", "\\", "\0"]), max_size=12))
    assert read(Parser(syntax(family), SCHEMAS), parts) == read(
        Parser(syntax(family), SCHEMAS), ["".join(parts)]
    )


BEGUN = {
    "hermes": '<tool_call>{"name": "search", "arguments": {"text": ',
    "llama3": '{"name": "search", "parameters": {"text": ',
    "mistral": '[TOOL_CALLS]search[ARGS]{"text": ',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"text": ',
    "gemma": "<|tool_call>call:search{text:",
    "glm": "<tool_call>search<arg_key>text</arg_key><arg_value>",
}


@pytest.mark.parametrize("family", TOOLS)
@pytest.mark.parametrize("bit", ["[", '{"a":', "{a:["])
def test_arguments_may_be_as_deep_as_a_model_writes(family: str, bit: str) -> None:
    """Arguments may also be cut off anywhere; the limit of Python's JSON reader does not matter."""
    closed = "</arg_value>" if family == "glm" else ""
    parser = Parser(syntax(family), {"search": {}})
    pieces = read(parser, [BEGUN[family], *[bit * 100] * 100, closed])
    assert pieces[0] == CallStart("search")
    assert sum(len(piece.text) for piece in pieces[1:] if isinstance(piece, CallArguments)) > 9000 * len(bit)


@functools.cache
def llguidances_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(str(Path(assets.path(assets.TARGET)) / "tokenizer.json"))


def spelled_by_gemma(arguments: dict[str, Any], form: Form) -> str:
    quote = ONE_QUOTE if ONE_QUOTE in TOOLS["gemma"][1] and "|" in form.end else "<escape>"
    return ",".join(
        f"{name}:{quote}{value}{quote}" if isinstance(value, str) else f"{name}:{json.dumps(value)}"
        for name, value in arguments.items()
    )


def spelled_by_glm(arguments: dict[str, Any], form: Form) -> str:
    return "".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for name, value in arguments.items()
    )


SPELLED = {"gemma": spelled_by_gemma, "glm": spelled_by_glm}
FORMS = [(family, form) for family, (_, _, forms) in TOOLS.items() for form in forms]


@pytest.mark.parametrize(("family", "form"), FORMS)
@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("are_tokens", [False, True])
def test_what_a_grammar_asks_for_is_read(family: str, form: Form, is_single: bool, are_tokens: bool) -> None:
    """Calls written in a form are accepted by its grammar, and parsed by the family's reader."""
    llguidance, tokenizer = pytest.importorskip("llguidance"), llguidances_tokenizer()
    search = {**SCHEMAS["search"], "required": ["text", "most"], "description": "a text ::= not GBNF"}
    schemas = {"search": search, "now": None}  # None: any object
    # the family's last markers as special tokens; in families that spell arguments these end strings
    specials = [1, 3, 4]
    ids = dict(zip(reversed(TOOLS[family][1]), specials, strict=False)) if are_tokens else {}
    rule = StructuredOutputsParams(grammar=call_grammar(form, schemas, ids.get, is_single=is_single))
    grammar = grammar_text(rule, frozenset())

    def matches(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        markers = "|".join(map(re.escape, ids)) or "(?!)"
        tokens: list[int] = []
        for part in re.split(f"({markers})", text):
            tokens += [ids[part]] if part in ids else tokenizer.tokenize_str(part)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def written(*calls: tuple[str, dict[str, Any]]) -> str:
        spell = SPELLED.get(family, lambda arguments, _: json.dumps(arguments))
        parts = [spell(arguments, form).join(form.written(name)) for name, arguments in calls]
        return f"{form.first}{form.between.join(parts)}{form.last}"

    for calls in ([SEARCH], [SEARCH, NOW]):
        assert matches(written(*calls)) == (len(calls) == 1 or not is_single)
        assert told(read(Parser(syntax(family), SCHEMAS), [written(*calls)])) == ("", calls)
    for wrong in (("search", {"text": "x"}), ("other", {})):
        assert not matches(written(wrong))
    assert not matches(f"Text. {written(SEARCH)}")


@pytest.mark.parametrize(("family", "form"), [one for one in FORMS if one[1].spell])
def test_arguments_that_are_spelled_out_follow_their_schema(family: str, form: Form) -> None:
    """Random output of a uniform model under the grammar is parsed to arguments that match the schema."""
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(assets.path(assets.TARGET))
    compiler = GrammarCompiler(
        tokenizer.to_json, VOCAB, [tokenizer.eos_token_id or 0], tokenizer.special_texts
    )
    rng, num_ended = random.Random(5), 0
    for schema in (s for s in [*MORE, *generated(60, seed=7)] if "properties" in s):
        grammar = call_grammar(form, {"f": schema}, lambda marker: None, is_single=True)
        matcher = compiler.compile(StructuredOutputsParams(grammar=grammar)).matcher()
        ids: list[int] = []
        while not matcher.is_complete and len(ids) < 300:
            bits = int.from_bytes(matcher.masks([], 1), "little")
            ids.append(rng.choice([i for i in range(VOCAB) if bits >> i & 1]))
            matcher.advance(ids[-1:])
        if not matcher.is_complete:
            continue
        num_ended += 1
        text = tokenizer.decode(ids, skip_special_tokens=False)
        ((name, arguments),) = told(read(Parser(syntax(family), {"f": schema}), [text]))[1]
        assert name == "f"
        problems = list(jsonschema.Draft202012Validator(schema).iter_errors(arguments))
        assert not problems, (schema, text, arguments, problems)
    assert num_ended > 20


# A recursive list, a string with a pattern within anyOf, and keys that need quotes.
MORE: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}, "a b": {"type": ["integer", "null"]}},
        "required": ["tree"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"anyOf": [{"type": "string", "pattern": "^x[a-c]{1,3}$"}, {"const": "none"}]},
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["name"],
            }
        },
    },
    {
        "type": "object",
        "properties": {"path": {"type": "string", "pattern": "a/b"}, "x": {"maxLength": 3, "type": "string"}},
    },
    {  # the dollar is a character
        "type": "object",
        "properties": {"price": {"type": "string", "pattern": r"^\d{1,3}\$"}},
        "required": ["price"],
    },
]


@pytest.mark.parametrize(
    "schema",
    [{"anyOf": [{}]}, {"type": "array"}, {"properties": {"x": {"type": "array", "uniqueItems": True}}}],
)
def test_arguments_that_cannot_be_followed_are_named(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tools: parameters"):
        call_grammar(TOOLS["gemma"][2][0], {"f": schema}, lambda marker: None, is_single=True)


def test_arguments_come_as_they_are_written() -> None:
    parser = Parser(syntax("hermes"), SCHEMAS)
    assert parser.push('<tool_call>{"name": "search", "arguments": {"te') == [
        CallStart("search"),
        CallArguments('{"te'),
    ]
    assert parser.push('xt": "a') == [CallArguments('xt": "a')]


def test_of_several_calls_as_many_as_are_wanted() -> None:
    written = "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]search[ARGS]{}"
    assert told(read(Parser(syntax("mistral"), SCHEMAS, most_calls=1), [written])) == ("", [NOW])


def test_without_tools_calls_are_text() -> None:
    written = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert told(read(Parser(syntax("hermes"), None), [written])) == (written, [])


@pytest.mark.parametrize(
    ("begins_inside", "written", "thought", "said"),
    [
        (False, "<think>\nWell.\n</think>\n\nYes.", "Well.\n", "Yes."),
        (True, "Well.</think>Yes.", "Well.", "Yes."),
        (False, " No <think>.", "", " No <think>."),
        (True, "Cut off", "Cut off", ""),
    ],
)
def test_reasoning_comes_first(begins_inside: bool, written: str, thought: str, said: str) -> None:
    for size in (1, 3, len(written)):
        parser = Parser(syntax(NONE, "think"), None, begins_inside=begins_inside)
        pieces = read(parser, [written[i : i + size] for i in range(0, len(written), size)])
        assert [p for p in pieces if isinstance(p, Reasoning)] == ([Reasoning(thought)] if thought else [])
        assert told(pieces)[0] == said


def test_templates_tell_the_family() -> None:
    found = Syntax("{{ '<tool_call>' }} ... {{ '</think>' }}", None, None)
    assert (found.tools, found.reasoning) == ("hermes", "think")
    assert Syntax("<tool_call> <arg_key>", None, None).tools == "glm"
    assert Syntax("", None, None).tools == Syntax("<tool_call>", NONE, None).tools == NONE
    with pytest.raises(
        ValueError, match=r"tool_call_parser='hermse': must be one of .* did you mean 'hermes'"
    ):
        Syntax("", "hermse", None)
