"""Agents at a server: tools, Responses and Messages, by the clients that they use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from draftproof.server.parsers import Syntax
from draftproof.server.responses import ResponseStore
from draftproof.server.settings import ServerConfig
from tests.server.running import LONG, Running, running
from tests.server.scripted import TEMPLATE, TURN, scripted

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: pip install anthropic")
MODEL = "scripted"
NUM_FILES = 10
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "search",
        "description": "Files that hold a text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
    {
        "name": "edit",
        "description": "Put a text in the place of another in a file.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("path", "old", "new")},
            "required": ["path", "old", "new"],
        },
    },
]
CHAT_TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
MESSAGE_TOOLS: Any = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS
]
CODE: Any = {"type": "custom", "name": "run", "description": "Run code."}
TASK = "Write 'new' for 'old' everywhere."
ASKED: Any = [{"role": "user", "content": "Hi"}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# Start of the last message -> the model's answer.
SAYS = {
    "Hi": "Hello!",
    "think": "<think>\nHm, well.\n</think>\n\nYes.",
    "both": f"Let me see.\n{call('search', text='a')}\n{call('edit', path='b', old='c', new='d')}",
    "search": call("search", text='a "quoted" word'),
    "code": call("run", input='print("x")\n'),
    "long": "word " * 100,
    "stop": "one two three STOP four",
}


def says(prompt: str) -> str:
    turns = prompt.split(TURN)
    last = turns[-2].partition("\n")[2].removesuffix("\n").removesuffix("<|im_end|>")
    if TASK in prompt:
        return next_turn(prompt, last)
    if prompt.count(f"{TURN}tool\n"):
        return f"It said: {last}"
    return SAYS.get(last, f"You said: {last}")


def next_turn(prompt: str, last: str) -> str:
    """The agent's next turn: alternately a search for a word, and an edit of the file that was found."""
    number, is_edit = divmod(prompt.count(f"{TURN}tool\n"), 2)
    if number == NUM_FILES:
        return "Done."
    if is_edit:
        return call("edit", path=last, old=f"old{number}.", new=f"new{number}.")
    return f"Next.\n{call('search', text=f'old{number}.')}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = scripted(tmp_path_factory.mktemp("scripted"), says, max_model_len=4096)
    with running(llm, served_model_name=(MODEL,), max_stored_responses=30) as started:
        yield started


@pytest.fixture
def claude(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LONG)


