"""Structured output over HTTP, with real clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, StructuredOutputsParams
from draftproof.grammar.matcher import GrammarCompiler
from tests.server import scripted
from tests.server.running import EAGLE3, ENGINE, LONG, Running, drafting, running

pytest.importorskip("llguidance")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "degrees": {"type": "integer", "maximum": 50},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    chain = {"method": "chain", "drafters": [{"method": "ff"}, EAGLE3]}
    with running(drafting(speculative_config=chain)) as started:
        yield started


def test_a_chat_answers_by_its_schema_as_the_engine_does(server: Running) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=FORMAT, seed=5, max_tokens=80
    )
    text = answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop" and set(json.loads(text)) == {"city", "degrees"}
    rule = StructuredOutputsParams(json=SCHEMA)
    with LLM(**ENGINE) as plain:
        params = plain.default_sampling_params().clone()
        given = {"seed": 5, "max_tokens": 80, "structured_outputs": rule}
        params = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, **given
        )
        expected = plain.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text
    assert text == expected


def test_a_client_reads_its_own_type_from_a_stream(server: Running) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Weather(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        city: str = pydantic.Field(max_length=12)
        degrees: int = pydantic.Field(ge=-50, le=50)

    parsed = server.client().chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Weather, seed=1, max_tokens=80
    )
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Weather)
    pieces = server.client().chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=FORMAT, seed=1, max_tokens=80, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert set(json.loads(text)) == {"city", "degrees"}


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "[xy]"}}, {"x", "y"}),
        ({"guided_regex": "[xy]"}, {"x", "y"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"guided_json": '{"const": 7}'}, {"7"}),
        ({"response_format": {"type": "json_object"}, "max_tokens": 2}, None),
    ],
)
@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_every_field_on_both_routes(
    server: Running, route: str, asked: dict[str, Any], allowed: set[str] | None
) -> None:
    prompt = {"messages": MESSAGES} if route == CHAT else {"prompt": "x = "}
    with server.http() as http:
        choice = http.post(route, json={"max_tokens": 30, **prompt, **asked}).json()["choices"][0]
    text = choice["message"]["content"] if route == CHAT else choice["text"]
    assert text in allowed if allowed else text.startswith("{")
    assert not allowed or choice["finish_reason"] == "stop"


def test_a_grammar_that_takes_long_holds_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles in its own thread, with a time limit: other prompts are tokenized and answered meanwhile."""
    release, compile_now = threading.Event(), GrammarCompiler.compile

    def slow(self: GrammarCompiler, rule: StructuredOutputsParams) -> Any:
        if rule.regex == "slow":
            assert release.wait(LONG)
        return compile_now(self, rule)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    with running(drafting(), grammar_timeout=0.5) as server, server.http() as http:
        refused: list[Any] = []
        body = {"prompt": "x", "guided_regex": "slow"}
        asking = threading.Thread(target=lambda: refused.append(http.post(TEXT, json=body)))
        asking.start()
        for asked in ({}, {"guided_regex": "[ab]"}):
            answer = server.client().completions.create(
                model="tiny", prompt="x", max_tokens=3, extra_body=asked
            )
            assert answer.choices[0].text
        asking.join(LONG)
        release.set()
        assert refused[0].status_code == 400
        assert "took longer than grammar_timeout=0.5 seconds" in refused[0].json()["error"]["message"]
        server.check_nothing_left()


# Calls that must come

FUNCTIONS: Any = {
    "weather": SCHEMA,
    "roll": {
        "type": "object",
        "properties": {"sides": {"enum": [6, 20]}},
        "required": ["sides"],
        "additionalProperties": False,
    },
}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
RESPONSE_TOOLS: Any = [{"type": "function", **tool["function"], "strict": True} for tool in CHAT_TOOLS]
MESSAGE_TOOLS: Any = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS.items()]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose chat template has calls in Hermes's format."""
    chain = {"method": "chain", "drafters": [{"method": "ff"}, EAGLE3]}
    path = str(scripted.model(tmp_path_factory.mktemp("caller")))
    with running(drafting(model=path, speculative_config=chain), served_model_name=("tiny",)) as started:
        yield started


