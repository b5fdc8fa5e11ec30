"""Answers of OpenAI's Responses API: items, and the events that stream them."""

from __future__ import annotations

import secrets
import time
from typing import Any

from draftproof.server import answers
from draftproof.server.conversation import Ended, Event, failure
from draftproof.server.parsers.reader import CallArguments, CallStart, Piece, Reasoning
from draftproof.server.responses import ResponsesBody, ResponseStore, custom_input
from draftproof.server.streaming import KEEP_ALIVE

STARTS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field of a call's item
PARTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
}  # the type of the part that holds an item's text


class ResponseWriter:
    """Writes one answer as items; an item is open until a piece of another kind comes."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self, body: ResponsesBody, head: dict[str, Any], before: list[dict[str, Any]], store: ResponseStore
    ) -> None:
        """`head`: as in the chat API. `before`: the conversation up to the answer."""
        self._body = body
        self._before = before
        self._store = store
        self._number = -1
        self._item: dict[str, Any] | None = None
        self._arguments = ""
        self._output: list[dict[str, Any]] = []
        self._response = self._begun(head)

    def _begun(self, head: dict[str, Any]) -> dict[str, Any]:
        body = self._body
        same = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")
        return {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": head["created"],
            "status": "in_progress",
            "model": head["model"],
            "output": [],
            **{name: getattr(body, name) for name in same},
            "store": body.store is not False,
            "metadata": body.metadata or {},
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "truncation": "disabled",
            "background": False,
            "reasoning": {"effort": None, **(body.reasoning or {}), "summary": None},
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "seed": head["seed"],
            "system_fingerprint": head["system_fingerprint"],
        }

    def begin(self, num_prompt_tokens: int) -> list[Event]:
        names = ("created", "in_progress")
        return [self._event(name, response=dict(self._response)) for name in names]

    def take(self, piece: Piece) -> list[Event]:
        if isinstance(piece, CallStart):
            kind = "custom_tool_call" if piece.name in self._body.custom_tools else "function_call"
            self._arguments = ""
            return self._open(kind, call_id=answers.call_id(), name=piece.name, **{ARGUMENTS[kind]: ""})
        if isinstance(piece, CallArguments):
            return self._argue(piece.text)
        kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        found: list[Event] = []
        if self._item is None or self._item["type"] != kind:
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            found += self._open(kind, **own, content=[])
            assert self._item is not None, "it was opened"
            self._item["content"].append(_part(kind, ""))
            found.append(self._in_item("content_part.added", content_index=0, part=_part(kind, "")))
        assert self._item is not None, "it was opened"
        self._item["content"][0]["text"] += piece.text
        told = {"content_index": 0, "delta": piece.text, **({"logprobs": []} if kind == "message" else {})}
        return [*found, self._in_item(f"{PARTS[kind]}.delta", **told)]

    def _argue(self, text: str) -> list[Event]:
        """Events for a part of a call's arguments. A custom tool's text is sent when it is complete: it is written as
        JSON."""
        assert self._item is not None, "a call was begun"
        self._arguments += text
        if self._item["type"] == "custom_tool_call":
            return []
        self._item["arguments"] = self._arguments
        return [self._in_item("function_call_arguments.delta", delta=text)]

    def end(self, ended: Ended, usage: dict[str, Any]) -> list[Event]:
        is_whole = ended.finish_reason in ("stop", "tool_calls")
        found = self._close("completed" if is_whole else "incomplete")
        status = "completed" if is_whole else "incomplete"
        wrong = failure(ended)
        if wrong is not None:
            status = "failed"
            self._response["error"] = {"code": "server_error", "message": wrong.message}
        elif not is_whole:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response |= {
            "status": status,
            "output": self._output,
            "completed_at": int(time.time()) if is_whole else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._response["store"] and wrong is None:
            self._store.put(self._response, [*self._before, *self._output])
        return [*found, self._event(status, response=self._response)]

    def whole(self) -> dict[str, Any]:
        return self._response

    def _open(self, kind: str, /, **fields: Any) -> list[Event]:
        found = self._close("completed")
        item_id = f"{STARTS[kind]}_{secrets.token_hex(12)}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._output.append(self._item)
        copied = {**self._item, **({"content": []} if "content" in fields else {})}
        return [*found, self._event("output_item.added", output_index=len(self._output) - 1, item=copied)]

    def _close(self, status: str) -> list[Event]:
        item = self._item
        if item is None:
            return []
        kind = item["type"]
        found: list[Event] = []
        item["status"] = status
        if kind in PARTS:
            part = item["content"][0]
            told: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            found.append(self._in_item(f"{PARTS[kind]}.done", content_index=0, text=part["text"], **told))
            found.append(self._in_item("content_part.done", content_index=0, part=part))
        elif kind == "custom_tool_call":
            item["input"] = custom_input(self._arguments)
            found.append(self._in_item("custom_tool_call_input.delta", delta=item["input"]))
            found.append(self._in_item("custom_tool_call_input.done", input=item["input"]))
        else:
            told = {"arguments": item["arguments"], "name": item["name"]}
            found.append(self._in_item("function_call_arguments.done", **told))
        found.append(self._event("output_item.done", output_index=len(self._output) - 1, item=item))
        self._item = None
        return found

    def _in_item(self, name: str, /, **fields: Any) -> Event:
        """An event of the open item."""
        assert self._item is not None, "one is open"
        return self._event(name, item_id=self._item["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return f"response.{name}", {"type": f"response.{name}", "sequence_number": self._number, **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    """The part that holds an item's text."""
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PARTS[kind], "text": text, **extra}