def asking(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_what_is_too_long_to_be_kept_drives_nobody_out() -> None:
    store = ResponseStore(ServerConfig(max_stored_responses=2, max_stored_chars=1000))
    for number in range(3):
        store.put({"id": f"{number}"}, [{"content": "x" * 100}])
    store.put({"id": "long"}, [{"content": "x" * 1000}])
    kept = [f"{number}" for number in (0, 1, 2, "long") if f"{number}" in store._stored]
    assert kept == ["1", "2"] and 200 < store.num_chars < 400
    for response_id in kept:
        store.delete(response_id)
    assert store.num_chars == 0


# Chats


def test_calls_of_a_chat(server: Running) -> None:
    chats = server.client().chat.completions
    answer = chats.create(model=MODEL, messages=asking("both"), tools=CHAT_TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me see."
    found = [(c.function.name, json.loads(c.function.arguments)) for c in answer.message.tool_calls or []]
    assert found == [("search", {"text": "a"}), ("edit", {"path": "b", "old": "c", "new": "d"})]
    calls: dict[int, Any] = {}
    text, reasons = "", []
    num_parts = 0
    for chunk in chats.create(model=MODEL, messages=asking("both"), tools=CHAT_TOOLS, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for part in delta.tool_calls or []:
            if part.id:
                calls[part.index] = [part.id, part.function.name, ""]
            else:
                num_parts += 1
            calls[part.index][2] += part.function.arguments
    assert text == "Let me see." and reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    assert [(name, json.loads(arguments)) for _, name, arguments in calls.values()] == found
    assert list(calls) == [0, 1] and num_parts > 6, "arguments come as they are written"


def test_choices_of_tools(server: Running) -> None:
    client = server.client()
    chats = client.chat.completions
    told: Any = {"model": MODEL, "messages": asking("both"), "tools": CHAT_TOOLS}
    one = chats.create(**told, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls or []) == 1 and one.finish_reason == "tool_calls"
    none = chats.create(**told, tool_choice="none").choices[0]
    assert none.message.tool_calls is None and none.message.content == SAYS["both"]
    for choice in ("required", {"type": "function", "function": {"name": "edit"}}):
        with pytest.raises(BadRequestError, match=r"tool_choice=.*: the answer's form is given too"):
            chats.create(**told, tool_choice=choice, response_format={"type": "json_object"})
    with pytest.raises(
        BadRequestError, match=r"tool_choice=.*odd.*: must be auto, none, required, or functions"
    ):
        chats.create(**told, tool_choice={"type": "function", "function": {"name": "odd"}})


ALLOWED: Any = [{"type": "function", "name": "edit"}]


def test_tools_that_are_allowed(server: Running) -> None:
    """The prompt lists the allowed tools only, and calls of others are not parsed."""
    client = server.client()
    named = [{"type": "function", "function": {"name": "edit"}}]
    chat: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    told: Any = {"model": MODEL, "messages": asking("Hi"), "tools": CHAT_TOOLS}
    one: Any = {"model": MODEL, "messages": asking("Hi"), "tools": CHAT_TOOLS[1:]}
    expected = client.chat.completions.create(**one).usage
    found = client.chat.completions.create(**told, tool_choice=chat)
    assert found.usage is not None and expected is not None
    assert found.usage.prompt_tokens == expected.prompt_tokens
    both = client.chat.completions.create(**{**told, "messages": asking("both")}, tool_choice=chat).choices[0]
    assert len(both.message.tool_calls or []) == 2, "auto allows several"
    response: Any = {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}
    answer = client.responses.create(model=MODEL, input="Hi", tools=RESPONSE_TOOLS, tool_choice=response)
    assert answer.usage is not None and answer.usage.input_tokens == expected.prompt_tokens
    for wrong, message in (
        ({**response, "tools": [{"type": "function", "name": "odd"}]}, "functions of `tools` by name"),
        ({**response, "tools": []}, "functions of `tools` by name"),
        ({**response, "mode": "often"}, "tool_choice: mode='often': must be auto or required"),
    ):
        with pytest.raises(BadRequestError, match=message):
            client.responses.create(model=MODEL, input="Hi", tools=RESPONSE_TOOLS, tool_choice=wrong)


def test_tokens_of_reasoning_are_counted(server: Running, claude: Any) -> None:
    """Tokens up to the closing marker are counted in the usage of all three APIs, streamed or whole."""
    client = server.client()
    chats, told = client.chat.completions, {"model": MODEL, "messages": asking("think")}
    llm = server.service.llm.llm
    ids = llm.tokenizer.encode(SAYS["think"], add_special_tokens=False)
    expected = min(k for k in range(len(ids)) if "</think>" in llm.tokenizer.decode(ids[:k]))
    assert 5 < expected < len(ids)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    (*_, last) = chats.create(**told, **options)
    found = [chats.create(**told).usage, last.usage]
    counts = [usage.completion_tokens_details.reasoning_tokens for usage in found]
    counts.append(
        client.responses.create(model=MODEL, input="think").usage.output_tokens_details.reasoning_tokens
    )
    message = claude.messages.create(model=MODEL, max_tokens=50, messages=asking("think"))
    counts.append(message.usage.output_tokens_details.thinking_tokens)
    assert counts == [expected] * 4
    cut = chats.create(**told, max_tokens=4).usage
    assert cut.completion_tokens == cut.completion_tokens_details.reasoning_tokens == 4
    assert chats.create(model=MODEL, messages=ASKED).usage.completion_tokens_details.reasoning_tokens == 0


def test_effort_is_told_to_a_template_that_asks_for_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>{{ enable_thinking }} {{ reasoning_effort }}<|im_end|>\n"
    )
    seen: list[str] = []
    llm = scripted(tmp_path, lambda prompt: seen.append(prompt) or "x", template=template)  # type: ignore[func-returns-value]
    with running(llm, served_model_name=(MODEL,)) as started, started.http() as http:
        for route, body, said in (
            ("chat/completions", {"messages": ASKED, "reasoning_effort": "none"}, "False "),
            ("chat/completions", {"messages": ASKED, "reasoning_effort": "low"}, "True low"),
            ("responses", {"input": "Hi", "reasoning": {"effort": "high", "summary": "auto"}}, "True high"),
            ("messages", {"messages": ASKED, "max_tokens": 5, "thinking": {"type": "disabled"}}, "False "),
            ("messages", {"messages": ASKED, "max_tokens": 5, "thinking": {"type": "adaptive"},
                          "output_config": {"effort": "max"}}, "True max"),
            ("messages", {"messages": ASKED, "max_tokens": 5}, " "),
        ):  # fmt: skip
            assert http.post(f"/v1/{route}", json=body).status_code == 200
            assert seen[-1].endswith(f"<|im_start|>{said}<|im_end|>")


def test_reasoning_of_a_chat(server: Running) -> None:
    chats = server.client().chat.completions
    message: Any = chats.create(model=MODEL, messages=asking("think")).choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Yes.", *["Hm, well.\n"] * 2)
    told = {"content": "", "reasoning": ""}
    for chunk in chats.create(model=MODEL, messages=asking("think"), stream=True):
        for name in told:
            told[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert told == {"content": "Yes.", "reasoning": "Hm, well.\n"}


def test_what_was_called_goes_back_into_the_template(server: Running) -> None:
    """Arguments are passed as an object, reasoning under the template's key."""
    function = {"name": "search", "arguments": '{"text": "x"}'}
    calls = [{"id": "123456789", "type": "function", "function": function}]
    messages = [
        *asking("search"),
        {"role": "assistant", "reasoning": "Hm.", "content": None, "tool_calls": calls},
    ]
    with server.http() as http:
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        ids = http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert (
            '<think>Hm.</think><tool_call>{"name": "search", "arguments": {"text": "x"}}</tool_call>' in text
        )
        told = {"messages": messages, "tools": CHAT_TOOLS}
        counted = http.post("/tokenize", json=told).json()["tokens"]
        answer = http.post("/v1/chat/completions", json={**body, **told}).json()
        assert counted == answer["prompt_token_ids"] != ids
        function["arguments"] = "[1]"
        refused = http.post("/v1/chat/completions", json={"messages": messages})
        assert refused.status_code == 400 and "must be a JSON object" in refused.text


def test_tools_of_a_model_whose_template_has_none(tmp_path: Path) -> None:
    """Tools are described and called in plain text, in the system message; results are user messages."""
    plain = TEMPLATE[TEMPLATE.index("{% for m in messages %}") :].partition("{% for c in")[0]
    told = f"{plain}<|im_end|>\n{{% endfor %}}<|im_start|>assistant\n"
    assert "tool" not in told
    seen: list[str] = []

    def says(prompt: str) -> str:
        seen.append(prompt)
        return "Found." if "<tool_response>" in prompt else call("search", text="x")

    llm = scripted(tmp_path, says, template=told, max_model_len=2048)
    with running(llm, served_model_name=(MODEL,)) as started:
        chats = started.client().chat.completions
        messages: list[Any] = [{"role": "system", "content": "Be kind."}, *asking("Where?")]
        message = chats.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message
        (called,) = message.tool_calls or []
        assert (called.function.name, json.loads(called.function.arguments)) == ("search", {"text": "x"})
        result: Any = {
            "role": "tool",
            "tool_call_id": called.id,
            "content": [{"type": "text", "text": "here"}],
        }
        messages += [message.model_dump(include={"role", "content", "tool_calls"}), result]
        answer = chats.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0]
        assert answer.message.content == "Found." and answer.finish_reason == "stop"
        chats.create(model=MODEL, messages=messages)
    first, second, third = seen
    assert first.startswith("<|im_start|>system\nBe kind.\n\nYou can call tools.")
    assert all(json.dumps(function) in first for function in FUNCTIONS)
    written = call("search", text="x")
    assert f"assistant\n{written}<|im_end|>\n<|im_start|>user\n<tool_response>\nhere\n</tool_response>" in (
        second.replace("\n\n", "\n")  # newlines between joined parts of a text
    )
    assert third.startswith("<|im_start|>system\nBe kind.<|im_end|>"), "nobody offers tools there"
    with pytest.raises(
        ValueError, match="tool_call_parser='llama3': the model's chat template tells of no tools"
    ):
        Syntax(told, "llama3", None)


# Responses


def test_responses(server: Running) -> None:
    responses = server.client().responses
    answer = responses.create(model=MODEL, input="Hi", instructions="Be kind.")
    assert answer.output_text == "Hello!" and answer.status == "completed"
    assert answer.usage is not None and answer.usage.output_tokens > 0
    assert responses.retrieve(answer.id).output == answer.output
    more = responses.create(model=MODEL, input="and more", previous_response_id=answer.id)
    assert more.output_text == "You said: and more" and more.previous_response_id == answer.id
    assert more.usage is not None and more.usage.input_tokens > answer.usage.input_tokens
    responses.delete(answer.id)
    kept = responses.create(model=MODEL, input="Hi", store=False)
    with server.http() as http:  # numbers that a double or 64 bits cannot hold
        vast = b'{"input": "Hi", "metadata": {"a": 1e400, "b": 1180591620717411303424}}'
        told = http.post("/v1/responses", content=vast, headers={"Content-Type": "application/json"}).json()
        assert told["metadata"] == {"a": None, "b": 1 << 70}
        assert http.get(f"/v1/responses/{told['id']}").json() == told
    for gone in (answer.id, kept.id):
        with pytest.raises(NotFoundError, match="there is no such response"):
            responses.create(model=MODEL, input="x", previous_response_id=gone)
    cut = responses.create(model=MODEL, input="long", max_output_tokens=5)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]


def test_responses_are_kept_within_a_bound(server: Running) -> None:
    responses = server.client().responses
    ids = [responses.create(model=MODEL, input="Hi").id for _ in range(31)]
    assert responses.retrieve(ids[1]).id == ids[1]
    with pytest.raises(NotFoundError, match="there is no such response"):
        responses.retrieve(ids[0])


@pytest.mark.parametrize("text", ["Hi", "think", "both", "search", "code", "long"])
def test_events_of_a_response(server: Running, text: str) -> None:
    """The client's result equals the response in the last event, the stored one, and the sum of the deltas."""
    client = server.client()
    tools = [*RESPONSE_TOOLS, CODE]
    told: dict[str, str] = {}
    numbers, kinds = [], []
    with client.responses.stream(model=MODEL, input=text, tools=tools, max_output_tokens=90) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            kinds.append(event.type)
            if event.type.endswith(".delta"):
                told[event.item_id] = told.get(event.item_id, "") + event.delta
    final = event.response  # the client's own `get_final_response` accepts completed ones only
    assert numbers == list(range(len(numbers)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == ("response.incomplete" if text == "long" else "response.completed")
    kept = client.responses.retrieve(final.id)
    assert [item.id for item in kept.output] == [item.id for item in final.output] == list(told)
    whole = client.responses.create(model=MODEL, input=text, tools=tools, max_output_tokens=90)
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    for item, same, stored in zip(final.output, whole.output, kept.output, strict=True):
        written = {text_of(one) for one in (item, same, stored)}
        assert written == {told[item.id]}
    for kind, done in DONE.items():
        expected = sum(item.type == kind for item in final.output)
        assert kinds.count(f"response.{done}.done") == expected


DONE = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}


def text_of(item: Any) -> str:
    fields = {"function_call": "arguments", "custom_tool_call": "input"}
    return getattr(item, fields[item.type]) if item.type in fields else item.content[0].text


def test_a_tool_of_a_response_that_takes_text(server: Running) -> None:
    responses = server.client().responses
    first = responses.create(model=MODEL, input="code", tools=[CODE])
    called: Any = first.output[0]
    assert (called.type, called.name, called.input) == ("custom_tool_call", "run", 'print("x")\n')
    result: Any = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "x"}
    after = responses.create(model=MODEL, input=[result], tools=[CODE], previous_response_id=first.id)
    assert after.output_text == "It said: x"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0].type='computer_call'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role='robot'"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role="),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url=None",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]="),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].call_id=None"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]="),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name=None"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "json_schema must be"),
        ({"input": "x", "text": {"format": "json"}}, "text.format='json': must be an object"),
        ({"input": "x", "background": True}, "background=True"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt="),
        ({"input": "x", "conversation": "conv_1"}, "conversation: is not served"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs=2"),
        ({"input": "x", "reasoning": {"effort": "odd"}}, "reasoning_effort='odd'"),
        ({"input": "x", "tools": [{"type": "local_shell"}]}, "tools[0]="),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type='item_reference'"),
        ({"input": 1}, "input=1"),
    ],
)
def test_wrong_responses_are_refused(server: Running, body: dict[str, Any], message: str) -> None:
    with server.http() as http:
        response = http.post("/v1/responses", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert server.service.admission.num_outputs == server.service.llm.num_open == 0


# Messages


def test_messages(claude: Any) -> None:
    told: Any = {"model": MODEL, "max_tokens": 50}
    answer = claude.messages.create(**told, system="Be kind.", messages=ASKED)
    assert answer.content[0].text == "Hello!" and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
    cut = claude.messages.create(model=MODEL, max_tokens=5, messages=asking("long"))
    assert cut.stop_reason == "max_tokens"
    stopped = claude.messages.create(**told, messages=asking("stop"), stop_sequences=["STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "one two three "
    count = claude.messages.count_tokens(model=MODEL, system="Be kind.", messages=ASKED)
    assert count.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("text", ["Hi", "think", "both", "search", "long"])
def test_events_of_a_message(claude: Any, text: str) -> None:
    """The client's result from the events equals the whole answer, except for ids."""
    told: Any = {
        "model": MODEL,
        "max_tokens": 90,
        "messages": asking(text),
        "tools": MESSAGE_TOOLS,
        "seed": 1,
    }
    told["extra_body"] = {"seed": told.pop("seed")}
    kinds = []
    with claude.messages.stream(**told) as stream:
        for event in stream:
            kinds += [event.type]
        streamed = stream.get_final_message()
    whole = claude.messages.create(**told)
    made, expected = (m.model_dump(exclude={"id", "content", "usage"}) for m in (streamed, whole))
    assert made == expected and streamed.usage.output_tokens == whole.usage.output_tokens
    blocks = [
        [block.model_dump(exclude={"id", "parsed_output"}) for block in m.content] for m in (streamed, whole)
    ]
    assert blocks[0] == blocks[1]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    types = {"Hi": ["text"], "think": ["thinking", "text"], "both": ["text", "tool_use", "tool_use"]}
    assert [block.type for block in whole.content] == types.get(text, [whole.content[0].type])
    assert whole.stop_reason == {"both": "tool_use", "search": "tool_use", "long": "max_tokens"}.get(
        text, "end_turn"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role='robot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source=None",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]="),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, ".input=None"),
        ({"tools": [{"name": "x"}]}, "tools[0]="),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]="),
        ({"tool_choice": {"type": "any"}}, "tool_choice='required': needs `tools`"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice={'name': 'f'}: needs `tools`"),
        ({"tool_choice": {"type": "odd"}}, "tool_choice="),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"thinking": {"type": "odd"}}, "thinking="),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format="),
        ({"output_format": {"type": "json_schema"}}, "json_schema must be"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: is not served"),
    ],
)
def test_wrong_messages_are_refused(server: Running, changed: dict[str, Any], message: str) -> None:
    with server.http() as http:
        response = http.post("/v1/messages", json={"messages": ASKED, "max_tokens": 5, **changed})
    assert response.status_code == 400 and server.service.llm.num_open == 0
    told = response.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert message in told["error"]["message"]


def test_keys_as_the_client_of_messages_sends_them(tmp_path: Path) -> None:
    with running(scripted(tmp_path, says), api_key=("secret",), served_model_name=(MODEL,)) as server:
        told: Any = {"model": MODEL, "max_tokens": 9, "messages": ASKED}
        good = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
        assert good.messages.create(**told).content[0].text == "Hello!"
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**told)