def check_call(name: str, arguments: Any) -> None:
    """Assert that the arguments match the tool's schema."""
    if name == "roll":
        assert arguments in ({"sides": 6}, {"sides": 20})
    else:
        assert name == "weather" and set(arguments) == {"city", "degrees"}
        assert isinstance(arguments["degrees"], int) and len(arguments["city"]) <= 12


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_calls_what_it_must(caller: Running, seed: int) -> None:
    """The calls are the same streamed or whole, with drafts or without."""
    chats = caller.client().chat.completions
    told: Any = {"model": "tiny", "messages": MESSAGES, "tools": CHAT_TOOLS, "seed": seed, "max_tokens": 120}
    named: Any = {"type": "function", "function": {"name": "roll"}}
    for choice, parallel, names in (("required", False, set(FUNCTIONS)), (named, True, {"roll"})):
        asked: Any = {**told, "tool_choice": choice, "parallel_tool_calls": parallel}
        answers = [
            chats.create(**asked, extra_body={"speculation": {"num_speculative_tokens": most}}).choices[0]
            for most in (0, "auto")
        ]
        found = []
        for answer in answers:
            (call,) = answer.message.tool_calls or []
            check_call(call.function.name, json.loads(call.function.arguments))
            assert call.function.name in names
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            found.append((call.function.name, call.function.arguments))
        parts = [
            call.function
            for chunk in chats.create(**asked, stream=True)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        found.append((parts[0].name, "".join(part.arguments or "" for part in parts)))
        assert len(set(found)) == 1


def test_a_model_whose_template_has_no_tools_calls_what_it_must(server: Running) -> None:
    chats = server.client().chat.completions
    answer = chats.create(
        model="tiny",
        messages=MESSAGES,
        tools=CHAT_TOOLS[1:],
        tool_choice="required",
        parallel_tool_calls=False,
    ).choices[0]
    (call,) = answer.message.tool_calls or []
    check_call("roll", json.loads(call.function.arguments))
    assert answer.finish_reason == "tool_calls"


def test_responses_and_messages_call_what_they_must(caller: Running) -> None:
    responses = caller.client().responses
    told: Any = {"model": "tiny", "input": "What?", "tools": RESPONSE_TOOLS, "max_output_tokens": 120}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "roll"}]}
    only = responses.create(**told, tool_choice=allowed, parallel_tool_calls=False).output
    assert [item.name for item in only] == ["roll"]
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = responses.create(
            **told, tool_choice=choice, parallel_tool_calls=False, extra_body={"seed": 1}
        )
        (item,) = answer.output
        assert item.type == "function_call" and answer.status == "completed"
        check_call(item.name, json.loads(item.arguments))
        assert choice == "required" or item.name == "weather"
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0, timeout=LONG)
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": MESSAGE_TOOLS, "max_tokens": 120}
    for kind in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "roll"}):
        message = client.messages.create(**asked, tool_choice=kind, extra_body={"seed": 1})
        (block,) = message.content
        assert block.type == "tool_use" and message.stop_reason == "tool_use"
        check_call(block.name, block.input)
        assert kind["type"] == "any" or block.name == "roll"


def test_a_response_has_the_form_that_it_must(caller: Running) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}}
    answer = caller.client().responses.create(
        model="tiny", input="What?", text=form, max_output_tokens=80, extra_body={"seed": 5}
    )
    check_call("weather", json.loads(answer.output_text))
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0, timeout=LONG)
    told = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 80, "extra_body": {"seed": 5}}
    message = client.messages.create(**asked, output_config=told)
    check_call("weather", json.loads(message.content[0].text))


def test_calls_that_must_come_are_of_a_bounded_size(caller: Running) -> None:
    with caller.http() as http:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 70_000]}}}]
        body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
        refused = http.post(CHAT, json=body)
    assert refused.status_code == 400 and "at most max_grammar_chars=65536" in refused.text
    caller.check_nothing_left()


@pytest.mark.parametrize("is_token", [True, False])
def test_a_form_holds_for_what_follows_the_reasoning(tmp_path: Path, is_token: bool) -> None:
    """The prompt ends inside the reasoning; its closing marker must be one token, which a bias makes the model emit."""
    folder = scripted.model(tmp_path, scripted.TEMPLATE.replace("assistant\n{%", "assistant\n<think>{%"))
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    if is_token:
        (pad,) = (token for token in told["added_tokens"] if token["content"] == "<|pad|>")
        pad |= {"content": "</think>", "special": False}
        told["model"]["vocab"]["</think>"] = told["model"]["vocab"].pop("<|pad|>", pad["id"])
        file.unlink()
        file.write_text(json.dumps(told))
    asked = {"messages": MESSAGES, "max_tokens": 60, "logit_bias": {"4": 100}}
    with running(drafting(model=str(folder))) as server, server.http() as http:
        body = {**asked, "structured_outputs": {"choice": ["yes", "no"]}}
        response = http.post(CHAT, json=body)
        if not is_token:
            assert response.status_code == 400 and "'</think>' is no token of this" in response.text
            return
        assert response.json()["choices"][0]["message"]["content"] in ("yes", "no")
        body = {**asked, "tools": CHAT_TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
        message = http.post(CHAT, json=body).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        check_call("roll", json.loads(call["function"]["arguments"]))
