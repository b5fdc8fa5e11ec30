"""OpenAI's Responses API: bodies translated to chats, and the store of answers."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field

from draftproof.schema import shown
from draftproof.server.conversation import add_call, assistant, content_of, text_in, text_of
from draftproof.server.errors import RefusalError
from draftproof.server.protocol import NOTHING_ASKED, Body, ChatBody, Objects, Speculation
from draftproof.server.settings import ServerConfig

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
INPUT = "input"  # the one argument of a custom tool, its text
TAKES_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
Items = Sequence[dict[str, Any]]


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    model_config = ConfigDict(strict=True, extra="allow")
    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    speculation: Speculation | None = None
    request_id: str | None = Field(default=None, max_length=256)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The new items of the conversation."""
        if isinstance(self.input, list):
            return self.input
        return [{"type": "message", "role": "user", "content": self.input}]

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the custom tools, which take plain text."""
        given = self.tools or ()
        return frozenset(str(tool.get("name")) for tool in given if tool.get("type") == "custom")

    def chat(self, before: Items = ()) -> ChatBody:
        """The equivalent chat; `before`: items of the conversation that it continues. ValueError names what is
        wrong."""
        for name, asked in (
            ("background", self.background),
            ("prompt", (self.model_extra or {}).get("prompt")),
            ("top_logprobs", (self.model_extra or {}).get("top_logprobs")),
        ):
            if asked not in NOTHING_ASKED:
                raise ValueError(f"{name}={shown(asked)}: is not served; leave it out")
        names = ("model", "stream", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls")
        fields = {name: getattr(self, name) for name in (*names, "request_id", "speculation", "user")}
        fields |= {"max_tokens": self.max_output_tokens, "tools": self._tools()}
        fields |= {
            "response_format": self._format(),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        fields |= {"messages": self._messages([*before, *self.items]), "tool_choice": self.tool_choice}
        return ChatBody.model_validate(fields)

    def _format(self) -> dict[str, Any] | None:
        """The chat API's response_format, in which a schema's fields are nested one level deeper."""
        form = (self.text or {}).get("format")
        if form is not None and not isinstance(form, dict):
            raise ValueError(f"text.format={shown(form)}: must be an object with a type")
        if form and form.get("type") == "json_schema":
            return {"type": "json_schema", "json_schema": form}
        return form or None

    def _messages(self, items: Items) -> list[dict[str, Any]]:
        """The chat's messages; all system text is one message in front, since many templates accept no other."""
        made: list[dict[str, Any]] = []
        for i, item in enumerate(items):
            _add(made, item, f"input[{i}]")
        told = [message["content"] for message in made if message["role"] == "system"]
        system = "\n\n".join([*([self.instructions] if self.instructions else []), *told])
        others = [message for message in made if message["role"] != "system"]
        return [*([{"role": "system", "content": system}] if system else []), *others]

    def _tools(self) -> list[dict[str, Any]] | None:
        made = []
        for i, tool in enumerate(self.tools or ()):
            kind = tool.get("type")
            if kind not in ("function", "custom"):
                raise ValueError(f"tools[{i}]={shown(tool)}: must be of type function or custom")
            function = {"name": text_in(tool, "name", f"tools[{i}]")}
            parameters = tool.get("parameters") if kind == "function" else TAKES_TEXT
            if tool.get("description") is not None:
                function["description"] = text_in(tool, "description", f"tools[{i}]")
            made.append({"type": "function", "function": {**function, "parameters": parameters}})
        return made or None


def _add(made: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item of a conversation to a chat's messages."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where}.role={shown(role)}: must be one of {', '.join(ROLES)}")
        reads = content_of if role == "user" else text_of  # only users may send images
        text = reads(item.get("content"), f"{where}.content")
        if role == "assistant" and made and made[-1] == {**made[-1], "role": role, "content": ""}:
            made[-1]["content"] = text  # the message was begun by its reasoning
        else:
            made.append({"role": ROLES[role], "content": text})
    elif kind == "function_call":
        arguments = text_in(item, "arguments", where)
        add_call(made, text_in(item, "call_id", where), text_in(item, "name", where), arguments)
    elif kind == "custom_tool_call":
        given = {INPUT: text_in(item, "input", where)}
        add_call(made, text_in(item, "call_id", where), text_in(item, "name", where), given)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = content_of(item.get("output"), f"{where}.output")
        made.append({"role": "tool", "tool_call_id": text_in(item, "call_id", where), "content": content})
    elif kind == "reasoning":
        thought = item.get("content") or item.get("summary") or ""
        made.append({"role": "assistant", "content": ""})
        assistant(made)["reasoning_content"] = text_of(thought, f"{where}.content")
    else:
        raise ValueError(f"{where}.type={shown(kind)}: is not served; give messages, calls and their outputs")


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with; arguments without the field `INPUT` are taken as that text."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = found.get(INPUT) if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer, and all items of the conversation up to and including it."""

    response: dict[str, Any]
    items: Items
    num_chars: int


class ResponseStore:
    """Answers that clients can fetch again or continue; the oldest are dropped beyond the configured limits."""

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.num_chars = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response: dict[str, Any], items: Items) -> None:
        """Store an answer."""
        num_chars = len(str(items)) + len(str(response))
        if num_chars > self._limits.max_stored_chars:
            return  # too large even without all others
        self._stored[response["id"]] = Stored(response, items, num_chars)
        self.num_chars += num_chars
        while len(self) > self._limits.max_stored_responses or self.num_chars > self._limits.max_stored_chars:
            self.num_chars -= self._stored.popitem(last=False)[1].num_chars

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """The stored answer. 404 if it is unknown or was dropped."""
        found = self._stored.get(response_id)
        if found is None:
            message = f"{param or 'response_id'}={response_id!r:.80}: there is no such response any more, or never was"
            raise RefusalError(404, message, param=param, code="response_not_found")
        return found

    def delete(self, response_id: str) -> None:
        """Delete an answer. 404 as in `get`."""
        self.num_chars -= self.get(response_id).num_chars
        del self._stored[response_id]