# An agent's loop


def by_chats(server: Running, act: Callable[[str, Any], str]) -> tuple[int, str]:
    messages = asking(TASK)
    for turn in range(100):
        stream = server.client().chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS)
        with stream as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
        if not message.tool_calls:
            return turn, message.content or ""
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for one in message.tool_calls:
            result = act(one.function.name, json.loads(one.function.arguments))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    raise AssertionError("it does not end")


def by_responses(server: Running, act: Callable[[str, Any], str]) -> tuple[int, str]:
    given: Any = TASK
    previous: str | None = None
    for turn in range(100):
        told: Any = {"model": MODEL, "input": given, "tools": RESPONSE_TOOLS}
        if previous is not None:
            told["previous_response_id"] = previous
        with server.client().responses.stream(**told) as events:
            for _ in events:
                pass
            response = events.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return turn, response.output_text
        previous = response.id
        given = [
            {
                "type": "function_call_output",
                "call_id": c.call_id,
                "output": act(c.name, json.loads(c.arguments)),
            }
            for c in calls
        ]
    raise AssertionError("it does not end")


def by_messages(server: Running, act: Callable[[str, Any], str]) -> tuple[int, str]:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=LONG)
    messages = asking(TASK)
    for turn in range(100):
        told: Any = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": MESSAGE_TOOLS}
        with client.messages.stream(**told) as events:
            for _ in events:
                pass
            message = events.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return turn, message.content[0].text
        messages.append(
            {
                "role": "assistant",
                "content": [b.model_dump(exclude={"parsed_output"}) for b in message.content],
            }
        )
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": act(c.name, c.input)} for c in calls
        ]
        messages.append({"role": "user", "content": results})
    raise AssertionError("it does not end")


@pytest.mark.parametrize("loop", [by_chats, by_responses, by_messages])
def test_an_agent_edits_files(server: Running, tmp_path: Path, loop: Any) -> None:
    """An agent's twenty turns, each of which needs the result of the one before."""
    for number in range(NUM_FILES):
        (tmp_path / f"file{number}.txt").write_text(f"This is old{number}.\n")

    def act(name: str, given: dict[str, str]) -> str:
        if name == "search":
            return next(p.name for p in sorted(tmp_path.iterdir()) if given["text"] in p.read_text())
        path = tmp_path / given["path"]
        path.write_text(path.read_text().replace(given["old"], given["new"]))
        return "edited"

    assert loop(server, act) == (2 * NUM_FILES, "Done.")
    for number in range(NUM_FILES):
        assert (tmp_path / f"file{number}.txt").read_text() == f"This is new{number}.\n"
