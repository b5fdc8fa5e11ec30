"""Anthropic's Messages API: bodies translated to chats, answers written as content blocks."""

from __future__ import annotations

import json
import secrets
from typing import Any

from pydantic import ConfigDict, Field

from draftproof.schema import shown
from draftproof.server import answers
from draftproof.server.conversation import (
    Ended,
    Event,
    add_call,
    as_content,
    assistant,
    content_of,
    failure,
    part_of,
    text_in,
    text_of,
)
from draftproof.server.parsers.reader import CallArguments, CallStart, Piece, Reasoning
from draftproof.server.protocol import Body, ChatBody, Objects, Speculation, Texts

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    messages: Objects
    system: str | list[Any] | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The equivalent chat. ValueError names what is wrong."""
        fields = {"messages": self._messages(), "tools": self._tools(), **self._choice()}
        fields |= {"reasoning_effort": self._effort(), "response_format": self._format()}
        return ChatBody.model_validate(fields | self._sampling())

    def _effort(self) -> Any:
        """The chat API's reasoning_effort; None: the model's default."""
        if self.thinking is None:
            return None
        kind = self.thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise ValueError(
                f"thinking={shown(self.thinking)}: its type must be enabled, adaptive or disabled"
            )
        return "none" if kind == "disabled" else (self.output_config or {}).get("effort") or "medium"

    def _format(self) -> dict[str, Any] | None:
        """The chat API's response_format."""
        name = "output_config.format" if self.output_format is None else "output_format"
        form = (self.output_config or {}).get("format") if self.output_format is None else self.output_format
        if form is None:
            return None
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise ValueError(f"{name}={shown(form)}: must be an object of type json_schema with a schema")
        return {"type": "json_schema", "json_schema": form}

    def _sampling(self) -> dict[str, Any]:
        return {"model": self.model}

    def _messages(self) -> list[dict[str, Any]]:
        system = text_of(self.system, "system") if self.system else ""
        made: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(self.messages):
            _add(made, message, f"messages[{i}]")
        return made

    def _tools(self) -> list[dict[str, Any]] | None:
        made = []
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type", "custom") != "custom" or not isinstance(tool.get("input_schema"), dict):
                raise ValueError(
                    f"tools[{i}]={shown(tool)}: must be a tool of the client's, with an input_schema"
                )
            function = {"name": text_in(tool, "name", f"tools[{i}]"), "parameters": tool["input_schema"]}
            if tool.get("description"):
                function["description"] = text_in(tool, "description", f"tools[{i}]")
            made.append({"type": "function", "function": function})
        return made or None

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        kind = self.tool_choice.get("type")
        if kind != "tool" and kind not in CHOICES:
            raise ValueError(
                f"tool_choice={shown(self.tool_choice)}: its type must be auto, any, tool or none"
            )
        chosen: Any = {"name": self.tool_choice.get("name")} if kind == "tool" else CHOICES[kind]
        is_single = self.tool_choice.get("disable_parallel_tool_use") is True
        return {"tool_choice": chosen, "parallel_tool_calls": False if is_single else None}


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    model_config = ConfigDict(strict=True, extra="allow")
    max_tokens: int
    stream: bool | None = None
    stop_sequences: Texts | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    speculation: Speculation | None = None
    metadata: dict[str, Any] | None = None
    request_id: str | None = Field(default=None, max_length=256)

    def _sampling(self) -> dict[str, Any]:
        names = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "request_id")
        told = {name: getattr(self, name) for name in names}
        return {**told, "stop": self.stop_sequences or None, "speculation": self.speculation}


def _add(made: list[dict[str, Any]], message: dict[str, Any], where: str) -> None:
    """Add a message to a chat's; it may become several, since a tool result is a message of its own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ValueError(f"{where}.role={shown(role)}: must be user or assistant")
    if not isinstance(content, list):
        made.append({"role": role, "content": text_of(content, f"{where}.content")})
        return
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            result = block.get("content")
            found = "" if result is None else content_of(result, f"{at}.content")
            told = {"role": "tool", "tool_call_id": text_in(block, "tool_use_id", at), "content": found}
            made.append(told)
        elif kind == "tool_use" and role == "assistant":
            given = block.get("input")
            if not isinstance(given, dict):
                raise ValueError(f"{at}.input={shown(given)}: must be an object")
            add_call(made, text_in(block, "id", at), text_in(block, "name", at), given)
        elif kind == "thinking" and role == "assistant":
            assistant(made)["reasoning_content"] = text_in(block, "thinking", at)
        elif kind != "redacted_thinking" and role == "assistant":
            message = assistant(made)
            message["content"] = "\n".join(filter(None, (message["content"], text_of([block], at))))
        elif kind != "redacted_thinking":
            parts.append(part_of(block, at))
    if parts:
        made.append({"role": role, "content": as_content(parts)})


class MessageWriter:
    """Writes one answer as content blocks; a block is open until a piece of another kind comes."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, model: str, seed: int | None) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
            "seed": seed,
        }
        self._content: list[dict[str, Any]] = self._message["content"]
        self._arguments = ""
        self._is_open = False

    def begin(self, num_prompt_tokens: int) -> list[Event]:
        self._message["usage"] = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        return [("message_start", {"type": "message_start", "message": {**self._message, "content": []}})]

    def take(self, piece: Piece) -> list[Event]:
        found: list[Event] = []
        if isinstance(piece, CallStart):
            found += self._open(
                {"type": "tool_use", "id": answers.call_id(), "name": piece.name, "input": {}}
            )
        elif isinstance(piece, CallArguments):
            self._arguments += piece.text
            found.append(self._delta({"type": "input_json_delta", "partial_json": piece.text}))
        else:
            kind, name = ("thinking", "thinking") if isinstance(piece, Reasoning) else ("text", "text")
            if not self._is_open or self._content[-1]["type"] != kind:
                signed = {"signature": ""} if isinstance(piece, Reasoning) else {}
                found += self._open({"type": kind, name: "", **signed})
            self._content[-1][name] += piece.text
            found.append(self._delta({"type": f"{kind}_delta", name: piece.text}))
        return found

    def end(self, ended: Ended, usage: dict[str, Any]) -> list[Event]:
        found = self._close()
        wrong = failure(ended)
        if wrong is not None:
            return [*found, ("error", wrong.body_for("/v1/messages"))]
        reason, sequence = STOP_REASONS.get(ended.finish_reason or "", ended.finish_reason), None
        if isinstance(ended.stop_reason, str):
            reason, sequence = ("tool_use" if reason == "tool_use" else "stop_sequence"), ended.stop_reason
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        counted = {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
        }
        last = {"stop_reason": reason, "stop_sequence": sequence}
        self._message |= {**last, "usage": counted}
        told = {"type": "message_delta", "delta": last, "usage": counted}
        return [*found, ("message_delta", told), ("message_stop", {"type": "message_stop"})]

    def whole(self) -> dict[str, Any]:
        return self._message

    def _open(self, block: dict[str, Any]) -> list[Event]:
        found = self._close()
        self._content.append(block)
        self._is_open, self._arguments = True, ""
        told = {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}
        return [*found, ("content_block_start", told)]

    def _delta(self, delta: dict[str, Any]) -> Event:
        told = {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}
        return "content_block_delta", told

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        block = self._content[-1]
        if block["type"] == "tool_use":
            block["input"] = _loaded(self._arguments)
        self._is_open = False
        return [("content_block_stop", {"type": "content_block_stop", "index": len(self._content) - 1})]


def _loaded(text: str) -> dict[str, Any]:
    """The arguments of a call; empty if the model did not write a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
