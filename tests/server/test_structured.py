"""Answers of a form that the request gives, over HTTP, by real clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from draftproof import LLM, SamplingParams, StructuredOutputsParams
from draftproof.grammar.matcher import GrammarCompiler
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
    """It has its time limit, in a thread of its own: others' prompts are encoded and answered meanwhile."""
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
